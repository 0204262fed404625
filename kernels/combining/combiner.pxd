# One shard's lock as one lane takes it.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from fastps.kernels.combining.batch cimport Batch
from fastps.kernels.combining.commit cimport Commit
from fastps.kernels.combining.event_log cimport EventLog
from fastps.kernels.combining.lane_reads cimport LaneReads
from fastps.kernels.combining.lock_word cimport LockWord
from fastps.kernels.combining.row_fold cimport RowFold
from fastps.kernels.combining.shared_fold cimport SharedFold
from fastps.kernels.scheduling.state cimport scheduler_t
from fastps.kernels.shm.arena cimport Arena
from fastps.kernels.shm.arena_h cimport fps_descriptor, fps_shard_header

# An event of virtual time: a lane's next descriptor; of lane -1 the timer that is due; of lane -2 - w worker w's next change.
cdef struct played_t:
    int64_t lane, at_ns


cdef class Combiner:
    cdef Arena arena
    cdef fps_shard_header *shard_header
    cdef uint32_t lane, shard
    cdef LockWord lock
    cdef int64_t now_ns         # when the lock was tried: decides which timers are due
    cdef LaneReads lanes
    cdef SharedFold fold
    cdef RowFold rows
    cdef Batch batch
    cdef Commit commit
    cdef bint hands_over        # a server or the shard's own device folds, not this lane: it releases without draining
    cdef int awaiting           # what is waited for while COMBINE_AWAITING
    cdef EventLog log
    cdef const played_t *played  # in virtual time: the commit's events
    cdef int64_t n_played        # so many are left; _LIVE: the events are those of the shard

    cdef int try_combine(self, int64_t now_ns) noexcept nogil
    cdef bint take(self, uint64_t flags=*) noexcept nogil
    cdef int play(self, const played_t *events, int64_t count) noexcept nogil
    cdef int _end_late(self) noexcept nogil
    cdef int resume(self, int64_t now_ns) noexcept nogil
    cdef bint is_offered(self) noexcept nogil
    cdef int run(self, int outcome=*) noexcept nogil
    cdef int recover_lock(self, uint32_t dead_lane, uint32_t generation, int64_t now_ns) noexcept nogil
    cdef int pass_by(self, uint32_t stopped, int64_t now_ns) noexcept nogil
    cdef object holder(self)
    cdef int release(self, bint publish, int64_t now_ns, bint advances) noexcept nogil
    cdef void wake_all(self) noexcept nogil
    cdef void call(self, uint32_t index) noexcept nogil

    cdef int _offer(self, int outcome) noexcept nogil
    cdef void _wake_next(self) noexcept nogil
    cdef bint _waits(self, uint32_t index, uint64_t head) noexcept nogil
    cdef uint64_t _undecided(self, uint32_t index) noexcept nogil
    cdef uint64_t _head(self, uint32_t index) noexcept nogil
    cdef bint _is_wanted(self) noexcept nogil
    cdef int _hand_over(self) noexcept nogil
    cdef int _drain(self) noexcept nogil
    cdef int _commit_once(self) noexcept nogil
    cdef int _next_event(self, scheduler_t *state) noexcept nogil
    cdef int _logged(self, int outcome) noexcept nogil
    cdef int _fire(self, scheduler_t *state) noexcept nogil
    cdef int _next_played(self, scheduler_t *state) noexcept nogil
    cdef int _take(self, scheduler_t *state, uint32_t lane, const fps_descriptor *descriptor) noexcept nogil
    cdef int _receive(self, scheduler_t *state, uint32_t lane, const fps_descriptor *descriptor) noexcept nogil
