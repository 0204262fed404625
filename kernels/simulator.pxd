# The simulator's state: workers, around the ledger of the shards (ledger.pxd).

from libc.stdint cimport int32_t, int64_t

from fastps.kernels.compute_time cimport ComputeTimes
from fastps.kernels.cores cimport Cores
from fastps.kernels.ledger cimport Ledger
from fastps.kernels.network cimport Network, fps_event, fps_queue
from fastps.kernels.roster cimport policy_t
from fastps.kernels.service cimport Service

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


cdef class Simulator:
    cdef readonly ComputeTimes compute
    cdef readonly Network network
    cdef readonly Service service
    cdef readonly Cores cores
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
    cdef Ledger ledger
    cdef player_t *players
    cdef view_t *views
    cdef int32_t *links
    cdef int32_t *idle                   # overlap: workers without a pull in progress
    cdef int32_t n_idle
    cdef double shard_bytes
    cdef int64_t pull_timeout_ns
    cdef int64_t slots
    cdef int64_t batch
    cdef int32_t needed
    cdef bint overlap
    cdef bint is_direct                  # messages take no time at all, so there are none
    cdef bint no_memory
    cdef bint begun
    cdef int _allocate(self, int32_t[::1] link_of) except -1
    cdef bint _is_over(self) noexcept nogil
    cdef void _run(self, int64_t events) noexcept nogil
    cdef void _play(self, fps_event event) noexcept nogil
    cdef void _check(self, int outcome) noexcept nogil
    cdef void _try_begin(self, int32_t worker) noexcept nogil
    cdef void _begin(self, int32_t worker) noexcept nogil
    cdef int64_t _for_batch(self, const player_t *player, int64_t took_ns) noexcept nogil
    cdef void _computed(self, int32_t worker) noexcept nogil
    cdef void _push(self, int32_t worker) noexcept nogil
    cdef void _pushed(self, int32_t index) noexcept nogil
    cdef void _served(self, int32_t station) noexcept nogil
    cdef void _handled(self, int32_t index) noexcept nogil
    cdef void _pulled(self, int32_t index) noexcept nogil
    cdef void _post(self, int32_t index) noexcept nogil
    cdef void _look_for_drain(self, int32_t shard) noexcept nogil
    cdef void _arrive(self, int32_t worker, int32_t shard, int64_t step, int64_t version) noexcept nogil
    cdef int64_t _newest(self, int32_t worker) noexcept nogil
    cdef void _fetch(self, int32_t worker) noexcept nogil
    cdef void _fetch_all(self) noexcept nogil
    cdef void _receive(self, int32_t worker, int32_t shard, int64_t timestamp, int64_t read_version,
                       int64_t samples) noexcept nogil
    cdef int _decide(self, int32_t worker, int32_t shard, int64_t timestamp, int64_t read_version,
                     int64_t samples) noexcept nogil
    cdef void _drain(self, int32_t shard) noexcept nogil
    cdef void _go_on(self, int32_t worker, bint is_new) noexcept nogil
    cdef void _leave(self, int32_t worker, int32_t shard) noexcept nogil
    cdef void _fire_due(self, int32_t shard) noexcept nogil
    cdef void _arm(self, int32_t shard) noexcept nogil
    cdef bint _keep(self, int32_t shard, int32_t worker, int64_t read_version, int action) noexcept nogil
    cdef void _follow(self, int32_t shard, int action) noexcept nogil
    cdef void _fold_sum(self, int32_t shard) noexcept nogil
    cdef void _answer(self, int32_t worker, int32_t shard) noexcept nogil
