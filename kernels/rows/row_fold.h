/* The fold of tables: the rows of a commit's pushes, each logged and then written in place. One module includes it.
 *
 * Each row is loaded, logged and stored once a commit, whatever the number of pushes that have it. The rows of several pushes
 * are therefore chained by a hash table first. */
#ifndef FPS_ROW_FOLD_H
#define FPS_ROW_FOLD_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/atomics.h"
#include "base/failpoints.h"
#include "update/fold_coefficients.h"
#include "rows/rows.h"

/* One row's addresses. */
typedef struct {
    float *weights, *planes[FPS_ROW_PLANES];
    const float *gradient;
} fps_row;

/* Apply a rule to `count` rows, which are all different. Returns whether the results are finite. */
typedef int (*fps_row_loop)(const fps_coefficients *by, int64_t width, const fps_row *rows, int64_t count);

#define FPS_LOOPS "rows/row_tile.h"
#include "update/each_isa.h"

/* The loops of an instruction set. */
static inline const fps_row_loop *fps_row_loops(int isa) { return FPS_OF_ISA(isa, row_loops); }

#define FPS_ROWS_REFUSED (-4)   /* a row out of range, more rows than the table has, or an unknown rule */
#define FPS_ROWS_NO_MEMORY (-5) /* for the scratch, or a log that is full */

/* One push's rows of one row number: a chain in the order of the pushes. */
typedef struct {
    uint32_t row;
    int32_t push;     /* index among the pushes that have rows of the table */
    int64_t position; /* of the row in that push */
    int64_t next;     /* the entry of the next push with this row, or -1 */
    int64_t last;     /* of a chain's first entry: its last one */
} fps_row_link;

/* Memory that a fold of rows writes and forgets; it grows. One caller at a time may use it. */
typedef struct {
    fps_row_link *links;
    int64_t *buckets; /* of the hash table: the first entry of a row, or -1 */
    int64_t n_links, n_buckets;
    float *sums; /* FPS_ROWS_AT_ONCE rows */
    int64_t n_sums;
    fps_coefficients by[FPS_MAX_PUSHES];
    const fps_rows *rows[FPS_MAX_PUSHES];
    fps_push pushes[FPS_MAX_PUSHES];
} fps_row_scratch;

static void fps_row_scratch_free(fps_row_scratch *scratch) {
    if (!scratch) return;
    free(scratch->links), free(scratch->buckets), free(scratch->sums), free(scratch);
}

static int fps_grow(void **memory, int64_t *now, int64_t wanted, size_t size) {
    if (wanted <= *now) return 1;
    void *found = realloc(*memory, (size_t)wanted * size);
    if (!found) return 0;
    *memory = found, *now = wanted;
    return 1;
}

static inline const uint32_t *fps_numbers_of(const fps_rows *rows) { return (const uint32_t *)(rows + 1); }
static inline const float *fps_values_of(const fps_rows *rows, const fps_table *table) {
    return (const float *)((const char *)rows + fps_rows_values_offset(table));
}
static inline float *fps_row_of(char *tables, uint64_t offset, uint32_t row, int32_t width) {
    return (float *)(tables + offset) + (int64_t)row * width;
}
static inline fps_row fps_row_at(char *tables, const fps_table *table, uint32_t number, const float *gradient) {
    fps_row row = {fps_row_of(tables, table->weights_offset, number, table->width), {0}, gradient};
    for (int plane = 0; plane < table->n_planes; plane++)
        row.planes[plane] = fps_row_of(tables, table->planes_offset[plane], number, table->plane_width);
    return row;
}

/* -- the log ----------------------------------------------------------------------------------------------------------- */

/* Begin a fold at this version: nothing is logged. The count is first, because the rows that it counts are of another fold. */
static void fps_undo_begin(const fps_undo_log *log, uint64_t version) {
    fps_undo_publish(&log->words->bytes, 0);
    FPS_FAILPOINT();
    log->words->version = version;
}

/* Log one row behind `used` bytes; returns how many are used then. */
static uint64_t fps_undo_add(const fps_undo_log *log, uint64_t used, int32_t index, const fps_table *table, uint32_t number,
                             const fps_row *row) {
    fps_undo_entry *entry = (fps_undo_entry *)(log->entries + used);
    float *words = (float *)(entry + 1);
    FPS_FAILPOINT();
    entry->table = (uint32_t)index, entry->row = number;
    memcpy(words, row->weights, table->width * sizeof(float));
    for (int plane = 0; plane < table->n_planes; plane++)
        memcpy(words + table->width + plane * table->plane_width, row->planes[plane], table->plane_width * sizeof(float));
    return used + table->undo_bytes;
}

