# Messages between workers and servers, for the simulator.

from libc.stdint cimport int32_t, int64_t, uint64_t

cdef extern from "simulation/event_queue.h" nogil:
    ctypedef struct fps_event:
        int64_t key
        uint64_t sequence
        int32_t kind
        int32_t index
    ctypedef struct fps_queue:
        int64_t length
    int fps_queue_push(fps_queue *queue, int64_t key, int32_t kind, int32_t index)
    fps_event fps_queue_pop(fps_queue *queue)
    void fps_queue_free(fps_queue *queue)

cdef extern from "simulation/shared_link.h" nogil:
    ctypedef struct fps_link:
        double bandwidth
        double most
        double carried
        int64_t busy_ns
        int64_t scheduled_ns
        int64_t peak
        fps_queue progress
    void fps_link_advance(fps_link *link, int64_t now_ns)
    int fps_link_begin(fps_link *link, int64_t now_ns, double bytes, int32_t transfer)
    int64_t fps_link_next_ns(const fps_link *link)
    int32_t fps_link_ended(fps_link *link)

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

cdef struct message_t:
    int32_t worker
    int32_t shard
    int32_t kind            # EVENT_PUSHED or EVENT_PULLED
    int32_t next            # in a list: of free messages, or of messages that wait for a server
    int64_t step            # PULLED: the granted step
    int64_t version         # PUSHED: its timestamp; PULLED: the weights' version
    int64_t read_version    # PUSHED: the version of this shard that the gradient was computed with
    int64_t samples
    int64_t extra_ns        # latency and delay, after the transfer
    double bytes

cdef class Network:
    cdef readonly int64_t n_links
    cdef readonly bint instant
    cdef readonly bint half_duplex
    cdef fps_link *ports
    cdef int64_t *latency_ns
    cdef message_t *messages
    cdef int64_t room
    cdef int32_t first_free
    cdef uint64_t seed
    cdef uint64_t drawn
    cdef double late_share[2]
    cdef int64_t late_ns[2]
    cdef int32_t allocate(self) noexcept nogil
    cdef void release(self, int32_t index) noexcept nogil
    cdef int64_t _delay_ns(self, const message_t *message) noexcept nogil
    cdef int send(self, fps_queue *queue, int64_t now_ns, int32_t index, int32_t link) noexcept nogil
    cdef int _schedule(self, fps_queue *queue, int32_t port) noexcept nogil
    cdef int run_link(self, fps_queue *queue, int64_t now_ns, int32_t port) noexcept nogil
