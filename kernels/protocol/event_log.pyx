"""The events that one lane gave a shard's scheduler, in order, with the commits that published them: for a recorded job.

The log lies in the memory of the process that combines. Events of a commit that was not published are forgotten: another lane
decides them again, and logs them.
"""

from libc.stdint cimport int64_t, uint8_t
from libc.stdlib cimport free, realloc
from libc.string cimport memmove


cdef class EventLog:
    """The log of one lane in shard `shard`; it is off until `is_on` is set."""

    def __cinit__(self, int64_t shard):
        self.shard = shard

    def __dealloc__(self):
        free(self.events)

    cdef void begin(self, int64_t commit) noexcept nogil:
        """Begin a commit, by its number."""
        self.commit, self.order, self.count = commit, 0, self.published

    cdef void add(self, uint8_t kind, int64_t worker, int64_t position, int64_t at_ns) noexcept nogil:
        """Add an event of the present commit. Without memory for it the log ends, and its reader finds a commit missing."""
        cdef event_t *grown
        if not self.is_on:
            return
        if self.count == self.room:
            grown = <event_t *> realloc(self.events, (2 * self.room + 256) * sizeof(event_t))
            if grown == NULL:
                self.is_on = False
                return
            self.events, self.room = grown, 2 * self.room + 256
        self.events[self.count] = event_t(at_ns, self.commit, position, -1, worker, self.shard, self.order, kind, 1)
        self.count += 1
        self.order += 1

    cdef void publish(self, int64_t version) noexcept nogil:
        """Keep the events of the present commit, which published this version."""
        while self.published < self.count:
            self.events[self.published].version = version
            self.published += 1

    cdef bytes take(self):
        """Take the events of published commits, as the bytes of event_t."""
        found = (<char *> self.events)[:self.published * sizeof(event_t)] if self.published else b""
        self.count -= self.published
        memmove(self.events, self.events + self.published, self.count * sizeof(event_t))
        self.published = 0
        return found
