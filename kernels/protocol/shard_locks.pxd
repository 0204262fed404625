# All shards as one lane has them.

from cpython.ref cimport PyObject
from libc.stdint cimport int64_t, uint32_t, uint64_t

from fastps.kernels.protocol.pins cimport Pins
from fastps.kernels.combining.shared_fold cimport SharedFold
from fastps.kernels.shm.arena_h cimport FPS_MAX_SHARDS


cdef class ShardLocks(Pins):
    cdef uint64_t fresh                 # shards that were pulled since the last push before these pulls, as bits
    cdef bint has_pushed                # since the last pull
    cdef readonly int bad_lane          # of the last BAD_DESCRIPTOR
    cdef readonly uint64_t damage       # of that lane, for Arena.expel
    cdef readonly tuple combiners       # one a shard
    cdef PyObject *_combiners[FPS_MAX_SHARDS]  # the same
    cdef SharedFold helper              # helps with one shard after the other

    cdef uint64_t _prefetch(self, uint32_t shard) noexcept nogil
    cdef void _keep(self, uint32_t shard, uint64_t buffer) noexcept nogil
    cdef void _take(self, uint32_t shard, uint64_t buffer, uint64_t version) noexcept nogil
    cdef uint64_t _oldest(self) noexcept nogil
    cdef int _noted(self, uint32_t shard, int outcome) noexcept nogil
    cdef bint _is_offered(self) noexcept nogil
    cdef bint _help(self) noexcept nogil
    cdef int _try_combine(self, int64_t now_ns) noexcept nogil
    cdef bint _lose(self, uint32_t lane, uint32_t generation, int64_t now_ns) except -1 nogil
    cdef int _recover_locks(self, uint32_t dead_lane, uint32_t generation, int64_t now_ns) noexcept nogil
    cdef bint _was_passed_by(self) noexcept nogil
    cdef int _pass_by(self, uint32_t stopped, int64_t now_ns) noexcept nogil
    cdef void _recover_stale_locks(self, int64_t now_ns) noexcept nogil
    cdef bint _is_stale(self, uint32_t lane, uint64_t generation, uint64_t known) noexcept nogil
