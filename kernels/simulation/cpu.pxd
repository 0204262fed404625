# The cores that simulated workers share.

from libc.stdint cimport int32_t, int64_t

from fastps.kernels.simulation.event_queue cimport queue_t

cdef struct working_t:
    int64_t left_ns     # core time that its step still needs
    int64_t blocked_ns  # time that the step then waits without a core
    int64_t came_ns     # when it entered the run queue
    int64_t done_ns     # when it last released a core, or ended the blocked time after that
    int32_t previous    # in the run queue
    int32_t next

cdef struct core_t:
    int64_t began_ns      # when this time slice began
    int64_t ends_ns       # when the step ends if nothing preempts it
    int64_t scheduled_ns  # time of its valid event; any other event of this core is void
    int32_t worker        # or -1

cdef class Cores:
    cdef bint shared
    cdef int64_t slice_ns, n_cores
    cdef double speed     # of each
    cdef working_t *workers
    cdef core_t *cores
    cdef int32_t first    # of the run queue, or -1
    cdef int32_t last
    cdef int64_t handing_out_ns  # time of the pending event that assigns idle cores, or -1
    cdef void begin(self, queue_t *queue, int32_t worker, int64_t cpu_ns, int64_t blocked_ns) noexcept nogil
    cdef void _enter(self, int32_t worker, int64_t now_ns) noexcept nogil
    cdef void _hand_out(self, queue_t *queue, int32_t core) noexcept nogil
    cdef void _schedule(self, queue_t *queue, int32_t core) noexcept nogil
    cdef void _hand_out_all(self, queue_t *queue) noexcept nogil
    cdef void run(self, queue_t *queue, int32_t core) noexcept nogil