/* Write the logged rows back, if the fold that logged them was not committed. May be repeated. Returns 0 for a damaged log. */
static int fps_undo_roll_back(const fps_undo_log *log, const fps_table *tables, int32_t n_tables, char *base, uint64_t version) {
    uint64_t bytes = fps_undo_load(&log->words->bytes), used = 0;
    if (log->words->version != version && !fps_mutant(FPS_MUTANT_KEEP_UNDO)) return 1;
    if (bytes > log->room) return 0;
    while (used < bytes) {
        const fps_undo_entry *entry = (const fps_undo_entry *)(log->entries + used);
        if (entry->table >= (uint32_t)n_tables) return 0;
        const fps_table *table = &tables[entry->table];
        const float *words = (const float *)(entry + 1);
        if (entry->row >= table->rows || table->undo_bytes > bytes - used) return 0;
        fps_row row = fps_row_at(base, table, entry->row, NULL);
        FPS_FAILPOINT();
        memcpy(row.weights, words, table->width * sizeof(float));
        for (int plane = 0; plane < table->n_planes; plane++)
            memcpy(row.planes[plane], words + table->width + plane * table->plane_width, table->plane_width * sizeof(float));
        used += table->undo_bytes;
    }
    fps_undo_publish(&log->words->bytes, 0);
    return 1;
}

/* -- one table --------------------------------------------------------------------------------------------------------- */

static fps_coefficients fps_row_coefficients_of(int rule, const fps_hyper *hyper, double rate, double scale, int64_t steps) {
    fps_coefficients by;
    memset(&by, 0, sizeof(by));
    by.scale = (float)(hyper->flags & FPS_HYPER_MAXIMIZE ? -scale : scale);
    by.minus_rate = (float)-rate;
    by.epsilon = (float)hyper->epsilon;
    if (rule == FPS_ROWS_ADAGRAD) by.minus_rate = (float)-(rate / (1 + (double)steps * hyper->learning_rate_decay));
    if (rule == FPS_ROWS_SPARSE_ADAM) {
        double corrected = sqrt(1 - pow(hyper->beta2, (double)steps + 1)) / (1 - pow(hyper->beta1, (double)steps + 1));
        by.minus_rate = (float)-(rate * corrected);
        by.undampened = (float)(1 - hyper->beta1);
        by.one_minus_beta2 = (float)(1 - hyper->beta2);
    }
    return by;
}

/* A batch of different rows: log them, publish the log, write them. */
typedef struct {
    const fps_row_loop *loops;
    const fps_table *table;
    int32_t index, rule;
    char *base;
    const fps_undo_log *log;
    uint64_t used;
    int finite, n;
    uint32_t numbers[FPS_ROWS_AT_ONCE];
    fps_row rows[FPS_ROWS_AT_ONCE];
    int64_t chains[FPS_ROWS_AT_ONCE];
} fps_row_batch;

static inline void fps_batch_add(fps_row_batch *batch, uint32_t number, const float *gradient, int64_t chain) {
    fps_row row = fps_row_at(batch->base, batch->table, number, gradient);
    __builtin_prefetch(row.weights, 1);
    for (int plane = 0; plane < batch->table->n_planes; plane++) __builtin_prefetch(row.planes[plane], 1);
    batch->numbers[batch->n] = number, batch->rows[batch->n] = row, batch->chains[batch->n++] = chain;
}

/* Log the batch's rows. Returns 0, or a negative status: nothing may be written then. */
static int fps_batch_log(fps_row_batch *batch) {
    uint64_t used = batch->used;
    if (batch->n * batch->table->undo_bytes > batch->log->room - used) return FPS_ROWS_NO_MEMORY;
    for (int r = 0; r < batch->n; r++)
        used = fps_undo_add(batch->log, used, batch->index, batch->table, batch->numbers[r], &batch->rows[r]);
    batch->used = used;
    if (!fps_mutant(FPS_MUTANT_ROW_FIRST)) fps_undo_publish(&batch->log->words->bytes, used);
    return 0;
}

static void fps_batch_apply(fps_row_batch *batch, const fps_coefficients *by, const fps_row *rows, int count) {
    FPS_FAILPOINT();
    batch->finite &= batch->loops[batch->rule](by, batch->table->width, rows, count);
}

