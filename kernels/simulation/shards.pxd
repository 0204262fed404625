# The simulated shards, a base class of the simulator.

from libc.stdint cimport int16_t, int32_t, int64_t

from fastps.kernels.scheduling.state cimport list_t, policy_t, scheduler_t
from fastps.kernels.shm.arena_h cimport FPS_GAP_BUCKETS
from fastps.kernels.simulation.event_queue cimport queue_t
from fastps.kernels.simulation.network cimport Network, message_t
from fastps.kernels.simulation.server_queue cimport ServerQueue

# Kinds of a trace's records, and the meaning of `version` and `detail` in each.
cdef enum:
    RECORD_BEGIN      # a worker begins to compute; newest version of any shard; its batch
    RECORD_COMPUTED   # its gradient is ready; the same; ns that it took
    RECORD_RECEIVE    # a shard receives a push; its timestamp; its samples
    RECORD_FOLD       # a push is folded; the version that it read; its staleness
    RECORD_DROP       # a late push is dropped; the version that it was computed with; 0
    RECORD_GRANT      # a worker is granted a step; the shard's version; the step
    RECORD_TIMER      # a shard's timer fires; its version before; 0
    RECORD_LEAVE      # a worker leaves a shard; its version before; 0
    RECORD_PULL       # weights arrive at a worker in time for its step; their version; the step
    RECORD_DEATH      # a worker that was killed leaves a shard; its version before; 0
    RECORD_JOIN       # a worker joins in the place of one that has ended; the shard's version; the clock at which it begins

# 32 bytes, with the fields of the trace's NumPy dtype in its order.
cdef struct record_t:
    int64_t time_ns, version, detail
    int32_t worker
    int16_t shard, kind

cdef struct server_t:
    scheduler_t *state
    int64_t due_ns          # deadline of its timer after its last event
    int64_t armed_ns        # time of its timer's pending event, or -1
    int64_t last_update_ns  # or -1
    int64_t updates
    double sigma_sum        # sum of <sigma> over the updates
    int64_t pushes_of_update, staleness_of_update
    int64_t gaps[FPS_GAP_BUCKETS]
    list_t sum              # pushes that wait for their fold
    list_t *leaves          # those of each leaf that it has not passed on to the sum
    list_t posted           # with `combine`: messages whose pushes wait for the end of their drain
    int64_t n_ahead         # messages that its station still handles before the drain

cdef class SimulatedShards:
    cdef readonly Network network
    cdef readonly ServerQueue server_queue
    cdef readonly int32_t n_workers, n_shards
    cdef readonly int64_t ended_ns       # time of the last event of any scheduler
    cdef readonly int64_t received       # pushes, over all shards
    cdef readonly int64_t samples        # in the pushes that shard 0 received
    cdef int64_t steps
    cdef bint leave
    cdef queue_t queue
    cdef policy_t policy
    cdef server_t *servers
    cdef int64_t[:, ::1] kept_version    # FOLD_IN_ORDER: version that the waiting push has read, by worker and shard
    cdef int64_t[::1] staleness          # histogram: pushes by staleness
    cdef bint tracing
    cdef record_t *records
    cdef int64_t n_records, records_room
    cdef double shard_bytes
    cdef int32_t[::1] links              # of each worker the first; the shard is added
    cdef bint overlap
    cdef bint asks                       # stop at each gradient, until `tell` describes it
    cdef int32_t n_left                  # workers that make no more pushes
    cdef void record(self, int kind, int32_t worker, int32_t shard, int64_t version, int64_t detail) noexcept nogil
    cdef void _take(self, int32_t worker) noexcept nogil
    cdef void _unblock(self, int32_t worker) noexcept nogil
    cdef void _go_on(self, int32_t worker, bint is_new) noexcept nogil
    cdef void _answer(self, int32_t worker, int32_t shard) noexcept nogil
    cdef int _leaves(self, int32_t worker, int64_t clock) noexcept nogil
    cdef bint _is_over(self) noexcept nogil
    cdef void _send(self, const message_t *message) noexcept nogil
    cdef void _pushed(self, int32_t index) noexcept nogil
    cdef void _served(self, int32_t station) noexcept nogil
    cdef void _handled(self, int32_t index) noexcept nogil
    cdef void _receive(self, const message_t *push) noexcept nogil
    cdef void _drain(self, int32_t shard) noexcept nogil
    cdef int _decide(self, const message_t *push) noexcept nogil
    cdef void _leave_all(self, int32_t worker) noexcept nogil
    cdef void _leave(self, int32_t worker, int32_t shard) noexcept nogil
    cdef void _timed(self, int32_t shard) noexcept nogil
    cdef void _fire_due(self, int32_t shard) noexcept nogil
    cdef void _arm(self, int32_t shard) noexcept nogil
    cdef bint _keep(self, const message_t *push, int action) noexcept nogil
    cdef bint _relay_leaf(self, int32_t worker, int32_t shard) noexcept nogil
    cdef void _follow(self, int32_t shard, int action) noexcept nogil
    cdef void _fold_sum(self, int32_t shard) noexcept nogil
    cdef void _fold(self, int32_t shard, int32_t worker, int64_t read_version, int64_t version) noexcept nogil
    cdef void _end_update(self, server_t *server) noexcept nogil
