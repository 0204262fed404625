# A view of the arena's memory: addresses only.

from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t

from fastps.kernels.scheduling.state cimport scheduler_t
from fastps.kernels.shm.arena_h cimport *
from fastps.kernels.update.fold cimport fps_segment
from fastps.kernels.rows.rows_h cimport fps_table, fps_undo_log


cdef class ArenaView:
    cdef object memory          # keeps the mapping alive
    cdef char *base
    # A copy, checked when this view was made: another process may have written over the memory since.
    cdef fps_header own_header
    cdef fps_header *header     # own_header
    cdef fps_segment *segments  # one a parameter
    cdef fps_table *tables      # n_tables of them
    cdef int64_t first[FPS_MAX_SHARDS]  # of each shard: its floats of every buffer are [first, last)
    cdef int64_t last[FPS_MAX_SHARDS]
    # Measures, for Python.
    cdef readonly uint32_t lanes         # workers that the arena was made for
    cdef readonly int64_t server_lane    # the lane of the job's server process, behind the workers'; -1: the workers combine
    cdef readonly uint32_t buffers       # weight buffers, without those of readers
    cdef readonly uint32_t readers       # the most processes that only read weights; their buffers are behind the others
    cdef readonly uint32_t slots         # gradient slots of a lane
    cdef readonly uint32_t shards        # each versioned by itself
    cdef readonly uint32_t n_tables      # parameters of which pushes carry rows
    cdef readonly uint64_t buffer_floats  # of a weights buffer, padding included
    cdef readonly uint64_t carried_bytes  # what a version carries besides weights, a line of marks included; 0: nothing
    cdef readonly uint64_t total_bytes   # of the whole arena
    cdef readonly uint32_t shown_type    # the half precision in which buffers have the weights once more; 0: none
    cdef readonly bint is_double         # whether weights, gradients and state are doubles, each of which takes two floats
    cdef readonly uint32_t state_planes  # of the rule's state
    cdef readonly double ema_decay       # of the weights' moving average, the last plane of the state; 0 when none is kept

    cdef uint32_t n_empty       # parameters without floats in a buffer: tables, and those that are frozen or have no values
    cdef int _copy_places(self) except -1
    cdef bint _copy_place(self, uint32_t index) noexcept nogil
    cdef void find_thawed(self) noexcept nogil
    cdef int _copy_tables(self) except -1
    cdef fps_lane *lane(self, uint32_t index) noexcept nogil
    cdef fps_lane_shard *lane_shard(self, uint32_t lane, uint32_t shard) noexcept nogil
    cdef fps_push_outcome *push_outcome(self, uint32_t lane, uint32_t shard, uint64_t position) noexcept nogil
    cdef fps_readers *readers_words(self) noexcept nogil
    cdef fps_reader_shard *reader_shard(self, uint32_t reader, uint32_t shard) noexcept nogil
    cdef bint has_buffer(self, uint64_t buffer) noexcept nogil
    cdef uint64_t spare_weights(self) noexcept nogil
    cdef bint has_state(self, uint64_t buffer) noexcept nogil
    cdef fps_shard_header *shard_header(self, uint32_t shard) noexcept nogil
    cdef fps_statistics *statistics(self, uint32_t shard) noexcept nogil
    cdef fps_work *work(self, uint32_t shard, uint64_t workspace) noexcept nogil
    cdef scheduler_t *scheduler(self, uint32_t shard, uint64_t record) noexcept nogil
    cdef char *slot(self, uint32_t lane, uint32_t slot) noexcept nogil
    cdef float *weights(self, uint64_t buffer) noexcept nogil
    cdef uint16_t *halves(self, uint64_t buffer) noexcept nogil
    cdef char *carried(self, uint64_t buffer) noexcept nogil
    cdef char *brought(self, uint32_t lane, uint32_t slot) noexcept nogil
    cdef char *state(self, uint64_t buffer) noexcept nogil
    cdef char *rows(self) noexcept nogil
    cdef char *row_slot(self, uint32_t lane, uint32_t slot) noexcept nogil
    cdef fps_undo_log undo_log(self, uint32_t shard) noexcept nogil
    cdef int _check_lane(self, uint32_t lane) except -1 nogil
    cdef int _check_shard(self, uint32_t shard) except -1 nogil
    cdef int _check_slot(self, uint32_t slot) except -1 nogil
    cdef int _check_table(self, uint32_t table) except -1 nogil
