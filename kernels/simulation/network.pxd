# Messages between workers and servers, for the simulator.

from libc.stdint cimport int32_t, int64_t, uint64_t

from fastps.kernels.scheduling.state cimport list_t
from fastps.kernels.simulation.event_queue cimport queue_t

cdef struct link_t:
    double bandwidth        # bytes per ns of all transfers together; 0: unbounded
    double most             # upper bound of one transfer in bytes per ns; 0: none
    double served           # bytes that each transfer has been served since the link was idle
    double carried          # bytes of transfers that ended
    int64_t updated_ns      # time at which `served` holds
    int64_t busy_ns         # time with a transfer in progress
    int64_t scheduled_ns    # time of its pending event; -1: none
    int64_t peak            # most transfers at once
    queue_t progress        # transfers by the value of `served` at which they end

cdef struct message_t:
    int32_t worker, shard
    int32_t kind            # EVENT_PUSHED or EVENT_PULLED
    int32_t next            # in a list: of free messages, of those that wait for a server, or of pushes that wait for a fold
    int64_t step            # PULLED: the granted step
    int64_t version         # PUSHED: its timestamp; PULLED: the weights' version
    int64_t read_version    # PUSHED: the version of this shard that the gradient was computed with
    int64_t samples
    int64_t extra_ns        # latency and delay, after the transfer
    double bytes

cdef class Network:
    cdef readonly int64_t n_links
    cdef bint instant, half_duplex
    cdef link_t *ports
    cdef int64_t[::1] latency_ns
    cdef message_t *messages
    cdef int64_t room
    cdef int32_t first_free
    cdef uint64_t seed, drawn
    cdef double late_share[2]
    cdef int64_t late_ns[2]
    cdef message_t *make(self, queue_t *queue) noexcept nogil
    cdef void release(self, int32_t index) noexcept nogil
    cdef void append(self, list_t *list, int32_t index) noexcept nogil
    cdef int32_t take_first(self, list_t *list) noexcept nogil
    cdef int64_t _delay_ns(self, const message_t *message) noexcept nogil
    cdef void send(self, queue_t *queue, int32_t index, int32_t link) noexcept nogil
    cdef void _schedule(self, queue_t *queue, int32_t port) noexcept nogil
    cdef void run_link(self, queue_t *queue, int32_t port) noexcept nogil
