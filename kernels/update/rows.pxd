# The fold of tables' rows for compiled callers.

from libc.stdint cimport int32_t, int64_t, uint64_t

from fastps.kernels.update.fold cimport fps_fold_job, fps_push
from fastps.kernels.update.rows_h cimport fps_table, fps_undo_log

cdef extern from "update/row_fold.h" nogil:
    enum:
        FPS_ROWS_REFUSED
        FPS_ROWS_NO_MEMORY

    ctypedef struct fps_row_scratch:
        pass


# What a fold of rows writes and forgets, for one thread at a time.
cdef class RowScratch:
    cdef fps_row_scratch *words


cdef void undo_begin(const fps_undo_log *log, uint64_t version) noexcept nogil
cdef bint undo_roll_back(
    const fps_undo_log *log, const fps_table *tables, int32_t n_tables, char *base, uint64_t version) noexcept nogil
cdef int fold_table(const fps_fold_job *job, int row_rule, const fps_table *tables, int32_t index, char *base,
                    char **pushed, fps_row_scratch *scratch, const fps_undo_log *log, uint64_t *used) noexcept nogil
cdef int64_t pushed_rows(const fps_table *table, const fps_push *push, const char *pushed) noexcept nogil
cdef float largest_row(const fps_table *table, const fps_push *push, const char *pushed) noexcept nogil
