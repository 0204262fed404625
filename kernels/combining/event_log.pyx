"""The events that one lane gave a shard's scheduler, in order, with the commits that published them: for a recorded job.

The log is a mapped file, so that what was published outlives the process. Events of a commit that was not published stay
unwritten: another lane decides them again, and logs them.
"""

from posix.fcntl cimport posix_fallocate
from posix.mman cimport MAP_FAILED, MAP_SHARED, PROT_READ, PROT_WRITE, mmap, mremap, munmap
from posix.unistd cimport close

cdef extern from "<sys/mman.h>" nogil:
    enum:
        MREMAP_MAYMOVE

cdef enum:
    _CHUNK = 4096  # events: a whole number of pages


cdef class EventLog:
    """The log of one lane in shard `shard`; it is off until it has a file."""

    def __cinit__(self, int64_t shard):
        self.shard = shard
        self.descriptor = -1

    def __dealloc__(self):
        self.begin_in(-1)

    cdef void begin_in(self, int descriptor) noexcept nogil:
        """Log from now on into an empty file, which is the log's own; -1: no more."""
        if self.events != NULL:
            munmap(self.events, self.room * sizeof(event_t))
        if self.descriptor >= 0:
            close(self.descriptor)
        self.events = NULL
        self.descriptor, self.is_on = descriptor, descriptor >= 0
        self.room = self.count = self.published = 0

    cdef void begin(self, int64_t commit) noexcept nogil:
        """Begin a commit, by its number."""
        self.commit, self.order, self.count = commit, 0, self.published

    cdef void add(self, uint8_t kind, int64_t worker, int64_t position, int64_t at_ns) noexcept nogil:
        """Add an event of the present commit. Without room for it the log ends, and its reader finds a commit missing."""
        if not self.is_on:
            return
        if self.count == self.room and not self._grow():
            self.is_on = False
            return
        self.events[self.count] = event_t(at_ns, self.commit, position, -1, worker, self.shard, self.order, kind, 0)
        self.count += 1
        self.order += 1

    cdef bint _grow(self) noexcept nogil:
        """Make the file and its mapping larger. Allocate: on a full disk a write into a hole ends the process by a signal."""
        cdef size_t size = self.room * sizeof(event_t), more = size + _CHUNK * sizeof(event_t)
        cdef void *grown
        if posix_fallocate(self.descriptor, 0, more) != 0:
            return False
        if self.events == NULL:
            grown = mmap(NULL, more, PROT_READ | PROT_WRITE, MAP_SHARED, self.descriptor, 0)
        else:
            grown = mremap(self.events, size, more, MREMAP_MAYMOVE)
        if grown == MAP_FAILED:
            return False
        self.events, self.room = <event_t *> grown, self.room + _CHUNK
        return True

    cdef void publish(self, int64_t version) noexcept nogil:
        """Keep the events of the present commit, which published this version."""
        while self.published < self.count:
            self.events[self.published].version = version
            self.events[self.published].written = 1
            self.published += 1