static void fps_batch_end(fps_row_batch *batch) {
    if (fps_mutant(FPS_MUTANT_ROW_FIRST)) fps_undo_publish(&batch->log->words->bytes, batch->used);
    batch->n = 0;
}

/* One push: its rows are all different. */
static int fps_fold_rows_of_one(fps_row_batch *batch, const fps_coefficients *by, const fps_rows *rows) {
    const uint32_t *numbers = fps_numbers_of(rows);
    const float *values = fps_values_of(rows, batch->table);
    int64_t count = rows->count;
    int outcome;
    if (count < 0 || count > batch->table->rows) return FPS_ROWS_REFUSED;
    for (int64_t r = 0; r < count; r++) {
        if (numbers[r] >= batch->table->rows) return FPS_ROWS_REFUSED;
        fps_batch_add(batch, numbers[r], values + r * batch->table->width, -1);
        if (batch->n < FPS_ROWS_AT_ONCE && r + 1 < count) continue;
        if ((outcome = fps_batch_log(batch)) != 0) return outcome;
        for (int each = 0; each < batch->n; each += FPS_ROWS_APPLIED)
            fps_batch_apply(batch, by, batch->rows + each, batch->n - each < FPS_ROWS_APPLIED ? batch->n - each : FPS_ROWS_APPLIED);
        fps_batch_end(batch);
    }
    return 0;
}

/* Chain the rows of all pushes. Returns the number of entries, or a negative status. */
static int64_t fps_chain(fps_row_scratch *scratch, const fps_table *table, int count) {
    int64_t total = 0, n = 0, size = 64;
    for (int push = 0; push < count; push++) {
        if (scratch->rows[push]->count < 0 || scratch->rows[push]->count > table->rows) return FPS_ROWS_REFUSED;
        total += scratch->rows[push]->count;
    }
    while (size < 2 * total) size *= 2;
    if (!fps_grow((void **)&scratch->links, &scratch->n_links, total, sizeof(fps_row_link))
        || !fps_grow((void **)&scratch->buckets, &scratch->n_buckets, size, sizeof(int64_t)))
        return FPS_ROWS_NO_MEMORY;
    memset(scratch->buckets, 0xff, size * sizeof(int64_t));
    for (int push = 0; push < count; push++) {
        const uint32_t *numbers = fps_numbers_of(scratch->rows[push]);
        for (int64_t r = 0, rows = scratch->rows[push]->count; r < rows && n < total; r++) {
            uint32_t number = numbers[r];
            if (number >= table->rows) return FPS_ROWS_REFUSED;
            uint64_t place = (number * 0x9e3779b97f4a7c15ULL) >> 20 & (size - 1);
            while (scratch->buckets[place] >= 0 && scratch->links[scratch->buckets[place]].row != number)
                place = (place + 1) & (size - 1);
            int64_t first = scratch->buckets[place];
            scratch->links[n] = (fps_row_link){number, push, r, -1, first < 0 ? n : -1};
            if (first < 0) scratch->buckets[place] = n;
            else {
                scratch->links[scratch->links[first].last].next = n;
                scratch->links[first].last = n;
            }
            n++;
        }
    }
    return n;
}

static inline const float *fps_chained(const fps_row_scratch *scratch, const fps_table *table, const fps_row_link *link) {
    return fps_values_of(scratch->rows[link->push], table) + link->position * table->width;
}

/* The scaled sum of a chain's gradients, in the order of the pushes. */
static void fps_sum_chain(const fps_row_scratch *scratch, const fps_table *table, int64_t chain, float *total) {
    for (int64_t at = chain; at >= 0; at = scratch->links[at].next) {
        const float *values = fps_chained(scratch, table, &scratch->links[at]);
        float scale = (float)scratch->pushes[scratch->links[at].push].scale;
        if (at == chain)
            for (int32_t i = 0; i < table->width; i++) total[i] = values[i] * scale;
        else
            for (int32_t i = 0; i < table->width; i++) total[i] += values[i] * scale;
    }
}

