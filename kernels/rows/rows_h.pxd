# The one declaration of rows.h for Cython.

from libc.stdint cimport int32_t, int64_t, uint64_t

cdef extern from "rows/rows.h" nogil:
    enum:
        FPS_MAX_TABLES, FPS_ROWS_SGD, FPS_ROWS_ADAGRAD, FPS_N_ROW_RULES

    const int64_t FPS_MAX_ROWS

    ctypedef struct fps_table:
        int64_t rows
        int32_t width, parameter, group, shard, n_planes
        uint64_t weights_offset, slot_offset, undo_bytes
        uint64_t *planes_offset

    ctypedef struct fps_rows:
        int64_t count

    ctypedef struct fps_undo:
        uint64_t bytes, version, reserved

    ctypedef struct fps_undo_log:
        fps_undo *words
        char *entries
        uint64_t room

    uint64_t fps_rows_values_offset(const fps_table *table)
    uint64_t fps_rows_bytes(const fps_table *table)
    uint64_t fps_place_table(fps_table *table, int row_rule, uint64_t offset)
