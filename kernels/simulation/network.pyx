"""The simulated network: full-duplex shared links with latency and rare large delays.

A message crosses one link, whose two ports (towards the server, towards the workers) are independent. The transfers in progress
on a port share it evenly. After its last byte a message takes the link's latency, and a drawn share of the messages takes a
fixed delay on top.

All transfers of a port have the same rate, min(most, bandwidth / n), so one number is enough: the bytes that each transfer has
been served since the port was last idle. A transfer ends when that number reaches its value at the transfer's start plus the
transfer's size (the virtual time of generalized processor sharing; Parekh and Gallager 1993). A start or an end costs one heap
operation, however many transfers share the port.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy

import numpy as np

from fastps.kernels.simulation.event_queue cimport *

cdef extern from "base/rng.h" nogil:
    uint64_t fps_stream(uint64_t seed, uint64_t stream)
    double fps_uniform(uint64_t key, uint64_t counter)

cdef enum:
    _FIRST_ROOM = 64

cdef uint64_t _DELAYS_STREAM = <uint64_t> -1  # beyond every worker's streams


# -- transfers that share a port --------------------------------------------------------------------

cdef inline double _rate(const link_t *link) noexcept nogil:
    """Bytes per ns of each transfer in progress. At least one must be."""
    cdef double share = link.bandwidth / <double> link.progress.length
    return link.most if 0 < link.most < share else share


cdef inline void _advance(link_t *link, int64_t now_ns) noexcept nogil:
    if link.progress.length:
        link.served += _rate(link) * <double> (now_ns - link.updated_ns)
        link.busy_ns += now_ns - link.updated_ns
    link.updated_ns = now_ns


cdef inline void _begin_transfer(link_t *link, int64_t now_ns, double bytes, int32_t transfer) noexcept nogil:
    """Positive doubles are ordered like the integers of their bits."""
    cdef double end
    cdef int64_t key
    _advance(link, now_ns)
    if link.progress.length == 0:
        link.served = 0
    end = link.served + bytes
    memcpy(&key, &end, sizeof(key))
    queue_add(&link.progress, key, 0, transfer)
    link.peak = max(link.peak, link.progress.length)


cdef inline double _left(const link_t *link) noexcept nogil:
    """Bytes that the next transfer to end still needs."""
    cdef double end
    memcpy(&end, &link.progress.events[0].key, sizeof(end))
    return end - link.served


cdef inline int64_t _next_ns(const link_t *link) noexcept nogil:
    """The time at which the next transfer ends unless another begins before, rounded up to a whole ns."""
    cdef double left_ns = _left(link) / _rate(link)
    cdef int64_t whole_ns = <int64_t> left_ns
    if left_ns <= 0:
        return link.updated_ns
    return link.updated_ns + whole_ns + (<double> whole_ns + 1e-3 < left_ns)


cdef inline bint _has_ended(const link_t *link) noexcept nogil:
    """Whether a transfer has ended by the link's time. Within 1/1000 ns counts as ended."""
    return link.progress.length and _left(link) <= 1e-3 * _rate(link)


