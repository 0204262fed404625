/* The rows of a sparse gradient, collected into a push's slot: each row once, with the sum of its values. */
#ifndef FPS_ROW_COLLECT_H
#define FPS_ROW_COLLECT_H

#include <stdlib.h>
#include <string.h>

#include "base/failpoints.h"
#include "rows/rows.h"

/* The places of rows in the slot, by a hash table that grows. One caller at a time may use it. */
typedef struct {
    uint32_t *places; /* of a row in the slot + 1, or 0 */
    int64_t size;
} fps_row_places;

/* The index of the first number that is no row of the table, or -1. */
static int64_t fps_row_outside(const fps_table *table, const int64_t *numbers, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (numbers[i] < 0 || numbers[i] >= table->rows) return i;
    return -1;
}

static inline __attribute__((always_inline)) void fps_collect_row(float *to, const float *values, int is_new,
                                                                  const int64_t width) {
    if (is_new) memcpy(to, values, width * sizeof(float));
    else
        for (int64_t i = 0; i < width; i++) to[i] += values[i];
}

/* Write `count` rows, whose numbers are checked, into a slot; equal numbers are summed in their order. Returns the number of
 * different rows, or -1 without memory. */
static int64_t fps_collect_rows(fps_rows *slot, const fps_table *table, const int64_t *numbers, const float *values,
                                int64_t count, fps_row_places *places) {
    uint32_t *rows = (uint32_t *)(slot + 1);
    float *sums = (float *)((char *)slot + fps_rows_values_offset(table));
    int64_t size = 64, n = 0;
    const int64_t width = table->width;
    while (size < 2 * count) size *= 2;
    if (size > places->size) {
        free(places->places);
        places->places = malloc(size * sizeof(uint32_t));
        places->size = places->places ? size : 0;
        if (!places->places) return -1;
    }
    memset(places->places, 0, size * sizeof(uint32_t));
    FPS_FAILPOINT();
    for (int64_t i = 0; i < count; i++) {
        uint32_t number = (uint32_t)numbers[i];
        uint64_t place = (number * 0x9e3779b97f4a7c15ULL) >> 20 & (size - 1);
        while (places->places[place] && rows[places->places[place] - 1] != number) place = (place + 1) & (size - 1);
        int is_new = !places->places[place];
        if (is_new) {
            rows[n++] = number;
            places->places[place] = (uint32_t)n;
        }
        float *to = sums + (places->places[place] - 1) * width;
        if (width == 16) fps_collect_row(to, values + i * 16, is_new, 16);
        else fps_collect_row(to, values + i * width, is_new, width);
    }
    FPS_FAILPOINT();
    slot->count = n;
    return n;
}

#endif
