# A simulated world of workers that run the real protocol.

from libc.stdint cimport int32_t, int64_t

from fastps.kernels.shm.arena cimport Arena
from fastps.kernels.chaos.machine cimport Machine
from fastps.kernels.chaos.workers cimport Workers
from fastps.kernels.chaos.invariants cimport InvariantChecker

cdef class World:
    cdef object memory
    cdef int64_t memory_bytes
    cdef Arena arena
    cdef Machine machine
    cdef InvariantChecker checker
    cdef Workers workers

    cdef void _end(self) noexcept