cdef class Network:
    """Links with a bandwidth each, in bytes per second (0: unbounded), and a latency, in ns: float64[links] and int64[links].

    most: upper bound of one transfer in bytes per second (0: none), such as the bandwidth of a worker's own port: a number, or
    float64[links].
    half_duplex: one port serves both directions. late_pushes, late_pulls: (share of the messages, delay in ns). `seed` decides
    which messages are late.

    Raises ValueError for values out of range.

    >>> import numpy as np
    >>> Network(np.array([1e9]), np.array([1000]), seed=1).use(0, 1_000_000)["share"]
    0.0
    """

    def __cinit__(self, double[::1] bandwidth not None, int64_t[::1] latency_ns not None, *, most=0.0,
                  tuple late_pushes=(0.0, 0), tuple late_pulls=(0.0, 0), bint half_duplex=False, uint64_t seed=0):
        cdef int64_t link
        cdef double[::1] bound
        self.n_links, self.half_duplex = bandwidth.shape[0], half_duplex
        if self.n_links < 1 or latency_ns.shape[0] != self.n_links:
            raise ValueError(f"expected a latency for each of {self.n_links} links, found {latency_ns.shape[0]}")
        self.seed = fps_stream(seed, _DELAYS_STREAM)
        self.first_free = -1
        self.instant = True
        for direction, (share, delay_ns) in enumerate((late_pushes, late_pulls)):
            if not (0 <= share <= 1 and 0 <= delay_ns <= 10**15):
                raise ValueError(f"expected a share of 0 to 1 of late messages and a delay of 0 to 1e15 ns, "
                                 f"found {share} and {delay_ns}")
            self.late_share[direction], self.late_ns[direction] = share, delay_ns
            self.instant = self.instant and not share
        self.ports = <link_t *> calloc(2 * self.n_links, sizeof(link_t))
        self.latency_ns = latency_ns
        if not self.ports:
            raise MemoryError()
        bound = np.full(self.n_links, most, np.float64)
        for link in range(self.n_links):
            if not 0 <= bound[link] <= 1e15:
                raise ValueError(f"expected 0 to 1e15 bytes per second at most, found {bound[link]}")
            if not (0 <= bandwidth[link] <= 1e15 and 0 <= latency_ns[link] <= 10**15):
                raise ValueError(f"expected bandwidths of 0 to 1e15 bytes per second and latencies of 0 to 1e15 ns, "
                                 f"found {bandwidth[link]} and {latency_ns[link]}")
            self.instant = self.instant and not bandwidth[link] and not latency_ns[link] and not bound[link]
            for port in (2 * link, 2 * link + 1):
                self.ports[port].bandwidth = bandwidth[link] / 1e9
                self.ports[port].most = bound[link] / 1e9
                self.ports[port].scheduled_ns = -1
                if not bandwidth[link] and bound[link]:
                    # The link itself is unbounded: only the bound of each transfer applies.
                    self.ports[port].bandwidth = 1e30

    def __dealloc__(self):
        cdef int64_t port
        if self.ports:
            for port in range(2 * self.n_links):
                free(self.ports[port].progress.events)
        free(self.ports)
        free(self.messages)

    # -- messages ----------------------------------------------------------------------------------

    cdef message_t *make(self, queue_t *queue) noexcept nogil:
        """A new message, valid until the next is made; NULL where memory is exhausted, which the queue then says."""
        cdef int64_t room = 2 * self.room if self.room else _FIRST_ROOM
        cdef int32_t index = self.first_free
        cdef message_t *messages
        if index < 0:
            messages = <message_t *> realloc(self.messages, room * sizeof(message_t)) if room <= 1 << 30 else NULL
            if messages == NULL:
                queue.no_memory = True
                return NULL
            self.messages = messages
            for index in range(<int32_t> self.room, <int32_t> room):
                messages[index].next = index + 1 if index + 1 < room else -1
            index = <int32_t> self.room
            self.room = room
        self.first_free = self.messages[index].next
        return &self.messages[index]

    cdef void release(self, int32_t index) noexcept nogil:
        self.messages[index].next = self.first_free
        self.first_free = index

    cdef void append(self, list_t *list, int32_t index) noexcept nogil:
        """Append a message to a list."""
        self.messages[index].next = -1
        if list.length:
            self.messages[list.last].next = index
        else:
            list.first = index
        list.last = index
        list.length += 1

    cdef int32_t take_first(self, list_t *list) noexcept nogil:
        """Remove the first message of a list, which is not empty, and return it."""
        cdef int32_t index = list.first
        list.first = self.messages[index].next
        list.length -= 1
        return index

    cdef int64_t _delay_ns(self, const message_t *message) noexcept nogil:
        """Draw the delay of this message; most have none."""
        cdef int direction = message.kind == EVENT_PULLED
        if self.late_share[direction] == 0:
            return 0
        self.drawn += 1
        return self.late_ns[direction] if fps_uniform(self.seed, self.drawn) < self.late_share[direction] else 0

    cdef void send(self, queue_t *queue, int32_t index, int32_t link) noexcept nogil:
        """Send a message over a link; its event follows on arrival."""
        cdef message_t *message = &self.messages[index]
        cdef int32_t port = 2 * link + (message.kind == EVENT_PULLED and not self.half_duplex)
        message.extra_ns = self.latency_ns[link] + self._delay_ns(message)
        if message.bytes == 0 or self.ports[port].bandwidth == 0:
            self.ports[port].carried += message.bytes
            queue_add(queue, queue.now_ns + message.extra_ns, message.kind, index)
            return
        _begin_transfer(&self.ports[port], queue.now_ns, message.bytes, index)
        if self.ports[port].progress.no_memory:
            queue.no_memory = True
        else:
            self._schedule(queue, port)

    cdef void _schedule(self, queue_t *queue, int32_t port) noexcept nogil:
        """Schedule the port's event at the end of its next transfer, unless an earlier one is pending."""
        cdef link_t *link = &self.ports[port]
        cdef int64_t next_ns = _next_ns(link)
        if not 0 <= link.scheduled_ns <= next_ns:
            link.scheduled_ns = next_ns
            queue_add(queue, next_ns, EVENT_LINK, port)

    cdef void run_link(self, queue_t *queue, int32_t port) noexcept nogil:
        """Handle the port's event: schedule the arrival of every message whose transfer has ended."""
        cdef link_t *link = &self.ports[port]
        cdef int32_t index
        if queue.now_ns != link.scheduled_ns:
            return  # void: an earlier event replaced it
        link.scheduled_ns = -1
        _advance(link, queue.now_ns)
        while _has_ended(link):
            index = queue_pop(&link.progress).index
            link.carried += self.messages[index].bytes
            queue_add(queue, queue.now_ns + self.messages[index].extra_ns, self.messages[index].kind, index)
        if link.progress.length:
            self._schedule(queue, port)

    # -- statistics ----------------------------------------------------------------------------------

    def use(self, int64_t port, int64_t duration_ns):
        """Return a port's use in `duration_ns`: bytes that arrived, busy and used share (0 to 1), and most transfers at once.

        Ports 2 k and 2 k + 1 are link k's, towards the server and towards the workers.
        """
        if not 0 <= port < 2 * self.n_links:
            raise IndexError(f"expected a port of 0 to {2 * self.n_links - 1}, found {port}")
        cdef link_t *link = &self.ports[port]
        cdef double most = link.bandwidth * max(1, duration_ns)
        return {
            "bytes": link.carried,
            "busy_share": link.busy_ns / <double> max(1, duration_ns),
            "share": link.carried / most if 0 < link.bandwidth < 1e30 else 0.0,
            "peak": link.peak,
        }
