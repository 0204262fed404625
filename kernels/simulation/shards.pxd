# The simulated shards with their records, a base class of the simulator.

from libc.stdint cimport int32_t, int64_t

from fastps.kernels.simulation.records cimport Records
from fastps.kernels.simulation.network cimport Network, fps_queue
from fastps.kernels.simulation.server_queue cimport ServerQueue

cdef class SimulatedShards:
    cdef readonly Network network
    cdef readonly ServerQueue server_queue
    cdef readonly int32_t n_workers
    cdef readonly int32_t n_shards
    cdef readonly int64_t now_ns
    cdef readonly int64_t ended_ns       # time of the last event of any scheduler
    cdef readonly int64_t received       # pushes, over all shards
    cdef readonly int64_t samples        # in the pushes that shard 0 received
    cdef readonly int64_t steps
    cdef readonly bint leave
    cdef fps_queue queue
    cdef Records records
    cdef double shard_bytes
    cdef int32_t *links                  # of each worker the first; the shard is added
    cdef bint overlap
    cdef bint asks                       # stop at each gradient, until `tell` describes it
    cdef int32_t n_left                  # workers that make no more pushes
    cdef bint no_memory
    cdef bint begun
    cdef void _take(self, int32_t worker) noexcept nogil
    cdef void _unblock(self, int32_t worker) noexcept nogil
    cdef bint _is_over(self) noexcept nogil
    cdef void _check(self, int outcome) noexcept nogil
    cdef void _receive(self, int32_t worker, int32_t shard, int64_t timestamp, int64_t read_version,
                       int64_t samples) noexcept nogil
    cdef int _decide(self, int32_t worker, int32_t shard, int64_t timestamp, int64_t read_version,
                     int64_t samples) noexcept nogil
    cdef void _drain(self, int32_t shard) noexcept nogil
    cdef void _go_on(self, int32_t worker, bint is_new) noexcept nogil
    cdef void _pushed(self, int32_t index) noexcept nogil
    cdef void _served(self, int32_t station) noexcept nogil
    cdef void _handled(self, int32_t index) noexcept nogil
    cdef void _post(self, int32_t index) noexcept nogil
    cdef void _look_for_drain(self, int32_t shard) noexcept nogil
    cdef int _leaves(self, int32_t worker, int64_t clock) noexcept nogil
    cdef void _leave_all(self, int32_t worker) noexcept nogil
    cdef void _leave(self, int32_t worker, int32_t shard) noexcept nogil
    cdef void _fire_due(self, int32_t shard) noexcept nogil
    cdef void _arm(self, int32_t shard) noexcept nogil
    cdef bint _keep(self, int32_t shard, int32_t worker, int64_t read_version, int action) noexcept nogil
    cdef void _follow(self, int32_t shard, int action) noexcept nogil
    cdef void _fold_sum(self, int32_t shard) noexcept nogil
    cdef void _answer(self, int32_t worker, int32_t shard) noexcept nogil
