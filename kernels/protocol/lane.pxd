# A lane as its worker uses it, for who drives many workers without Python: chaos_workers.pyx.

from cpython.ref cimport PyObject
from libc.stdint cimport int64_t, uint32_t, uint64_t

from fastps.kernels.protocol.pins cimport Reader
from fastps.kernels.protocol.shared_fold cimport SharedFold
from fastps.kernels.shm.arena_h cimport FPS_MAX_SHARDS, fps_lane

cdef class Lane(Reader):
    cdef readonly int bad_lane          # of the last BAD_DESCRIPTOR
    cdef readonly tuple holders         # one a shard
    cdef PyObject *_holders[FPS_MAX_SHARDS]  # the same
    cdef fps_lane *words
    cdef SharedFold helper              # turns from shard to shard
    cdef uint32_t helpers               # cores for those who help with this lane's folds; 0: none, nor does it help

    cdef int _check_slot(self, uint32_t slot) except -1
    cdef void _set_versions(self, uint32_t slot) noexcept nogil
    cdef void _count(self, int64_t steps, int64_t wait_ns, int64_t compute_ns, int64_t samples, double loss,
                     int64_t stale_blocks) noexcept nogil
    cdef bint _post(self, int kind, uint64_t step, uint32_t slot, uint64_t read_version, int64_t post_ns, double scale,
                    double loss, uint32_t samples) noexcept nogil
    cdef uint64_t _done(self) noexcept nogil
    cdef uint32_t _fresh(self, int64_t granted) noexcept nogil
    cdef int64_t _due_ns(self) noexcept nogil
    cdef bint _reached(self, int64_t granted, uint64_t done, uint32_t shards) noexcept nogil
    cdef bint _wait(self, int64_t granted, uint64_t done, int64_t spins, int64_t slice_ns, uint32_t shards) noexcept nogil
    cdef bint _wait_awake(self, int64_t granted, uint64_t done, int64_t looks, uint32_t shards) noexcept nogil
    cdef bint _is_offered(self) noexcept nogil
    cdef bint _help(self) noexcept nogil
    cdef int _try_turns(self, int64_t now_ns) noexcept nogil
    cdef int _break_turns(self, uint32_t dead_lane, uint32_t generation, int64_t now_ns) noexcept nogil
    cdef void _break_stale_turns(self, int64_t now_ns) noexcept nogil
    cdef bint _is_stale(self, uint32_t lane, uint64_t generation, uint64_t known) noexcept nogil
