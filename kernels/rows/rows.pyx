"""Tables: parameters of which a push carries rows, and a fold updates those rows in place.

A worker collects the rows of a sparse gradient into its slot, each row once. A fold logs the old words of each row, and then
writes the row; without a commit the log restores them.
"""

from fastps.kernels.rows.rows_h cimport FPS_MAX_ROWS, FPS_MAX_TABLES, FPS_N_ROW_RULES

cdef extern from "rows/rows.h" nogil:
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
        int number, planes, words
        const char *name

    const fps_row_rule_name *fps_row_rule_names

MAX_TABLES = FPS_MAX_TABLES
MAX_ROWS = FPS_MAX_ROWS
RULES = {fps_row_rule_names[index].name.decode(): fps_row_rule_names[index].number for index in range(FPS_N_ROW_RULES)}
# By number: the state tensors of a rule, and the words of a row in each; 0: as many as the row has weights.
PLANES = {fps_row_rule_names[index].number: (fps_row_rule_names[index].planes, fps_row_rule_names[index].words)
          for index in range(FPS_N_ROW_RULES)}
