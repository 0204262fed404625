# A lane as its worker uses it, with C methods for code that drives many workers without Python.

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t

from fastps.kernels.protocol.shard_locks cimport ShardLocks
from fastps.kernels.shm.arena_h cimport fps_lane

cdef enum:
    # Distinct from the outcomes of try_combine.
    PUSH_FULL = 64
    PUSH_EARLY = 65
    PUSH_EXPELLED = 66
    LANE_UNSERVED = 67


@cython.final
cdef class Lane(ShardLocks):
    cdef fps_lane *words
    cdef public uint32_t weight  # the gradients that the next push is a sum of
    cdef readonly bint served    # whether a server combines for this lane
    cdef int64_t *ahead          # of each shard: by how much its clock of this lane is ahead of the first shard's
    cdef public int64_t steps, earlier_steps
    cdef readonly uint64_t posts
    cdef readonly uint32_t slot
    cdef readonly bint awaits
    cdef public int64_t granted_ns, wait_ns, compute_ns, push_ns, pushed_ns, samples, stale_blocks
    cdef public double loss
    cdef uint64_t *free_at       # of each slot: descriptors that must be done with before it may be written again

    cdef void _set_versions(self, uint32_t slot) noexcept nogil
    cdef bint _post(self, int kind, uint64_t step, uint32_t slot, uint64_t read_version, int64_t post_ns, double scale,
                    double loss, uint32_t samples) noexcept nogil
    cdef uint64_t _done(self, uint32_t lane) noexcept nogil
    cdef bint _is_last(self, uint32_t started) noexcept nogil
    cdef void _leave_to_server(self, bint served) noexcept nogil
    cdef void _sleep(self, uint32_t seen, int64_t spins, int64_t slice_ns) noexcept nogil
    cdef void _poll_awake(self, uint32_t seen, int64_t polls) noexcept nogil
    cpdef bint is_expelled(self) noexcept nogil
    cpdef int64_t begin_steps(self) noexcept nogil
    cdef int64_t _granted(self, uint32_t shard) noexcept nogil
    cpdef int64_t due_ns(self) noexcept nogil
    cdef bint _reached(self, int64_t granted, uint64_t done, uint32_t shards) noexcept nogil
    cdef bint _wait(self, int64_t granted, uint64_t done, int64_t spins, int64_t slice_ns, uint32_t shards) noexcept nogil
    cdef bint _wait_awake(self, int64_t granted, uint64_t done, int64_t polls, uint32_t shards) noexcept nogil
    cdef void _begin(self) noexcept nogil
    cdef int _push(self, int64_t now_ns, double scale, uint32_t samples, bint null) noexcept nogil
    cdef void _count_push(self, int64_t now_ns, uint32_t samples, bint null) noexcept nogil
    cpdef bint advance(self, int64_t now_ns, bint at_once) noexcept nogil
    cdef void _choose_slot(self) noexcept nogil
    cpdef void advance_late(self, int64_t now_ns) noexcept nogil
    cpdef void publish(self) noexcept nogil