/* Several pushes: the rule on each row's sum (`by` is the sum's), or push by push. */
static int fps_fold_rows_of_many(fps_row_batch *batch, fps_row_scratch *scratch, int count, const fps_coefficients *sum) {
    const fps_table *table = batch->table;
    int64_t entries = fps_chain(scratch, table, count);
    int outcome;
    if (entries < 0) return (int)entries;
    if (!fps_grow((void **)&scratch->sums, &scratch->n_sums, FPS_ROWS_AT_ONCE * table->width, sizeof(float)))
        return FPS_ROWS_NO_MEMORY;
    for (int64_t at = 0; at <= entries; at++) {
        if (at < entries && scratch->links[at].last >= 0) fps_batch_add(batch, scratch->links[at].row, NULL, at);
        if (batch->n == 0 || (batch->n < FPS_ROWS_AT_ONCE && at < entries)) continue;
        if ((outcome = fps_batch_log(batch)) != 0) return outcome;
        if (sum) {
            for (int r = 0; r < batch->n; r++) {
                batch->rows[r].gradient = scratch->sums + r * table->width;
                fps_sum_chain(scratch, table, batch->chains[r], scratch->sums + r * table->width);
            }
            fps_batch_apply(batch, sum, batch->rows, batch->n);
        } else
            for (int r = 0; r < batch->n; r++)
                for (int64_t link = batch->chains[r]; link >= 0; link = scratch->links[link].next) {
                    batch->rows[r].gradient = fps_chained(scratch, table, &scratch->links[link]);
                    fps_batch_apply(batch, &scratch->by[scratch->links[link].push], &batch->rows[r], 1);
                }
        fps_batch_end(batch);
    }
    return 0;
}

/* Fold the rows of table `index` in all pushes of the job; `pushed` has each push's rows of all tables. `used` counts the log's
 * bytes over the tables of a commit. Returns 0 or a negative status; results that are not finite set the job's flag. */
static int fps_fold_table(const fps_row_loop *loops, const fps_fold_job *job, int row_rule, const fps_table *tables,
                          int32_t index, char *base, char *const *pushed, fps_row_scratch *scratch, const fps_undo_log *log,
                          uint64_t *used) {
    const fps_table *table = &tables[index];
    const fps_coefficients *by = scratch->by;
    fps_coefficients sum;
    int count = 0, outcome;
    int64_t steps = job->steps_in[table->parameter];
    if (row_rule < 0 || row_rule >= FPS_N_ROW_RULES || job->n_pushes > FPS_MAX_PUSHES) return FPS_ROWS_REFUSED;
    for (int push = 0; push < job->n_pushes; push++) {
        const fps_push *from = &job->pushes[push];
        if (!fps_is_present(from, table->parameter)) continue;
        scratch->by[count] = fps_row_coefficients_of(row_rule, &from->hypers[table->group], fps_rate(from, table->group),
                                                     from->scale, steps + count);
        scratch->rows[count] = (const fps_rows *)(pushed[push] + table->slot_offset);
        scratch->pushes[count++] = *from;
    }
    if (count == 0) return 0;
    fps_row_batch batch = {loops, table, index, row_rule, base, log, *used, 1, 0};
    if (job->mode != FPS_FOLD_EACH) {
        double rate = fps_mean_rate(scratch->pushes, count, table->group) * job->rate_scale;
        double scale = job->scale * (count == 1 ? scratch->pushes[0].scale : 1);
        sum = fps_row_coefficients_of(row_rule, &scratch->pushes[0].hypers[table->group], rate, scale, steps);
        by = &sum;
    }
    outcome = count == 1 ? fps_fold_rows_of_one(&batch, by, scratch->rows[0])
                         : fps_fold_rows_of_many(&batch, scratch, count, by == &sum ? by : NULL);
    *used = batch.used;
    if (!batch.finite && job->nonfinite) *job->nonfinite = 1;
    return outcome;
}

/* How many rows of a table a push has. */
static inline int64_t fps_pushed_rows(const fps_table *table, const fps_push *push, const char *pushed) {
    if (!fps_is_present(push, table->parameter)) return 0;
    return ((const fps_rows *)(pushed + table->slot_offset))->count;
}

/* The largest absolute value of a push's rows of one table; infinite if a value is not finite. */
static float fps_largest_row(const fps_table *table, const fps_push *push, const char *pushed) {
    const fps_rows *rows = (const fps_rows *)(pushed + table->slot_offset);
    const float *values = fps_values_of(rows, table);
    float most = -1;
    if (!fps_is_present(push, table->parameter)) return most;
    for (int64_t i = 0; i < rows->count * table->width && rows->count <= table->rows; i++) {
        float size = fabsf(values[i] * (float)push->scale);
        if (!(size < INFINITY)) return INFINITY;
        most = size > most ? size : most;
    }
    return most;
}

#endif
