# A fold that waiting lanes help with.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from fastps.kernels.combining.work_item cimport WorkItem
from fastps.kernels.shm.arena cimport Arena
from fastps.kernels.shm.arena_h cimport fps_work
from fastps.kernels.update.fold cimport FPS_MAX_PUSHES, FoldScratch

# Outcomes of a fold.
cdef enum:
    FOLD_DONE = 0
    FOLD_AWAITING = 1   # a helper still has a chunk: check whether it lives, then `finish`
    FOLD_REFUSED = -1
    FOLD_NONFINITE = -2   # results that are not finite, in buffers that nobody reads

cdef void close_ticket(fps_work *work) noexcept nogil
cdef uint32_t count_helpers(Arena arena, uint32_t shard, uint64_t workspace, uint32_t mine) noexcept nogil


cdef class SharedFold:
    cdef Arena arena
    cdef uint32_t lane, shard
    cdef uint64_t workspace         # of the shard, whose work item and ticket these are
    cdef uint32_t helpers           # sleepers that a fold may wake; 0: it is not shared
    cdef bytes cores                # the part of each core, by its number; empty: a part a lane
    cdef const char *part_of_core   # the same, n_cores of them
    cdef int n_cores
    cdef bint on_device             # whether `device` folds instead of the core
    cdef object device
    cdef bint folds_nothing         # whether `device` is also called for versions without a push
    cdef object failure             # the error that it raised last, or None
    cdef int32_t nonfinite[FPS_MAX_PUSHES]  # for each push of the item: a parameter that `device` told non-finite, or -1
    # Scratch, allocated once.
    cdef FoldScratch scratch        # one a shard: under overlap two threads of a lane may fold
    cdef WorkItem item
    cdef int64_t helped             # chunks that this lane has folded for others
    cdef uint64_t own               # chunks that this lane has folded as the combiner
    cdef uint64_t chunks            # of the fold that this lane combines: how many there are
    cdef int64_t first              # the shard's floats of every buffer: [first, last)
    cdef int64_t last

    cdef void share(self, uint32_t helpers, bytes cores)
    cdef void switch_to(self, uint32_t shard) noexcept nogil
    cdef void use(self, uint64_t workspace) noexcept nogil
    cdef double largest(self, uint32_t index, int32_t *parameter) noexcept nogil
    cdef int run(self) noexcept nogil
    cdef int finish(self) noexcept nogil
    cdef bint help(self) noexcept nogil
    cdef bint _help_here(self) noexcept nogil
    cdef bint is_helped(self) noexcept nogil
    cdef bint _has_enough(self) noexcept nogil
    cdef uint64_t own_part(self, uint64_t chunks) noexcept nogil

    cdef uint64_t _cut(self) noexcept nogil
    cdef int _fold(self, uint64_t chunk) noexcept nogil
    cdef int _fold_range(self, int64_t first, int64_t last) noexcept nogil
    cdef int _run_on_device(self) noexcept
    cdef void _wake_helpers(self) noexcept nogil
