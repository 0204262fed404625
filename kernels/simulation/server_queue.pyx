"""Servers that take time: each station handles one message at a time, first in, first out, and applies updates.

A shard has its own station, and in a tree one more for each leaf. A push that has arrived waits there, is handled, and then
becomes an event of the scheduler. Its update keeps the station busy, and each answer waits in the same queue before it is sent.
A leaf that passes its sum on (a blocking call in Rudra) is blocked until the root has taken the sum and returned weights;
decisions are those of the moment at which the leaf has handled the push. Times are rounded to whole ns at each message.
"""

from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport calloc, free

from fastps.kernels.simulation.event_queue cimport EVENT_SERVED, queue_add
from fastps.kernels.simulation.network cimport Network


cdef class ServerQueue:
    """Stations of all shards: float64[shards, 3] of ns for a message, for a byte of it, and for an update; all 0: no time.

    network: holds the messages; workers, groups: the policy's; each shard has `groups` leaves, or none for 0.

    Raises ValueError for values out of range.

    >>> import numpy as np
    >>> from fastps.kernels.simulation.network import Network
    >>> network = Network(np.zeros(1), np.zeros(1, np.int64))
    >>> ServerQueue(np.zeros((1, 3)), network, 4, 0).takes_time
    False
    """

    def __cinit__(self, double[:, ::1] times_ns not None, Network network not None, int64_t workers, int64_t groups):
        cdef int64_t shard, number
        cdef station_t *station
        if times_ns.shape[1] != 3:
            raise ValueError(f"expected 3 times for each shard, found {times_ns.shape[1]}")
        for shard in range(times_ns.shape[0]):
            for number in range(3):
                if not 0 <= times_ns[shard, number] <= 1e15:
                    raise ValueError(f"expected times of a server of 0 to 1e15 ns, found {times_ns[shard, number]:g}")
                self.takes_time = self.takes_time or times_ns[shard, number] > 0
        self.network, self.n_workers, self.groups = network, workers, groups
        self.n_stations = times_ns.shape[0] * (1 + groups)
        self.stations = <station_t *> calloc(self.n_stations, sizeof(station_t))
        if not self.stations:
            raise MemoryError()
        for number in range(self.n_stations):
            station = &self.stations[number]
            shard = number // (1 + groups)
            station.message_ns, station.byte_ns = times_ns[shard, 0], times_ns[shard, 1]
            station.update_ns = times_ns[shard, 2]

    def __dealloc__(self):
        free(self.stations)

    # -- stations ----------------------------------------------------------------------------------

    cdef int32_t own_of(self, int32_t shard) noexcept nogil:
        return shard * <int32_t> (1 + self.groups)

    cdef int32_t station_of(self, int32_t worker, int32_t shard) noexcept nogil:
        """Return the station that handles the worker's messages for the shard: in a tree, its leaf."""
        if not self.groups:
            return shard
        return self.own_of(shard) + 1 + <int32_t> (worker * self.groups // self.n_workers)

    cdef void add(self, queue_t *queue, int32_t message) noexcept nogil:
        """Append a message to its station's queue."""
        cdef int32_t station = self.station_of(self.network.messages[message].worker, self.network.messages[message].shard)
        cdef station_t *at = &self.stations[station]
        self.network.append(&at.messages, message)
        at.peak = max(at.peak, at.messages.length)
        if not at.in_service:
            self.begin(queue, station)

    cdef void begin(self, queue_t *queue, int32_t station) noexcept nogil:
        """Begin the first message's service, if there is one; EVENT_SERVED follows at its end."""
        cdef station_t *at = &self.stations[station]
        at.in_service = at.messages.length > 0
        if at.in_service:
            self.work(queue.now_ns, station, at.message_ns + at.byte_ns * self.network.messages[at.messages.first].bytes)
            queue_add(queue, at.free_ns, EVENT_SERVED, station)

    cdef int32_t take(self, int32_t station) noexcept nogil:
        """Remove and return the handled message. Until `begin` the station is idle, so that answers to it queue first."""
        return self.network.take_first(&self.stations[station].messages)

    # -- work besides messages ---------------------------------------------------------------------

    cdef void work(self, int64_t now_ns, int32_t station, double work_ns) noexcept nogil:
        """Add work after what the station has begun."""
        cdef station_t *at = &self.stations[station]
        at.free_ns = max(at.free_ns, now_ns) + <int64_t> (work_ns + 0.5)
        at.busy_ns += work_ns

    cdef void update(self, int64_t now_ns, int32_t shard, int64_t version) noexcept nogil:
        """Count the updates since the shard's last counted version as work."""
        cdef station_t *at = &self.stations[self.own_of(shard)]
        if version != at.worked:
            self.work(now_ns, self.own_of(shard), at.update_ns * <double> (version - at.worked))
            at.worked = version

    cdef void relay(self, int64_t now_ns, int32_t worker, int32_t shard, double bytes, bint answers) noexcept nogil:
        """Block the leaf that passed its sum on until the root has handled it and, with `answers`, returned weights."""
        cdef station_t *root = &self.stations[self.own_of(shard)]
        cdef station_t *leaf = &self.stations[self.station_of(worker, shard)]
        self.work(now_ns, self.own_of(shard), (1 + answers) * (root.message_ns + root.byte_ns * bytes))
        leaf.free_ns = max(leaf.free_ns, root.free_ns)

    # -- statistics ----------------------------------------------------------------------------------

    def use(self, int64_t station, int64_t until_ns):
        """Return a station's busy share (0 to 1) and longest queue up to a time not before its last message."""
        if not 0 <= station < self.n_stations:
            raise IndexError(f"expected a station of 0 to {self.n_stations - 1}, found {station}")
        cdef station_t *at = &self.stations[station]
        cdef double busy_ns = at.busy_ns - max(0, at.free_ns - until_ns)
        return {"busy_share": min(1.0, max(0.0, busy_ns / max(1, until_ns))), "peak": at.peak}
