"""The simulated network: full-duplex shared links with latency and rare large delays.

A message crosses one link, whose two ports (towards the server, towards the workers) are independent. The transfers in progress
on a port share it evenly. After its last byte a message takes the link's latency, and a drawn share of the messages takes a
fixed delay on top.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free, realloc

import numpy as np

cdef extern from "base/rng.h" nogil:
    uint64_t fps_stream(uint64_t seed, uint64_t stream)
    double fps_uniform(uint64_t key, uint64_t counter)

cdef enum:
    _FIRST_ROOM = 64

cdef uint64_t _DELAYS_STREAM = <uint64_t> -1  # beyond every worker's streams


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
        self.ports = <fps_link *> calloc(2 * self.n_links, sizeof(fps_link))
        self.latency_ns = <int64_t *> calloc(self.n_links, sizeof(int64_t))
        if not self.ports or not self.latency_ns:
            raise MemoryError()
        bound = np.full(self.n_links, most, np.float64)
        for link in range(self.n_links):
            if not 0 <= bound[link] <= 1e15:
                raise ValueError(f"expected 0 to 1e15 bytes per second at most, found {bound[link]}")
            if not (0 <= bandwidth[link] <= 1e15 and 0 <= latency_ns[link] <= 10**15):
                raise ValueError(f"expected bandwidths of 0 to 1e15 bytes per second and latencies of 0 to 1e15 ns, "
                                 f"found {bandwidth[link]} and {latency_ns[link]}")
            self.latency_ns[link] = latency_ns[link]
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
                fps_queue_free(&self.ports[port].progress)
        free(self.ports)
        free(self.latency_ns)
        free(self.messages)

    # -- messages ----------------------------------------------------------------------------------

    cdef int32_t allocate(self) noexcept nogil:
        """Return the index of a free message, or -1 when memory is exhausted."""
        cdef int64_t room = 2 * self.room if self.room else _FIRST_ROOM
        cdef int32_t index = self.first_free
        cdef message_t *messages
        if index < 0:
            if room > 1 << 30:
                return -1
            messages = <message_t *> realloc(self.messages, room * sizeof(message_t))
            if messages == NULL:
                return -1
            self.messages = messages
            for index in range(<int32_t> self.room, <int32_t> room):
                messages[index].next = index + 1 if index + 1 < room else -1
            index = <int32_t> self.room
            self.room = room
        self.first_free = self.messages[index].next
        return index

    cdef void release(self, int32_t index) noexcept nogil:
        self.messages[index].next = self.first_free
        self.first_free = index

    cdef int64_t _delay_ns(self, const message_t *message) noexcept nogil:
        """Draw the delay of this message; most have none."""
        cdef int direction = message.kind == EVENT_PULLED
        if self.late_share[direction] == 0:
            return 0
        self.drawn += 1
        return self.late_ns[direction] if fps_uniform(self.seed, self.drawn) < self.late_share[direction] else 0

    cdef int send(self, fps_queue *queue, int64_t now_ns, int32_t index, int32_t link) noexcept nogil:
        """Send a message over a link; its event follows on arrival. Return -1 when memory is exhausted."""
        cdef message_t *message = &self.messages[index]
        cdef int32_t port = 2 * link + (message.kind == EVENT_PULLED and not self.half_duplex)
        message.extra_ns = self.latency_ns[link] + self._delay_ns(message)
        if message.bytes == 0 or self.ports[port].bandwidth == 0:
            self.ports[port].carried += message.bytes
            return fps_queue_push(queue, now_ns + message.extra_ns, message.kind, index)
        if fps_link_begin(&self.ports[port], now_ns, message.bytes, index) < 0:
            return -1
        return self._schedule(queue, port)

    cdef int _schedule(self, fps_queue *queue, int32_t port) noexcept nogil:
        """Schedule the port's event at the end of its next transfer, unless an earlier one is pending."""
        cdef fps_link *link = &self.ports[port]
        cdef int64_t next_ns = fps_link_next_ns(link)
        if 0 <= link.scheduled_ns <= next_ns:
            return 0
        link.scheduled_ns = next_ns
        return fps_queue_push(queue, next_ns, EVENT_LINK, port)

    cdef int run_link(self, fps_queue *queue, int64_t now_ns, int32_t port) noexcept nogil:
        """Handle the port's event: schedule the arrival of every message whose transfer has ended."""
        cdef fps_link *link = &self.ports[port]
        cdef int32_t index
        if now_ns != link.scheduled_ns:
            return 0  # void: an earlier event replaced it
        link.scheduled_ns = -1
        fps_link_advance(link, now_ns)
        while True:
            index = fps_link_ended(link)
            if index < 0:
                break
            link.carried += self.messages[index].bytes
            if fps_queue_push(queue, now_ns + self.messages[index].extra_ns, self.messages[index].kind, index) < 0:
                return -1
        return self._schedule(queue, port) if link.progress.length else 0

    # -- statistics ----------------------------------------------------------------------------------

    def use(self, int64_t port, int64_t duration_ns):
        """Return a port's use in `duration_ns`: bytes that arrived, busy and used share (0 to 1), and most transfers at once.

        Ports 2 k and 2 k + 1 are link k's, towards the server and towards the workers.
        """
        if not 0 <= port < 2 * self.n_links:
            raise IndexError(f"expected a port of 0 to {2 * self.n_links - 1}, found {port}")
        cdef fps_link *link = &self.ports[port]
        cdef double most = link.bandwidth * max(1, duration_ns)
        return {
            "bytes": link.carried,
            "busy_share": link.busy_ns / <double> max(1, duration_ns),
            "share": link.carried / most if 0 < link.bandwidth < 1e30 else 0.0,
            "peak": link.peak,
        }
