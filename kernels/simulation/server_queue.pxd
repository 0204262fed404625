# The queues of servers that take time to handle messages.

from libc.stdint cimport int32_t, int64_t

from fastps.kernels.scheduling.state cimport list_t
from fastps.kernels.simulation.event_queue cimport queue_t
from fastps.kernels.simulation.network cimport Network

cdef struct station_t:
    double message_ns   # service time of a message
    double byte_ns      # service time of each byte of it
    double update_ns    # service time of an update
    int64_t free_ns     # when it may begin with the next message
    double busy_ns
    list_t messages     # in its queue, including the one in service
    int64_t peak
    int64_t worked      # shards' own stations: updates counted as work so far
    int32_t in_service  # the end of a message's service is in the event queue

cdef class ServerQueue:
    cdef readonly bint takes_time
    cdef readonly int64_t n_stations
    cdef Network network
    cdef station_t *stations
    cdef int64_t groups, n_workers
    cdef int32_t own_of(self, int32_t shard) noexcept nogil
    cdef int32_t station_of(self, int32_t worker, int32_t shard) noexcept nogil
    cdef void add(self, queue_t *queue, int32_t message) noexcept nogil
    cdef int32_t take(self, int32_t station) noexcept nogil
    cdef void begin(self, queue_t *queue, int32_t station) noexcept nogil
    cdef void work(self, int64_t now_ns, int32_t station, double work_ns) noexcept nogil
    cdef void update(self, int64_t now_ns, int32_t shard, int64_t version) noexcept nogil
    cdef void relay(self, int64_t now_ns, int32_t worker, int32_t shard, double bytes, bint answers) noexcept nogil
