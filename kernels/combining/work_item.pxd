# A shard's work item: what is to be folded, named by numbers that mean the same in every process.

cimport cython
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from fastps.kernels.shm.arena cimport Arena
from fastps.kernels.shm.arena_h cimport fps_descriptor, fps_folded_push, fps_work
from fastps.kernels.update.fold cimport fps_fold_job, fps_push, fps_user_rule


@cython.final
cdef class WorkItem:
    cdef Arena arena
    cdef fps_work *words            # of a shard's workspace: the ticket, too
    cdef fps_user_rule user_rule    # the job's own rule, or NULL
    cdef bint streaming             # whether an item that is written from here asks for non-temporal stores
    # As read last; another process may have written over the words since.
    cdef fps_fold_job job
    cdef fps_push *pushes
    cdef int64_t chunk_floats
    cdef int32_t nonfinite            # whether a fold of this job found results that are not finite

    cdef void put(self, uint32_t index, uint32_t lane, const fps_descriptor *descriptor, double scale,
                  double rate_scale) noexcept nogil
    cdef fps_folded_push push(self, uint32_t index) noexcept nogil
    cdef void move(self, uint32_t index, const fps_folded_push *push) noexcept nogil
    cdef void write(self, int32_t mode, uint32_t n_pushes, double scale, double rate_scale, uint32_t weights_in,
                    uint32_t weights_out, uint32_t state_in, uint32_t state_out) noexcept nogil
    cdef void write_chunks(self, int64_t chunk_floats) noexcept nogil
    cdef bint read(self) noexcept nogil
    cdef object for_device(self, uint32_t shard)

    cdef bint _read_pushes(self, uint32_t n_pushes) noexcept nogil
