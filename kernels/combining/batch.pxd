# The pushes of one commit.

cimport cython
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from fastps.kernels.shm.arena cimport Arena
from fastps.kernels.shm.arena_h cimport fps_folded_push, fps_shard_header
from fastps.kernels.scheduling.state cimport policy_t, scheduler_t
from fastps.kernels.combining.lane_reads cimport LaneReads
from fastps.kernels.combining.lock_word cimport LockWord
from fastps.kernels.combining.row_fold cimport RowFold
from fastps.kernels.combining.shared_fold cimport SharedFold


@cython.final
cdef class Batch:
    cdef Arena arena
    cdef fps_shard_header *shard_header
    cdef uint32_t shard
    cdef LockWord lock
    cdef SharedFold fold        # whose work item the pushes are written into
    cdef RowFold rows           # of the same item
    cdef LaneReads lanes        # where a damaged push is noted
    cdef uint32_t n_pushes      # in the batch
    cdef int64_t samples        # of all of them
    cdef int64_t weight         # of all of them: the gradients that a mean divides by
    # Of the version that is being made.
    cdef int64_t pushes_of_update, staleness_of_update

    cdef void begin(self) noexcept nogil
    cdef bint take_single(self, scheduler_t *state, uint32_t lane, uint64_t position, int64_t version) noexcept nogil
    cdef bint take_listed(self, scheduler_t *state) noexcept nogil
    cdef bint gather(self, scheduler_t *state) noexcept nogil
    cdef void drop(self, const scheduler_t *state, uint32_t lane, uint64_t position) noexcept nogil
    cdef bint reject(self, scheduler_t *state) noexcept nogil
    cdef void write_item(self, const policy_t *policy, uint32_t weights_in, uint32_t weights_out, uint32_t state_in,
                         uint32_t state_out) noexcept nogil
    cdef void count_arrival(self, int32_t earlier, int64_t after_ns) noexcept nogil
    cdef void forget_update(self) noexcept nogil

    cdef bint _is_void(self, uint32_t member, uint32_t lane, uint64_t position) noexcept nogil
    cdef bint _take_push(self, scheduler_t *state, uint32_t lane, uint64_t position, int64_t version) noexcept nogil
    cdef void _end_update(self, const scheduler_t *state) noexcept nogil
    cdef void _write_outcome(self, const scheduler_t *state, uint32_t lane, uint64_t position, uint32_t kind, uint64_t version,
                             int64_t staleness) noexcept nogil
    cdef void _count_rejection(self, const fps_folded_push *push, int32_t parameter) noexcept nogil
    cdef void _write_rejection(self, uint32_t lane, uint64_t consumed, const fps_folded_push *push) noexcept nogil
    cdef double _largest(self, uint32_t index, int32_t *parameter) noexcept nogil
    cdef double _rate_scale(self, const policy_t *policy) noexcept nogil
