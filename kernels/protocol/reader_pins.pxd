# The pins of a process that only reads weights.

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t

from fastps.kernels.protocol.pins cimport Pins


@cython.final
cdef class ReaderPins(Pins):
    cpdef void begin(self) noexcept nogil
    cpdef void unpin(self) noexcept nogil
    cdef uint64_t _newest(self) noexcept nogil
    cdef void _want(self, uint64_t version) noexcept nogil
    cdef bint _is_there(self, uint64_t version, uint32_t *event) noexcept nogil
    cdef bint _wait(self, uint64_t version, int64_t slice_ns) noexcept nogil
