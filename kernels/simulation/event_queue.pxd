# The event queue of a simulation: events ordered by time, and by sequence number at equal times.
#
# It is a 4-ary heap in one array, without pointers: half as deep as a binary heap, and a node's children share a cache line or
# two. The order is total, so it is the same on every machine.

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport realloc

cdef enum:
    EVENT_COMPUTED = 0  # index: a worker
    EVENT_PUSHED = 1    # index: a message that has reached its server
    EVENT_PULLED = 2    # index: a message that has reached its worker
    EVENT_LINK = 3      # index: a port, twice the link, and one more for the direction to the workers
    EVENT_TIMER = 4     # index: a shard
    EVENT_RESUME = 5    # index: a worker
    EVENT_SERVED = 6    # index: a station of the server queue, which has handled a message
    EVENT_CORES = 7     # index: a core, whose step or slice has ended
    EVENT_DRAIN = 8     # index: a shard; the pushes of this instant are decided together
    EVENT_RELAYED = 9   # index: a node of the broadcast tree; it has sent its children a version
    EVENT_CHANGE = 10   # index: a worker that dies, or less than 0: worker -1 - index joins

cdef struct event_t:
    int64_t key        # the time in ns, or another ordered value
    uint64_t sequence  # number of the event: orders equal keys
    int32_t kind, index

cdef struct queue_t:
    event_t *events
    int64_t length, room
    uint64_t made      # events added so far
    int64_t now_ns     # the time: the key of the event removed last
    bint no_memory     # memory is exhausted: an event is missing


cdef inline bint _is_before(const event_t *a, const event_t *b) noexcept nogil:
    return a.key < b.key or (a.key == b.key and a.sequence < b.sequence)


cdef inline void queue_add(queue_t *queue, int64_t key, int32_t kind, int32_t index) noexcept nogil:
    """Add an event; where memory is exhausted, set `no_memory`."""
    cdef int64_t hole = queue.length, parent, room
    cdef event_t event = event_t(key, queue.made, kind, index)
    cdef event_t *events
    if queue.length == queue.room:
        room = 2 * queue.room if queue.room else 16
        events = <event_t *> realloc(queue.events, room * sizeof(event_t))
        if events == NULL:
            queue.no_memory = True
            return
        queue.events, queue.room = events, room
    queue.made += 1
    queue.length += 1
    while hole > 0:
        parent = (hole - 1) // 4
        if not _is_before(&event, &queue.events[parent]):
            break
        queue.events[hole] = queue.events[parent]
        hole = parent
    queue.events[hole] = event


cdef inline event_t queue_pop(queue_t *queue) noexcept nogil:
    """Remove and return the first event. The queue must not be empty."""
    cdef event_t *events = queue.events
    cdef event_t first = events[0], last
    cdef int64_t hole = 0, child = 1, length = queue.length - 1, least, other
    queue.now_ns = first.key
    queue.length = length
    last = events[length]
    while child < length:
        least = child
        for other in range(child + 1, min(child + 4, length)):
            if _is_before(&events[other], &events[least]):
                least = other
        if not _is_before(&events[least], &last):
            break
        events[hole] = events[least]
        hole = least
        child = 4 * hole + 1
    events[hole] = last
    return first
