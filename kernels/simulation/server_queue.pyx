"""Servers that take time: each handles one message after the other, in the order in which they came, and makes updates.

A shard has a station of its own, and in a tree one more for each leaf. A push that has arrived waits there, is handled, and is
an event of the scheduler then; the update that it makes keeps the station busy; each answer waits in the same line before it is
sent. A leaf that passes its sum on (a blocking call in Rudra) is held up until the root has taken it and given weights back;
decisions are those of the moment at which the leaf has handled the push. Times are rounded to whole ns at each message.
What it refuses to know: the scheduler, and what is decided.
"""

from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport calloc, free

from fastps.kernels.simulation.network cimport EVENT_SERVED, Network, fps_queue, fps_queue_push


cdef class Service:
    """Stations of all shards: float64[shards, 3] of ns for a message, for a byte of it, and for an update; all 0: no time.

    network: where the messages are; workers, groups: of the policy; groups leaves a shard, or 0.

    Raises ValueError for values out of range.

    >>> import numpy as np
    >>> from fastps.kernels.simulation.network import Network
    >>> network = Network(np.zeros(1), np.zeros(1, np.int64))
    >>> Service(np.zeros((1, 3)), network, 4, 0).takes_time
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
            station.first = station.last = -1

    def __dealloc__(self):
        free(self.stations)

    # -- stations ----------------------------------------------------------------------------------

    cdef int32_t own_of(self, int32_t shard) noexcept nogil:
        return shard * <int32_t> (1 + self.groups)

    cdef int32_t station_of(self, int32_t worker, int32_t shard) noexcept nogil:
        """Where the worker's messages for the shard are handled: at its leaf, in a tree."""
        if not self.groups:
            return shard
        return self.own_of(shard) + 1 + <int32_t> (worker * self.groups // self.n_workers)

    cdef int add(self, fps_queue *queue, int64_t now_ns, int32_t message) noexcept nogil:
        """A message is there, and waits for those before it. -1 when there is no memory."""
        cdef int32_t station = self.station_of(self.network.messages[message].worker, self.network.messages[message].shard)
        cdef station_t *at = &self.stations[station]
        self.network.messages[message].next = -1
        if at.last >= 0:
            self.network.messages[at.last].next = message
        else:
            at.first = message
        at.last = message
        at.length += 1
        at.peak = max(at.peak, at.length)
        return 0 if at.in_hand else self._begin(queue, now_ns, station)

    cdef int _begin(self, fps_queue *queue, int64_t now_ns, int32_t station) noexcept nogil:
        """Take the first message in hand; EVENT_SERVED comes when it has been handled."""
        cdef station_t *at = &self.stations[station]
        at.in_hand = 1
        self.work(now_ns, station, at.message_ns + at.byte_ns * self.network.messages[at.first].bytes)
        return fps_queue_push(queue, at.free_ns, EVENT_SERVED, station)

    cdef int32_t take(self, int32_t station) noexcept nogil:
        """The message that has been handled. Until go_on the station begins with no other: what it made goes first."""
        cdef station_t *at = &self.stations[station]
        cdef int32_t message = at.first
        at.first = self.network.messages[message].next
        if at.first < 0:
            at.last = -1
        at.length -= 1
        return message

    cdef int go_on(self, fps_queue *queue, int64_t now_ns, int32_t station) noexcept nogil:
        self.stations[station].in_hand = 0
        return self._begin(queue, now_ns, station) if self.stations[station].length else 0

    # -- work beside messages ----------------------------------------------------------------------

    cdef void work(self, int64_t now_ns, int32_t station, double work_ns) noexcept nogil:
        """So much work behind what the station has begun."""
        cdef station_t *at = &self.stations[station]
        at.free_ns = max(at.free_ns, now_ns) + <int64_t> (work_ns + 0.5)
        at.busy_ns += work_ns

    cdef void update(self, int64_t now_ns, int32_t shard, int64_t version) noexcept nogil:
        """The shard has come to this version: the updates since the last are work."""
        cdef station_t *at = &self.stations[self.own_of(shard)]
        if version != at.worked:
            self.work(now_ns, self.own_of(shard), at.update_ns * <double> (version - at.worked))
            at.worked = version

    cdef void relay(self, int64_t now_ns, int32_t worker, int32_t shard, double bytes, bint answers) noexcept nogil:
        """The leaf has passed a sum on, and with `answers` gets weights back: it goes on when the shard has done with both."""
        cdef station_t *root = &self.stations[self.own_of(shard)]
        cdef station_t *leaf = &self.stations[self.station_of(worker, shard)]
        self.work(now_ns, self.own_of(shard), (1 + answers) * (root.message_ns + root.byte_ns * bytes))
        leaf.free_ns = max(leaf.free_ns, root.free_ns)

    # -- looking -----------------------------------------------------------------------------------

    def use(self, int64_t station, int64_t until_ns):
        """What a station has done by a time that is not before its last message: busy share (0 to 1), most in line."""
        if not 0 <= station < self.n_stations:
            raise IndexError(f"expected a station of 0 to {self.n_stations - 1}, found {station}")
        cdef station_t *at = &self.stations[station]
        cdef double busy_ns = at.busy_ns - max(0, at.free_ns - until_ns)
        return {"busy_share": min(1.0, max(0.0, busy_ns / max(1, until_ns))), "peak": at.peak}
