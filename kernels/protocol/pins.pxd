# What a process reads of published versions.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from fastps.kernels.shm.arena cimport Arena
from fastps.kernels.shm.arena_h cimport FPS_MAX_SHARDS


cdef uint64_t pin_published(const uint64_t *published, uint64_t *pin) noexcept nogil


cdef class Pins:
    cdef readonly Arena arena
    cdef readonly uint32_t index
    cdef uint32_t n_shards
    cdef uint64_t *pins[FPS_MAX_SHARDS]     # the word of each shard
    cdef uint64_t versions[FPS_MAX_SHARDS]  # of each shard, as pulled

    cdef uint64_t _pull(self, uint32_t shard) noexcept nogil
    cdef void _reads(self, uint32_t shard, uint64_t version) noexcept nogil
    cdef int64_t _buffer_of(self, uint64_t commit) noexcept nogil
