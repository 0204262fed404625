# What one lane gave a shard's scheduler, commit by commit.

from libc.stdint cimport int16_t, int64_t, uint8_t, uint16_t

cdef enum:
    # Kinds of event; the first three are those of descriptors.
    EVENT_TIMER = 3
    EVENT_DEATH = 4      # a worker died, or another one has its lane
    EVENT_EXPULSION = 5  # or what is left of an expelled worker is left out
    EVENT_JOIN = 6       # its descriptors begin at `position`

# As EVENT_DTYPE of fastps/tracing/file.py says.
cdef struct event_t:
    int64_t at_ns, commit, position, version
    int16_t worker, shard
    uint16_t order
    uint8_t kind, written


cdef class EventLog:
    cdef event_t *events    # the mapped file
    cdef int descriptor     # of the file, or -1
    cdef int64_t count      # of events, those of the present commit included
    cdef int64_t published  # of those whose commit is published
    cdef int64_t room
    cdef int16_t shard
    cdef bint is_on
    cdef int64_t commit
    cdef uint16_t order

    cdef void begin_in(self, int descriptor) noexcept nogil
    cdef void begin(self, int64_t commit) noexcept nogil
    cdef void add(self, uint8_t kind, int64_t worker, int64_t position, int64_t at_ns) noexcept nogil
    cdef void publish(self, int64_t version) noexcept nogil
    cdef bint _grow(self) noexcept nogil
