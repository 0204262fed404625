# The rows of a commit, folded in place.

cimport cython
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from fastps.kernels.combining.work_item cimport WorkItem
from fastps.kernels.shm.arena cimport Arena
from fastps.kernels.rows.rows_h cimport fps_undo_log


@cython.final
cdef class RowFold:
    cdef Arena arena
    cdef uint32_t shard
    cdef WorkItem item
    cdef bint has_tables     # whether the shard has any
    cdef fps_undo_log log
    cdef void *scratch       # an fps_row_scratch; NULL without tables
    cdef char **pushed       # of each push of the item: the rows in its slot
    cdef int64_t *counted    # of each push of the item: its rows in this shard's tables
    cdef int64_t written     # different rows that the last fold wrote
    cdef bint is_counted     # whether a fold has counted rows that observers do not see yet
    cdef bint is_long        # whether the last fold wrote so many rows that other lanes will have posted meanwhile

    cdef int run(self, uint64_t version) noexcept nogil
    cdef bint roll_back(self, uint64_t version) noexcept nogil
    cdef float largest(self, uint32_t index, int32_t *parameter) noexcept nogil
    cdef bint _read_pushes(self) noexcept nogil
    cdef void _count(self, uint32_t table, uint64_t logged) noexcept nogil
    cdef void publish_counts(self, bint is_committed) noexcept nogil
