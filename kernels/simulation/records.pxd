# Simulation records: the shards' schedulers, pushes that wait for a fold, statistics of folds, and the trace.

from libc.stdint cimport int16_t, int32_t, int64_t

from fastps.kernels.shm.arena_h cimport FPS_GAP_BUCKETS
from fastps.kernels.scheduling.state cimport policy_t, scheduler_t

cdef extern from "simulation/records.h" nogil:
    ctypedef struct fps_event_record:
        int64_t time_ns
        int64_t version
        int64_t detail
        int32_t worker
        int16_t shard
        int16_t kind
    ctypedef struct fps_trace:
        fps_event_record *records
        int64_t length
    int fps_trace_add(fps_trace *trace, fps_event_record record)
    ctypedef struct fps_kept:
        int64_t read_version
        int32_t worker
        int32_t next
    ctypedef struct fps_kept_list:
        int32_t first
        int32_t last
    ctypedef struct fps_kept_pool:
        fps_kept *kept
        int32_t first_free
    int fps_kept_add(fps_kept_pool *pool, fps_kept_list *list, int32_t worker, int64_t read_version)
    void fps_kept_move(fps_kept_pool *pool, fps_kept_list *onto, fps_kept_list *source)
    void fps_kept_clear(fps_kept_pool *pool, fps_kept_list *list)

# Kinds of a trace's records, and the meaning of `version` and `detail` in each.
cdef enum:
    RECORD_BEGIN      # a worker begins to compute; newest version of any shard; its batch
    RECORD_COMPUTED   # its gradient is ready; the same; ns that it took
    RECORD_RECEIVE    # a shard receives a push; its timestamp; its samples
    RECORD_FOLD       # a push is folded; the version that it read; its staleness
    RECORD_DROP       # a late push is dropped; its timestamp; 0
    RECORD_GRANT      # a worker is granted a step; the shard's version; the step
    RECORD_TIMER      # a shard's timer fires; its version before; 0
    RECORD_LEAVE      # a worker leaves a shard; its version before; 0
    RECORD_PULL       # weights arrive at a worker in time for its step; their version; the step
    RECORD_DEATH      # a worker that was killed leaves a shard; its version before; 0
    RECORD_JOIN       # a worker joins in the place of one that has ended; the shard's version; the clock at which it begins

cdef struct server_t:
    scheduler_t *state
    int64_t due_ns          # deadline of its timer after its last event
    int64_t armed_ns        # time of its timer's pending event, or -1
    int64_t last_update_ns  # or -1
    int64_t updates
    int64_t staleness_sum
    double sigma_sum        # sum of <sigma> over the updates
    int64_t pushes_of_update
    int64_t staleness_of_update
    int64_t gaps[FPS_GAP_BUCKETS]
    fps_kept_list sum
    fps_kept_list *leaves
    fps_kept_list posted    # with `combine`: messages whose pushes wait for the end of their drain
    int64_t n_ahead         # messages that its station still handles before the drain

cdef class Records:
    cdef int32_t n_workers
    cdef int32_t n_shards
    cdef int64_t now_ns         # time of the current event
    cdef policy_t policy
    cdef server_t *servers
    cdef fps_kept_pool pool
    cdef int64_t *kept_version  # FOLD_IN_ORDER: version that the waiting push has read, by worker and shard
    cdef int64_t *staleness     # histogram: pushes by staleness
    cdef int64_t n_staleness
    cdef bint tracing
    cdef fps_trace events
    cdef bint no_memory
    cdef void record(self, int kind, int32_t worker, int32_t shard, int64_t version, int64_t detail) noexcept nogil
    cdef void keep(self, int32_t shard, int32_t worker, int64_t read_version, int action) noexcept nogil
    cdef int64_t leaf_of(self, int32_t worker) noexcept nogil
    cdef bint relay(self, int32_t shard, int32_t worker) noexcept nogil
    cdef void fold_list(self, int32_t shard) noexcept nogil
    cdef void fold_sum(self, int32_t shard) noexcept nogil
    cdef void forget_sum(self, int32_t shard) noexcept nogil
    cdef void _fold(self, server_t *server, int32_t shard, int32_t worker, int64_t read_version, int64_t version) noexcept nogil
    cdef void _end_update(self, server_t *server) noexcept nogil
    cdef bytes trace(self, bint forget)

cdef Records begin_records(policy_t *policy, int32_t workers, int32_t shards, bint tracing)
