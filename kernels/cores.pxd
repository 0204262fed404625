# Cores that workers share, for the simulator.

from libc.stdint cimport int32_t, int64_t

from fastps.kernels.network cimport fps_link, fps_queue

cdef class Cores:
    cdef readonly double count
    cdef readonly bint shared
    cdef readonly int64_t n_workers
    cdef int64_t *blocked_ns
    cdef fps_link link
    cdef int begin(self, fps_queue *queue, int64_t now_ns, int32_t worker, int64_t cpu_ns, int64_t blocked_ns) noexcept nogil
    cdef int run(self, fps_queue *queue, int64_t now_ns) noexcept nogil
    cdef int _schedule(self, fps_queue *queue) noexcept nogil
