# The pins of a process that only reads weights.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from fastps.kernels.shm.arena cimport Arena
from fastps.kernels.shm.arena_h cimport FPS_MAX_SHARDS

cdef class ReaderPins:
    cdef readonly Arena arena
    cdef readonly uint32_t index
    cdef uint64_t versions[FPS_MAX_SHARDS]  # of each shard, as pulled

    cdef void _begin(self) noexcept nogil
    cdef uint64_t _newest(self) noexcept nogil
    cdef void _want(self, uint64_t version) noexcept nogil
    cdef bint _is_there(self, uint64_t version, uint32_t *event) noexcept nogil
    cdef bint _wait(self, uint64_t version, int64_t slice_ns) noexcept nogil
    cdef uint64_t _pull(self, uint32_t shard) noexcept nogil
