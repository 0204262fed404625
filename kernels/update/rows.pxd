# The fold of tables' rows for compiled callers.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from fastps.kernels.update.fold cimport fps_fold_job, fps_push

cdef extern from "update/rows.h" nogil:
    enum:
        FPS_MAX_TABLES
        FPS_ROW_PLANES
        FPS_ROWS_SGD
        FPS_ROWS_ADAGRAD
        FPS_N_ROW_RULES

    const int64_t FPS_MAX_ROWS

    ctypedef struct fps_table:
        int64_t rows
        int32_t width
        int32_t parameter
        int32_t group
        int32_t shard
        uint64_t weights_offset
        uint64_t planes_offset[2]
        uint64_t slot_offset
        uint64_t undo_bytes
        int32_t n_planes
        int32_t plane_width

    ctypedef struct fps_rows:
        int64_t count

    ctypedef struct fps_undo:
        uint64_t bytes
        uint64_t version
        uint64_t reserved

    uint64_t fps_rows_lines(uint64_t bytes)
    uint64_t fps_rows_values_offset(const fps_table *table)
    uint64_t fps_rows_bytes(const fps_table *table)
    uint64_t fps_place_table(fps_table *table, int row_rule, uint64_t offset)


cdef extern from "update/row_fold.h" nogil:
    enum:
        FPS_ROWS_REFUSED
        FPS_ROWS_NO_MEMORY

    ctypedef struct fps_row_scratch:
        pass

    ctypedef struct fps_undo_log:
        fps_undo *words
        char *entries
        uint64_t room


# What a fold of rows writes and forgets, for one thread at a time.
cdef class RowScratch:
    cdef fps_row_scratch *words


cdef void undo_begin(const fps_undo_log *log, uint64_t version) noexcept nogil
cdef bint undo_roll_back(
    const fps_undo_log *log, const fps_table *tables, int32_t n_tables, char *base, uint64_t version) noexcept nogil
cdef int fold_table(const fps_fold_job *job, int row_rule, const fps_table *tables, int32_t index, char *base,
                    char **pushed, fps_row_scratch *scratch, const fps_undo_log *log, uint64_t *used) noexcept nogil
cdef float largest_row(const fps_table *table, const fps_push *push, const char *pushed) noexcept nogil
