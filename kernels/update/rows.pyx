"""Tables: parameters of which a push carries rows, and a fold updates those rows in place.

A worker collects the rows of a sparse gradient into its slot, each row once. A fold logs the old words of each row, and then
writes the row; without a commit the log restores them.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc

from fastps.kernels.update import fold
from fastps.kernels.update.rows_h cimport FPS_MAX_ROWS, FPS_MAX_TABLES, FPS_N_ROW_RULES, fps_table, fps_undo_log

cdef extern from "update/row_fold.h" nogil:
    """
    typedef struct {
        int number;
        const char *name;
        int planes, words;
    } fps_row_rule_name;
    #define FPS_ROW_RULE_NAME(number, NAME, name, planes, words) {number, #name, planes, words},
    static const fps_row_rule_name fps_row_rule_names[] = {FPS_ROW_RULES(FPS_ROW_RULE_NAME)};
    #undef FPS_ROW_RULE_NAME
    """
    ctypedef struct fps_row_rule_name:
        int number
        const char *name
        int planes
        int words

    ctypedef void *fps_row_loop

    const fps_row_rule_name *fps_row_rule_names
    const fps_row_loop *fps_row_loops(int isa)
    void fps_row_scratch_free(fps_row_scratch *scratch)
    void fps_undo_begin(const fps_undo_log *log, uint64_t version)
    int fps_undo_roll_back(
        const fps_undo_log *log, const fps_table *tables, int32_t n_tables, char *base, uint64_t version)
    int fps_fold_table(const fps_row_loop *loops, const fps_fold_job *job, int row_rule, const fps_table *tables,
                       int32_t index, char *base, char **pushed, fps_row_scratch *scratch, const fps_undo_log *log,
                       uint64_t *used)
    int64_t fps_pushed_rows(const fps_table *table, const fps_push *push, const char *pushed)
    float fps_largest_row(const fps_table *table, const fps_push *push, const char *pushed)

MAX_TABLES = FPS_MAX_TABLES
MAX_ROWS = FPS_MAX_ROWS
RULES = {fps_row_rule_names[index].name.decode(): fps_row_rule_names[index].number for index in range(FPS_N_ROW_RULES)}
# By number: the state tensors of a rule, and the words of a row in each; 0: as many as the row has weights.
PLANES = {fps_row_rule_names[index].number: (fps_row_rule_names[index].planes, fps_row_rule_names[index].words)
          for index in range(FPS_N_ROW_RULES)}

cdef const fps_row_loop *_chosen = fps_row_loops(fold.CHOSEN_ISA)


cdef class RowScratch:
    """Memory that a fold of rows writes and forgets. Only one thread at a time may fold with it."""

    def __cinit__(self):
        self.words = <fps_row_scratch *> calloc(1, sizeof(fps_row_scratch))
        if not self.words:
            raise MemoryError()

    def __dealloc__(self):
        fps_row_scratch_free(self.words)


cdef void undo_begin(const fps_undo_log *log, uint64_t version) noexcept nogil:
    fps_undo_begin(log, version)


cdef bint undo_roll_back(
        const fps_undo_log *log, const fps_table *tables, int32_t n_tables, char *base, uint64_t version) noexcept nogil:
    return fps_undo_roll_back(log, tables, n_tables, base, version)


cdef int fold_table(const fps_fold_job *job, int row_rule, const fps_table *tables, int32_t index, char *base,
                    char **pushed, fps_row_scratch *scratch, const fps_undo_log *log, uint64_t *used) noexcept nogil:
    return fps_fold_table(_chosen, job, row_rule, tables, index, base, pushed, scratch, log, used)


cdef int64_t pushed_rows(const fps_table *table, const fps_push *push, const char *pushed) noexcept nogil:
    return fps_pushed_rows(table, push, pushed)


cdef float largest_row(const fps_table *table, const fps_push *push, const char *pushed) noexcept nogil:
    return fps_largest_row(table, push, pushed)
