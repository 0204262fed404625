# The commits of one shard as the combiner of its turn makes them, for combiner.pyx and for who writes by hand (turn.pyx).

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t

from fastps.kernels.shm.arena cimport Arena
from fastps.kernels.shm.arena_h cimport fps_shard_header
from fastps.kernels.protocol.batch cimport Batch
from fastps.kernels.scheduling.state cimport scheduler_t
from fastps.kernels.protocol.shared_fold cimport SharedFold

# Outcomes of a shard lock, and of a commit in it.
cdef enum:
    COMBINE_DONE = 0
    COMBINE_BUSY = 1
    COMBINE_FENCED = 2
    COMBINE_AWAITING = 3   # held, until a helper has given its chunk back: look whether it lives, then resume
    COMBINE_BAD_DESCRIPTOR = -1
    COMBINE_NO_BUFFER = -2
    COMBINE_BAD_FOLD = -3
    COMBINE_BAD_STATE = -4  # the scheduler's state cannot be walked


@cython.final
cdef class Commit:
    cdef Arena arena
    cdef fps_shard_header *shard_header
    cdef uint32_t shard
    cdef SharedFold fold
    cdef Batch batch            # what is folded
    cdef uint64_t seen          # the commit word that the flip expects
    cdef scheduler_t expected   # what must hold of the shard's state
    cdef bint is_checked        # whether the state was looked at in this turn: from then on it is this lane's own
    cdef int64_t spare_buffer   # the weights buffer that `find_spare` gave out, or that is folded into
    cdef uint32_t spare_state   # the state buffer that goes with it
    # Scratch, allocated once: the lanes to wake once the shard lock is given back.
    cdef uint32_t *to_wake
    cdef uint32_t n_to_wake

    cdef scheduler_t *begin(self) noexcept nogil
    cdef int fold_and_flip(self, scheduler_t *state) noexcept nogil
    cdef int finish(self) noexcept nogil
    cdef int64_t find_spare(self) noexcept nogil
    cdef int publish_spare(self) noexcept nogil
    cdef void change_epoch(self, uint64_t epoch) noexcept nogil
    cdef void repair(self) noexcept nogil
    cdef void wake(self) noexcept nogil

    cdef bint _is_sound(self, const scheduler_t *state) noexcept nogil
    cdef scheduler_t *_inactive(self) noexcept nogil
    cdef scheduler_t *_prepare(self) noexcept nogil
    cdef int64_t _free_buffer(self) noexcept nogil
    cdef uint32_t _free_state(self) noexcept nogil
    cdef int _end_fold(self, int outcome) noexcept nogil
    cdef int _write_record(self, scheduler_t *state, uint32_t state_buffer) noexcept nogil
    cdef int _flip(self, scheduler_t *state, uint64_t record) noexcept nogil
    cdef void _publish(self, scheduler_t *state) noexcept nogil
    cdef void _publish_lane_shard(self, scheduler_t *state, uint32_t index) noexcept nogil
    cdef void _queue_wake(self, uint32_t index) noexcept nogil
