# What a process reads of published versions.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from fastps.kernels.shm.arena cimport Arena
from fastps.kernels.shm.arena_h cimport FPS_MAX_SHARDS


cdef class Pins:
    cdef readonly Arena arena
    cdef readonly uint32_t index
    cdef uint32_t n_shards
    cdef uint64_t *pins[FPS_MAX_SHARDS]     # the word of each shard
    cdef uint64_t versions[FPS_MAX_SHARDS]  # of each shard, as pulled

    cdef uint64_t _pull(self, uint32_t shard) noexcept nogil
    cdef void _reads(self, uint32_t shard, uint64_t version) noexcept nogil
    cdef int64_t _buffer_of(self, uint64_t commit) noexcept nogil


cdef class LanePins(Pins):
    cdef uint64_t fresh                     # shards that were pulled since the last push before these pulls, as bits
    cdef bint has_pushed                    # since the last pull

    cdef uint64_t _prefetch(self, uint32_t shard) noexcept nogil
    cdef void _keep(self, uint32_t shard, uint64_t buffer) noexcept nogil
    cdef void _take(self, uint32_t shard, uint64_t buffer, uint64_t version) noexcept nogil
    cdef uint64_t _oldest(self) noexcept nogil
