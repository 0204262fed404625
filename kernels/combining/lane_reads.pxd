# The lanes as the combiner of a shard reads them.

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t

from fastps.kernels.combining.event_log cimport EventLog
from fastps.kernels.scheduling.state cimport scheduler_t
from fastps.kernels.shm.arena cimport Arena
from fastps.kernels.shm.arena_h cimport fps_descriptor

cdef enum:
    NOTHING = 100  # no event; beyond the scheduler's actions

# A lane as it was read at the begin of a commit.
cdef struct lane_read_t:
    uint64_t tail
    uint64_t head           # as it was before the commit
    uint64_t begins         # descriptors below are of owners that were expelled
    int64_t first_clock     # where a worker joins: the clock at which the first shard admitted it, or -1
    uint32_t member
    bint closed             # whether what an earlier owner posted is damaged, and not read in this commit


@cython.final
cdef class LaneReads:
    cdef Arena arena
    cdef uint32_t shard
    cdef EventLog log           # of the workers that come and go
    cdef lane_read_t *seen      # of each lane; allocated once
    cdef int bad_lane           # of the last COMBINE_BAD_DESCRIPTOR
    cdef uint64_t damage        # of that lane: fps_damage_pack

    cdef void read(self) noexcept nogil
    cdef fps_descriptor *earliest(self, scheduler_t *state, uint32_t *lane) noexcept nogil
    cdef int bad(self, uint32_t lane, uint64_t what, uint64_t found) noexcept nogil
    cdef int check(self, const scheduler_t *state, uint32_t lane, const fps_descriptor *descriptor) noexcept nogil
    cdef bint close(self, const scheduler_t *state, uint32_t lane) noexcept nogil
    cdef int next_change(self, scheduler_t *state, int64_t now_ns, uint32_t first, uint32_t end) noexcept nogil
    cdef int _note(self, scheduler_t *state, uint32_t lane, int kind, int action) noexcept nogil
    cdef bint _has_heir(self, const scheduler_t *state, uint32_t lane) noexcept nogil
    cdef bint _move_on(self, scheduler_t *state, uint32_t lane) noexcept nogil
    cdef int64_t _pushes_in(self, uint32_t lane, uint64_t first, uint64_t end) noexcept nogil
    cdef int64_t _clock_for(self, const scheduler_t *state, uint32_t lane) noexcept nogil
    cdef int64_t _first_clock(self, uint32_t lane) noexcept nogil
