# The compute-time models, for the simulator.

from libc.stdint cimport int64_t, uint64_t

cdef enum:
    STREAMS = 4             # a worker's streams of random numbers
    STREAM_COMPUTE = 0
    STREAM_BURSTS = 1

cdef struct compute_worker_t:
    double factor           # multiplies the compute time
    uint64_t key            # of its streams
    uint64_t burst_key, drawn, bursts_drawn
    int64_t burst_from_ns, burst_until_ns   # the burst drawn last
    int64_t first, last, next               # replay: bounds of its times, and the next one
    int64_t drawn_at        # index of the time drawn last

cdef class ComputeTimes:
    cdef int64_t n_workers
    cdef int model
    cdef double location_ns, spread, burst_every_ns, burst_length_ns, burst_factor
    cdef compute_worker_t *workers
    cdef int64_t[::1] times
    cdef int64_t[::1] blocked   # empty: no step waits
    cdef double _plain_ns(self, compute_worker_t *worker) noexcept nogil
    cdef double _burst(self, compute_worker_t *worker, int64_t now_ns) noexcept nogil
    cdef int64_t draw_ns(self, int64_t worker, int64_t now_ns) noexcept nogil
    cdef int64_t blocked_ns(self, int64_t worker) noexcept nogil
