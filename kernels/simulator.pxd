# The simulator's state: what surrounds the scheduler's own.

from libc.stdint cimport int16_t, int32_t, int64_t

from fastps.kernels.arena cimport FPS_GAP_BUCKETS
from fastps.kernels.compute_time cimport ComputeTimes
from fastps.kernels.network cimport Network, fps_event, fps_queue
from fastps.kernels.roster cimport policy_t, scheduler_t

cdef extern from "ledger.h" nogil:
    ctypedef struct fps_record_line:
        int64_t time_ns
        int64_t version
        int64_t detail
        int32_t worker
        int16_t shard
        int16_t kind
    ctypedef struct fps_trace:
        fps_record_line *lines
        int64_t length
    int fps_trace_add(fps_trace *trace, fps_record_line line)
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

# Kinds of a trace's lines, and what `version` and `detail` are in them.
cdef enum:
    LINE_BEGIN      # a worker begins to compute; newest version of any shard; its batch
    LINE_COMPUTED   # its gradient is ready; the same; ns that it took
    LINE_RECEIVE    # a shard receives a push; its timestamp; its samples
    LINE_FOLD       # a push is folded; the version that it read; its staleness
    LINE_DROP       # a push came too late; its timestamp; 0
    LINE_GRANT      # a worker is granted a step; the shard's version; the step
    LINE_TIMER      # a shard's timer fires; its version before; 0
    LINE_LEAVE      # a worker leaves a shard; its version before; 0
    LINE_PULL       # weights arrive at a worker in time for its step; their version; the step

cdef struct player_t:
    int64_t steps           # steps pushed
    int64_t computed_ns     # when its last gradient was ready
    int64_t began_ns
    int64_t compute_ns
    int64_t wait_ns
    int64_t grant_wait_ns   # from a shard's receipt of a push to its grant, summed over shards
    int64_t timestamp       # newest version of any shard that it computes with
    int64_t batch
    int64_t granted_batch   # 0: none was tuned
    int64_t resume_ns       # when it begins with what it has (partial pull), or -1
    int64_t stale_blocks
    int64_t ready_version   # overlap: newest weights that have arrived
    int32_t fresh           # shards that have answered for its next step
    int32_t sending         # overlap: shards that its last push has not reached yet
    int32_t computing
    int32_t blocked         # it could go on but for a slot
    int32_t holding         # overlap: it holds a gradient until the last was delivered

# One shard as one worker sees it.
cdef struct view_t:
    int64_t version         # of the weights that it computes with
    int64_t step            # newest step that the shard has granted, and answered
    int64_t kept_version    # FOLD_IN_ORDER: what its push that waits has read

cdef struct server_t:
    scheduler_t *state
    int64_t due_ns          # its timer, as of its last event
    int64_t armed_ns        # the time of its timer's event, or -1
    int64_t last_update_ns  # or -1
    int64_t updates
    int64_t staleness_sum
    double sigma_sum        # sum over the updates of <sigma>
    int64_t pushes_of_update
    int64_t staleness_of_update
    int64_t gaps[FPS_GAP_BUCKETS]
    fps_kept_list sum
    fps_kept_list *leaves


cdef class Simulator:
    cdef readonly ComputeTimes compute
    cdef readonly Network network
    cdef readonly int32_t n_workers
    cdef readonly int32_t n_shards
    cdef readonly int64_t now_ns
    cdef readonly int64_t ended_ns       # time of the last event of any scheduler
    cdef readonly int64_t events
    cdef readonly int64_t received       # pushes, over all shards
    cdef readonly int64_t samples        # of those that shard 0 received
    cdef readonly int64_t steps
    cdef readonly bint leave
    cdef policy_t policy
    cdef fps_queue queue
    cdef fps_trace lines
    cdef fps_kept_pool pool
    cdef player_t *players
    cdef view_t *views
    cdef server_t *servers
    cdef int32_t *links
    cdef int32_t *idle                   # overlap: workers without a pull in progress
    cdef int32_t n_idle
    cdef int64_t *staleness
    cdef int64_t n_staleness
    cdef double shard_bytes
    cdef int64_t pull_timeout_ns
    cdef int64_t slots
    cdef int64_t batch
    cdef int32_t needed
    cdef bint overlap
    cdef bint tracing
    cdef bint no_memory
    cdef bint begun
    cdef int _allocate(self, int32_t[::1] link_of) except -1
    cdef bint _is_over(self) noexcept nogil
    cdef void _run(self, int64_t events) noexcept nogil
    cdef void _play(self, fps_event event) noexcept nogil
    cdef void _check(self, int outcome) noexcept nogil
    cdef void _line(self, int kind, int32_t worker, int32_t shard, int64_t version, int64_t detail) noexcept nogil
    cdef void _try_begin(self, int32_t worker) noexcept nogil
    cdef void _begin(self, int32_t worker) noexcept nogil
    cdef void _computed(self, int32_t worker) noexcept nogil
    cdef void _push(self, int32_t worker) noexcept nogil
    cdef void _pushed(self, int32_t index) noexcept nogil
    cdef void _pulled(self, int32_t index) noexcept nogil
    cdef void _arrive(self, int32_t worker, int32_t shard, int64_t step, int64_t version) noexcept nogil
    cdef int64_t _newest(self, int32_t worker) noexcept nogil
    cdef void _fetch(self, int32_t worker) noexcept nogil
    cdef void _fetch_all(self) noexcept nogil
    cdef void _receive(self, int32_t worker, int32_t shard, int64_t timestamp, int64_t read_version,
                       int64_t samples) noexcept nogil
    cdef void _leave(self, int32_t worker, int32_t shard) noexcept nogil
    cdef void _fire_due(self, int32_t shard) noexcept nogil
    cdef void _arm(self, int32_t shard) noexcept nogil
    cdef void _keep(self, int32_t shard, int32_t worker, int64_t read_version, int action) noexcept nogil
    cdef int64_t _leaf_of(self, int32_t worker) noexcept nogil
    cdef void _relay(self, server_t *server, int32_t worker) noexcept nogil
    cdef void _follow(self, int32_t shard, int action) noexcept nogil
    cdef void _fold_sum(self, server_t *server, int32_t shard) noexcept nogil
    cdef void _fold(self, server_t *server, int32_t shard, int32_t worker, int64_t read_version, int64_t version) noexcept nogil
    cdef void _end_update(self, server_t *server) noexcept nogil
    cdef void _answer(self, int32_t worker, int32_t shard) noexcept nogil
