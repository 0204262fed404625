/* The loops over rows for each instruction set, and the choice between them at run time. */
#ifndef FPS_ROW_ISA_H
#define FPS_ROW_ISA_H

#include <string.h>

#include "update/fold.h"
#include "rows/rows.h"

/* One row's addresses. */
typedef struct {
    float *weights, *planes[FPS_ROW_PLANES];
    const float *gradient;
} fps_row;

/* Apply a rule to `count` rows, which are all different. Returns whether the results are finite. */
typedef int (*fps_row_loop)(const fps_coefficients *by, int64_t width, const fps_row *rows, int64_t count);

#define FPS_ROW_INFINITY_BITS 0x7f800000 /* a magnitude is finite if its bits are below */

#define FPS_LOOPS "rows/row_tile.h"
#include "update/each_isa.h"

/* The loops of an instruction set. */
static inline const fps_row_loop *fps_row_loops(int isa) { return FPS_OF_ISA(isa, row_loops); }

#endif
