# A lane as its worker uses it, with C methods for code that drives many workers without Python.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from fastps.kernels.protocol.shard_locks cimport ShardLocks
from fastps.kernels.shm.arena_h cimport fps_lane

cdef enum:
    LANE_UNSERVED = 67  # distinct from the outcomes of try_combine and of a push


cdef class Lane(ShardLocks):
    cdef fps_lane *words
    cdef public uint32_t weight  # the gradients that the next push is a sum of
    cdef readonly bint served    # whether a server combines for this lane
    cdef int64_t *ahead          # of each shard: by how much its clock of this lane is ahead of the first shard's

    cdef void _set_versions(self, uint32_t slot) noexcept nogil
    cdef bint _post(self, int kind, uint64_t step, uint32_t slot, uint64_t read_version, int64_t post_ns, double scale,
                    double loss, uint32_t samples) noexcept nogil
    cdef uint64_t _done(self, uint32_t lane) noexcept nogil
    cdef bint _is_last(self, uint32_t started) noexcept nogil
    cdef void _leave_to_server(self, bint served) noexcept nogil
    cdef void _sleep(self, uint32_t seen, int64_t spins, int64_t slice_ns) noexcept nogil
    cdef void _poll_awake(self, uint32_t seen, int64_t polls) noexcept nogil
    cdef bint _is_expelled(self) noexcept nogil
    cdef int64_t _begin_steps(self) noexcept nogil
    cdef int64_t _granted(self, uint32_t shard) noexcept nogil
    cdef int64_t _due_ns(self) noexcept nogil
    cdef bint _reached(self, int64_t granted, uint64_t done, uint32_t shards) noexcept nogil
    cdef bint _wait(self, int64_t granted, uint64_t done, int64_t spins, int64_t slice_ns, uint32_t shards) noexcept nogil
    cdef bint _wait_awake(self, int64_t granted, uint64_t done, int64_t polls, uint32_t shards) noexcept nogil
