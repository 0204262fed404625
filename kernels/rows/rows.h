/* Tables: parameters of which a push carries rows, and a fold updates those rows in place.
 *
 * A table has one copy of its weights and optimizer state. Before a fold writes a row it logs the row's old words (undo.h). The
 * rules are those that torch applies to sparse gradients. */
#ifndef FPS_ROWS_H
#define FPS_ROWS_H

#include <stdint.h>

#include "update/fold.h"

#define FPS_MAX_TABLES 256
#define FPS_MAX_ROWS (1LL << 31) /* of a table: a row's number fits 32 bits */
#define FPS_ROW_PLANES 2         /* the most state tensors of a row rule */
#ifndef FASTPS_HOOKS
#define FPS_ROWS_AT_ONCE 64 /* rows that are logged and then written: their words stay in the nearest cache */
#define FPS_ROWS_APPLIED FPS_ROWS_AT_ONCE
#else
#define FPS_ROWS_AT_ONCE 2 /* so that a test's small fold has many batches */
#define FPS_ROWS_APPLIED 1 /* so that a test can die between two rows of a batch */
#endif

/* RULE(number, NAME, name, planes, words): the arithmetic on one row, in row_tile.h.
 *   number: stands in arenas, so it never changes
 *   planes: the state tensors
 *   words: of a plane for each row; 0: as many as the row has weights */
#define FPS_ROW_RULES(RULE)                                                                                              \
    RULE(0, SGD, sgd, 0, 0)                                                                                              \
    RULE(1, ADAGRAD, adagrad, 1, 0)                                                                                      \
    RULE(2, SPARSE_ADAM, sparse_adam, 2, 0)                                                                              \
    RULE(3, ROW_WISE_ADAGRAD, row_wise_adagrad, 1, 1)
#define FPS_ROW_RULE_NUMBER(number, NAME, ...) FPS_ROWS_##NAME = number,
enum { FPS_ROW_RULES(FPS_ROW_RULE_NUMBER) FPS_N_ROW_RULES };
#undef FPS_ROW_RULE_NUMBER

/* One table. The words of the arena's description come first; the rest follows from them. */
typedef struct {
    int64_t rows;
    int32_t width; /* floats of a row */
    int32_t parameter, group, shard;
    /* In bytes. */
    uint64_t weights_offset, planes_offset[FPS_ROW_PLANES]; /* from the tables' begin */
    uint64_t slot_offset;                                   /* from the begin of a slot's rows */
    uint64_t undo_bytes;                                    /* of a logged row */
    int32_t n_planes, plane_width;                          /* floats of a plane's row */
} fps_table;

/* The rows of one table in one push: a count, then room for as many row numbers and values as the table has rows. A row stands
 * there once. */
typedef struct {
    int64_t count;
    uint8_t pad[56];
} fps_rows;

static inline uint64_t fps_rows_lines(uint64_t bytes) { return (bytes + 63) & ~63ULL; }
/* Where the values lie in a push's rows of a table, and the size of all of it, in bytes. */
static inline uint64_t fps_rows_values_offset(const fps_table *table) {
    return sizeof(fps_rows) + fps_rows_lines(table->rows * sizeof(uint32_t));
}
static inline uint64_t fps_rows_bytes(const fps_table *table) {
    return fps_rows_values_offset(table) + fps_rows_lines(table->rows * table->width * sizeof(float));
}

/* A logged row: its table and number, then the old weights and planes. A shard has one log. */
typedef struct {
    uint32_t table, row;
} fps_undo_entry;

typedef struct {
    uint64_t bytes;    /* [UNDO] of the rows that are logged, each before it is written */
    uint64_t version;  /* that the fold began at; the log is void once the shard has a later one */
    uint64_t reserved; /* bytes that pushers have reserved, for as many rows as their slots hold */
    uint8_t pad[40];
} fps_undo;
_Static_assert(sizeof(fps_undo) == 64 && sizeof(fps_rows) == 64, "each is a cache line");

/* The log of one shard: its words, and the memory of the logged rows. */
typedef struct {
    fps_undo *words;
    char *entries;
    uint64_t room; /* bytes */
} fps_undo_log;

/* Complete a table's description. `offset` is where the tables before it end, in bytes; returns where this one ends. */
static inline uint64_t fps_place_table(fps_table *table, int row_rule, uint64_t offset) {
    table->n_planes = 0, table->plane_width = 0;
#define FPS_PLANES_OF(number, NAME, name, planes, words) \
    case number: table->n_planes = planes, table->plane_width = words ? words : table->width; break;
    switch (row_rule) { FPS_ROW_RULES(FPS_PLANES_OF) }
#undef FPS_PLANES_OF
    table->weights_offset = offset;
    offset += fps_rows_lines(table->rows * table->width * sizeof(float));
    for (int plane = 0; plane < FPS_ROW_PLANES; plane++) {
        table->planes_offset[plane] = offset;
        if (plane < table->n_planes) offset += fps_rows_lines(table->rows * table->plane_width * sizeof(float));
    }
    table->undo_bytes = (sizeof(fps_undo_entry) + (table->width + table->n_planes * table->plane_width) * sizeof(float) + 7) & ~7ULL;
    return offset;
}

#endif
