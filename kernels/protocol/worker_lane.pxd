# A worker's own lane, for code that drives many workers without Python.

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t

from fastps.kernels.protocol.lane cimport Lane

cdef enum:
    # Distinct from the outcomes of try_combine.
    PUSH_FULL = 64
    PUSH_EARLY = 65
    PUSH_EXPELLED = 66


@cython.final
cdef class WorkerLane(Lane):
    cdef public int64_t steps, earlier_steps
    cdef readonly uint64_t posts
    cdef readonly uint32_t slot
    cdef readonly bint awaits
    cdef public int64_t granted_ns, wait_ns, compute_ns, push_ns, pushed_ns, samples, stale_blocks
    cdef public double loss
    cdef uint64_t *free_at      # of each slot: descriptors that must be done with before it may be written again

    cdef void _begin(self) noexcept nogil
    cdef int _push(self, int64_t now_ns, double scale, uint32_t samples, bint null) noexcept nogil
    cdef void _count_push(self, int64_t now_ns, uint32_t samples, bint null) noexcept nogil
    cpdef bint advance(self, int64_t now_ns, bint at_once) noexcept nogil
    cdef void _choose_slot(self) noexcept nogil
    cpdef void advance_late(self, int64_t now_ns) noexcept nogil
    cpdef void publish(self) noexcept nogil
