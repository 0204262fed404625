# The simulator: the simulated workers around the simulated shards.

from libc.stdint cimport int32_t, int64_t

from fastps.kernels.simulation.compute_time cimport ComputeTimes
from fastps.kernels.simulation.cpu cimport Cores
from fastps.kernels.simulation.network cimport fps_event
from fastps.kernels.scheduling.state cimport policy_t
from fastps.kernels.simulation.shards cimport SimulatedShards

cdef struct player_t:
    int64_t steps           # steps pushed
    int64_t computed_ns     # time of its last gradient
    int64_t began_ns
    int64_t compute_ns
    int64_t wait_ns
    int64_t grant_wait_ns   # from a shard's receipt of a push to its grant, summed over shards
    int64_t timestamp       # newest version, over the shards, that it computes with
    int64_t batch
    int64_t granted_batch   # 0: not tuned
    int64_t resume_ns       # partial pull: when it begins with the answers it has, or -1
    int64_t stale_blocks
    int64_t ready_version   # overlap: newest weights that have arrived
    int32_t fresh           # shards that have answered for its next step
    int32_t sending         # overlap: shards that its last push has not reached yet
    int32_t computing
    int32_t blocked         # it lacks only a slot
    int32_t holding         # overlap: it holds a gradient until the one before is delivered
    int32_t left            # it makes no more pushes
    int32_t killed          # it has left by a death
    int64_t consumed        # of its lane's pushes, those of workers before it
    int64_t first_step      # the clock at which it joined
    int64_t first_version   # what was answered to the one before it is older, or the same

# One worker's view of one shard.
cdef struct view_t:
    int64_t version         # version of the weights that it computes with
    int64_t step            # newest step that the shard has granted and answered


cdef class Simulator(SimulatedShards):
    cdef readonly ComputeTimes compute
    cdef readonly Cores cores
    cdef readonly int64_t events
    cdef readonly int32_t asked          # worker whose gradient `tell` has to describe before anything goes on; -1: none
    cdef policy_t policy
    cdef player_t *players
    cdef view_t *views
    cdef int32_t *idle                   # overlap: workers without a pull in progress
    cdef int32_t n_idle
    cdef int64_t *relaying               # version that each node of the broadcast tree sends its children, or -1
    cdef int64_t hop_ns                  # time of a hop of the broadcast tree; -1: none, each worker pulls for itself
    cdef int64_t pull_timeout_ns
    cdef int64_t slots
    cdef int64_t[:, ::1] changes         # time in ns, and the index of EVENT_CHANGE
    cdef int64_t batch
    cdef int32_t needed
    cdef bint is_direct                  # messages take no time, so none is made
    cdef int _allocate(self, int32_t[::1] link_of) except -1
    cdef void _run(self, int64_t events) noexcept nogil
    cdef void _play(self, fps_event event) noexcept nogil
    cdef void _try_begin(self, int32_t worker) noexcept nogil
    cdef void _begin(self, int32_t worker) noexcept nogil
    cdef int64_t _for_batch(self, const player_t *player, int64_t took_ns) noexcept nogil
    cdef void _computed(self, int32_t worker) noexcept nogil
    cdef void _end_step(self, int32_t worker, bint leaves) noexcept nogil
    cdef void _push(self, int32_t worker) noexcept nogil
    cdef void _pulled(self, int32_t index) noexcept nogil
    cdef void _arrive(self, int32_t worker, int32_t shard, int64_t step, int64_t version) noexcept nogil
    cdef void _fetch(self, int32_t worker) noexcept nogil
    cdef void _record_pull(self, int kind, int32_t worker, int64_t version, int32_t node) noexcept nogil
    cdef void _fetch_all(self) noexcept nogil
    cdef void _kill(self, int32_t worker) noexcept nogil
    cdef void _join(self, int32_t worker) noexcept nogil
    cdef void _relay(self, int32_t node) noexcept nogil
    cdef void _relayed(self, int32_t node) noexcept nogil
