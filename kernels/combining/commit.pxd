# The commits of one shard, for the lane that holds its lock.

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t

from fastps.kernels.shm.arena cimport Arena
from fastps.kernels.combining.lock_word cimport LockWord
from fastps.kernels.shm.arena_h cimport fps_shard_header, fps_work
from fastps.kernels.combining.batch cimport Batch
from fastps.kernels.combining.row_fold cimport RowFold
from fastps.kernels.scheduling.state cimport scheduler_t
from fastps.kernels.combining.shared_fold cimport SharedFold


@cython.final
cdef class Commit:
    cdef Arena arena
    cdef fps_shard_header *shard_header
    cdef uint32_t shard
    cdef LockWord lock
    cdef SharedFold fold
    cdef Batch batch            # what is folded
    cdef RowFold rows           # the rows of it, which are written in place
    cdef bint is_damaged        # whether the rows of an unfinished commit could not be restored
    cdef uint64_t seen          # the commit word that the flip expects
    cdef scheduler_t expected   # what must hold of the shard's scheduler state
    cdef bint is_checked        # whether the state was checked since the lock was taken
    cdef int64_t spare_buffer   # the weights buffer that `find_spare` gave out, or that is folded into
    cdef uint32_t spare_state   # the state buffer that goes with it
    # Scratch, allocated once: the lanes to wake once the shard lock is given back.
    cdef uint32_t *to_wake
    cdef uint32_t n_to_wake
    cdef bint wakes_readers     # the same for the readers that sleep

    cdef scheduler_t *begin(self) noexcept nogil
    cdef int fold_and_flip(self, scheduler_t *state) noexcept nogil
    cdef int finish(self) noexcept nogil
    cdef int64_t find_spare(self) noexcept nogil
    cdef int publish_spare(self, bint advances) noexcept nogil
    cdef int64_t last_used(self, uint32_t readers) noexcept nogil
    cdef bint is_late(self) noexcept nogil
    cdef bint change_epoch(self) noexcept nogil
    cdef void move(self) noexcept nogil
    cdef void repair(self) noexcept nogil
    cdef void wake(self) noexcept nogil

    cdef bint _is_sound(self, const scheduler_t *state) noexcept nogil
    cdef scheduler_t *_inactive(self) noexcept nogil
    cdef scheduler_t *_prepare(self) noexcept nogil
    cdef int64_t _free_buffer(self) noexcept nogil
    cdef void _mark_used(self, uint64_t *pinned, uint32_t readers) noexcept nogil
    cdef void _carry(self, uint32_t n_pushes) noexcept nogil
    cdef const uint64_t *_carried_by(self, uint32_t n_pushes, uint64_t *lane) noexcept nogil
    cdef uint32_t _ready_readers(self) noexcept nogil
    cdef uint32_t _free_state(self) noexcept nogil
    cdef bint _sets_aside(self) noexcept nogil
    cdef const fps_work *_left_item(self) noexcept nogil
    cdef int _end_fold(self, int outcome) noexcept nogil
    cdef int _write_record(self, scheduler_t *state, uint32_t state_buffer) noexcept nogil
    cdef int _flip(self, scheduler_t *state, uint64_t record) noexcept nogil
    cdef void _publish(self, scheduler_t *state) noexcept nogil
    cdef void _publish_lane_shard(self, scheduler_t *state, uint32_t index) noexcept nogil
    cdef void _queue_wake(self, uint32_t index) noexcept nogil
    cdef void _serve_wanted(self, uint64_t version) noexcept nogil
    cdef void _call_readers(self) noexcept nogil
