# The arena's control words, with C methods for the protocol.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from fastps.kernels.shm.counters cimport ArenaCounters
from fastps.kernels.scheduling.state cimport worker_t


cdef class Arena(ArenaCounters):
    cdef int _check_lane(self, uint32_t lane) except -1
    cdef int _check_shard(self, uint32_t shard) except -1
    cdef int _check_slot(self, uint32_t slot) except -1
    cdef tuple _buffers_of(self, uint64_t commit, uint32_t state_buffer)
    cdef int64_t _claim(self, uint32_t lane, int64_t process_id, bint rejoin) noexcept nogil
    cdef bint _is_served(self) noexcept nogil
    cdef void _drop_pins(self, uint32_t lane) noexcept nogil
    cdef bint _has_joined(self, uint32_t lane) noexcept nogil
    cdef bint _change(self, uint32_t lane, uint32_t generation, uint32_t seen, uint32_t state) noexcept nogil
    cdef uint32_t _generation_of(self, uint32_t lane, object generation) except? 0
    cdef void _move(self, uint32_t lane, uint32_t seen, uint32_t state) noexcept nogil
    cdef bint _end(self, uint32_t lane, uint32_t generation, uint32_t state) noexcept nogil
    cdef bint _expel(self, uint32_t lane, uint64_t damage) noexcept nogil
    cdef bint _is_count_right(self, uint32_t lane, uint64_t tail) noexcept nogil
    cdef uint64_t _decided(self, uint32_t lane) noexcept nogil
    cdef void _begin_ring(self, uint32_t lane, bint was_expelled) noexcept nogil
    cdef bint _mark_dead(self, uint32_t lane, uint32_t generation) noexcept nogil
    cdef worker_t *_committed(self, uint32_t lane, uint32_t shard) noexcept nogil
