# Cores that workers share, for the simulator.

from libc.stdint cimport int32_t, int64_t

from fastps.kernels.simulation.network cimport fps_queue

cdef struct working_t:
    int64_t left_ns     # what its step still needs of a core
    int64_t blocked_ns  # and waits without one afterwards
    int64_t came_ns     # into the line
    int64_t done_ns     # when it last gave a core back, or was done with waiting after it
    int32_t previous    # in line
    int32_t next

cdef struct core_t:
    int64_t began_ns      # with this slice
    int64_t ends_ns       # when the step would be done
    int64_t scheduled_ns  # of its event; earlier ones are void
    int32_t worker        # or -1

cdef class Cores:
    cdef readonly double count
    cdef readonly bint shared
    cdef readonly int64_t n_workers
    cdef readonly int64_t slice_ns
    cdef int64_t n_cores
    cdef double speed     # of each
    cdef working_t *workers
    cdef core_t *cores
    cdef int32_t first    # in line, or -1
    cdef int32_t last
    cdef int64_t handing_out_ns  # the event for those who came; -1: none
    cdef int begin(self, fps_queue *queue, int64_t now_ns, int32_t worker, int64_t cpu_ns, int64_t blocked_ns) noexcept nogil
    cdef void _enter(self, int32_t worker, int64_t now_ns) noexcept nogil
    cdef int _hand_out(self, fps_queue *queue, int64_t now_ns, int32_t core) noexcept nogil
    cdef int _schedule(self, fps_queue *queue, int64_t now_ns, int32_t core) noexcept nogil
    cdef int _hand_out_all(self, fps_queue *queue, int64_t now_ns) noexcept nogil
    cdef int run(self, fps_queue *queue, int64_t now_ns, int32_t core) noexcept nogil
