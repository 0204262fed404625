# The arena's control words, with C methods for the protocol.

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t

from fastps.kernels.shm.view cimport ArenaView
from fastps.kernels.scheduling.state cimport worker_t


@cython.final
cdef class Arena(ArenaView):
    cdef tuple _buffers_of(self, uint64_t commit, uint32_t state_buffer)
    cpdef int64_t claim(self, uint32_t lane, int64_t process_id, bint rejoin=*) except? -2 nogil
    cpdef bint is_served(self) noexcept nogil
    cpdef void lower_readers(self, uint64_t readers) noexcept nogil
    cdef void _drop_pins(self, uint32_t lane) noexcept nogil
    cpdef bint has_joined(self, uint32_t lane) noexcept nogil
    cdef bint _change(self, uint32_t lane, uint32_t generation, uint32_t seen, uint32_t state) noexcept nogil
    cdef uint32_t _generation_of(self, uint32_t lane, object generation) except? 0
    cdef void _move(self, uint32_t lane, uint32_t seen, uint32_t state) noexcept nogil
    cdef bint _end(self, uint32_t lane, uint32_t generation, uint32_t state) noexcept nogil
    cpdef bint expel(self, uint32_t lane, uint64_t damage) except -1 nogil
    cdef bint _is_count_right(self, uint32_t lane, uint64_t tail) noexcept nogil
    cdef uint64_t _decided(self, uint32_t lane) noexcept nogil
    cdef void _begin_ring(self, uint32_t lane, bint was_expelled) noexcept nogil
    cpdef bint mark_dead(self, uint32_t lane, uint32_t generation) except -1 nogil
    cdef worker_t *_committed(self, uint32_t lane, uint32_t shard) noexcept nogil
