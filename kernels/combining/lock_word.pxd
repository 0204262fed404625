# The word of one shard's lock as one lane changes it.

from libc.stdint cimport uint32_t, uint64_t

from fastps.kernels.shm.arena cimport Arena
from fastps.kernels.shm.arena_h cimport fps_shard_header

# Outcomes of combining, and of one commit.
cdef enum:
    COMBINE_DONE = 0
    COMBINE_BUSY = 1
    COMBINE_FENCED = 2
    COMBINE_AWAITING = 3   # the lock is held until a helper gives its chunk back: check whether it lives, then resume
    COMBINE_BAD_DESCRIPTOR = -1
    COMBINE_NO_BUFFER = -2
    COMBINE_BAD_FOLD = -3
    COMBINE_BAD_STATE = -4  # the scheduler state cannot be walked


cdef class LockWord:
    cdef Arena arena
    cdef fps_shard_header *shard_header
    cdef uint32_t lane, shard
    cdef uint32_t generation    # of the owner that holds the lock: a later owner of the lane does not hold it
    cdef uint32_t *ended        # of each lane: the last owner whose process is proved to have ended, its generation + 1
    cdef uint64_t held          # the word as this lane saw or wrote it last while it holds the lock
    cdef uint64_t workspace     # where this lane writes while it holds the lock
    cdef bint sets_aside        # whether a lane that stopped may still write buffers, as of the time the lock was taken

    cdef bint take(self, uint64_t flags) noexcept nogil
    cdef bint release(self) noexcept nogil
    cdef bint let_go(self, uint64_t flag) noexcept nogil
    cdef bint clear(self, uint64_t flag) noexcept nogil
    cdef bint is_mine(self) noexcept nogil
    cdef bint confirm(self) noexcept nogil
    cdef bint recover(self, uint32_t dead_lane, uint32_t generation) noexcept nogil
    cdef bint take_over(self, uint32_t stopped) noexcept nogil
    cdef bint may_reuse(self) noexcept nogil
    cdef bint _has_ended(self, uint64_t left) noexcept nogil

    cdef void _hold(self, uint64_t held, uint64_t workspace) noexcept nogil
    cdef bint _is_spare_free(self, uint64_t seen, uint64_t workspace) noexcept nogil
    cdef bint _is_over_in(self, uint64_t workspace) noexcept nogil
