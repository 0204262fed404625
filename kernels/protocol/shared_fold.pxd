# A fold that waiting lanes help with, for the holder of the turn (holder.pyx) and for who waits (turn.pyx).

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from fastps.kernels.shm.arena cimport Arena
from fastps.kernels.shm.arena_h cimport fps_descriptor, fps_work
from fastps.kernels.update.fold cimport FoldScratch, fps_fold_job, fps_push, fps_user_rule

# Outcomes of a fold.
cdef enum:
    FOLD_DONE = 0
    FOLD_AWAITING = 1   # a helper has not given its chunk back: look whether it lives, then `finish`
    FOLD_REFUSED = -1
    FOLD_UNSOUND = -2   # results that are not finite, in buffers that nobody reads

cdef class SharedFold:
    cdef Arena arena
    cdef fps_work *work
    cdef uint32_t lane
    cdef uint32_t shard
    cdef uint32_t helpers           # how many sleepers a fold may wake; 0: it is not shared
    cdef bytes cores                # for each core by its number, with which part who is there begins; empty: a part a lane
    cdef const char *part_of_core   # the same, n_cores of them
    cdef int n_cores
    cdef bint streaming             # whether its stores are to go past the caches
    cdef fps_user_rule user_rule    # the job's own rule, or NULL
    cdef bint on_device             # whether `device` folds instead of the core
    cdef object device
    cdef object failure             # the error that it raised last, or None
    # Scratch, allocated once.
    cdef FoldScratch scratch        # the lane's: its folds run one after the other
    cdef fps_push *pushes
    cdef fps_fold_job job
    cdef int64_t helped             # chunks that this lane has folded for others
    cdef int32_t unsound            # whether the last call of the fold found results that are not finite
    cdef uint64_t own               # chunks that this lane has folded as the holder
    # Of the order at hand; what lies in the work area, another process may have written over since.
    cdef int64_t chunk_floats
    cdef uint64_t chunks            # the holder's: into how many its fold was cut
    cdef int64_t first              # the shard's floats of every buffer: [first, last)
    cdef int64_t last

    cdef void share(self, uint32_t helpers, bytes cores)
    cdef void turn_to(self, uint32_t shard) noexcept nogil
    cdef void put(self, uint32_t index, uint32_t lane, const fps_descriptor *descriptor, double scale,
                  double rate_scale) noexcept nogil
    cdef float largest(self, uint32_t index, int32_t *parameter) noexcept nogil
    cdef int run(self) noexcept nogil
    cdef int finish(self) noexcept nogil
    cdef bint help(self) noexcept nogil
    cdef bint is_helped(self) noexcept nogil
    cdef uint32_t _helpers_now(self) noexcept nogil
    cdef bint _has_enough(self) noexcept nogil
    cdef uint64_t own_part(self, uint64_t chunks) noexcept nogil
    cdef void close(self) noexcept nogil

    cdef bint _read(self) noexcept nogil
    cdef void _read_state(self, char *state_in, char *state_out) noexcept nogil
    cdef uint64_t _cut(self) noexcept nogil
    cdef int _fold(self, uint64_t chunk) noexcept nogil
    cdef int _fold_range(self, int64_t first, int64_t last) noexcept nogil
    cdef int _run_on_device(self) noexcept
    cdef void _rouse_helpers(self) noexcept nogil
