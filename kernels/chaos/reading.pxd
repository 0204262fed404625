# The readers of a simulated job.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from fastps.kernels.chaos.invariants cimport MAX_WATCHED_SHARDS, MAX_WORKERS, InvariantChecker
from fastps.kernels.chaos.machine cimport Machine
from fastps.kernels.protocol.lane cimport Lane
from fastps.kernels.protocol.reader_pins cimport ReaderPins
from fastps.kernels.shm.arena cimport Arena


cdef class Places:
    cdef Machine machine
    cdef bint attached[MAX_WORKERS]     # whether the process of a place is a reader at present
    # The places from `held` on have the names of process `holder`, which gives their buffers back.
    cdef int64_t held
    cdef int32_t holder
    cdef uint32_t holder_generation

    cdef bint is_taken(self, int64_t place) noexcept nogil
    cdef int64_t held_from(self) noexcept nogil


cdef class Reading:
    cdef Machine machine
    cdef Places places
    cdef Arena arena
    cdef InvariantChecker checker
    cdef Lane lane
    cdef ReaderPins pins
    cdef int32_t index
    cdef int64_t buffers[MAX_WATCHED_SHARDS]

    cdef void attach(self) noexcept nogil
    cdef void detach(self) noexcept nogil
    cdef bint look(self) noexcept nogil
    cdef uint32_t hold(self, uint32_t generation) noexcept nogil
    cdef void _read(self) noexcept nogil
    cdef void _sleep(self) noexcept nogil
    cdef bint _is_any_locked(self) noexcept nogil
    cdef void _check(self) noexcept nogil
    cdef void _lower(self, int64_t left, uint64_t ready) noexcept nogil
