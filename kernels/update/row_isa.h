/* The loops over rows for each instruction set, and the choice between them at run time. */
#ifndef FPS_ROW_ISA_H
#define FPS_ROW_ISA_H

#include <string.h>

#include "update/fold.h"
#include "update/rows.h"

/* One row's addresses. */
typedef struct {
    float *weights, *planes[FPS_ROW_PLANES];
    const float *gradient;
} fps_row;

/* Apply a rule to `count` rows, which are all different. Returns whether the results are finite. */
typedef int (*fps_row_loop)(const fps_coefficients *by, int64_t width, const fps_row *rows, int64_t count);

#define FPS_ROW_INFINITY_BITS 0x7f800000 /* a magnitude is finite if its bits are below */

#define FPS_ISA(name) name##_baseline
#include "update/row_tile.h"
#undef FPS_ISA

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define FPS_ISA(name) name##_avx2
#include "update/row_tile.h"
#undef FPS_ISA
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq,avx512bw,fma,prefer-vector-width=512")
#define FPS_ISA(name) name##_avx512
#include "update/row_tile.h"
#undef FPS_ISA
#pragma GCC pop_options
#endif

/* The loops of an instruction set by its place in fold.pyx: 0 the baseline, 1 AVX2, 2 AVX-512. */
static const fps_row_loop *fps_row_loops(int isa) {
#if defined(__x86_64__)
    if (isa == 1) return row_loops_avx2;
    if (isa == 2) return row_loops_avx512;
#endif
    (void)isa;
    return row_loops_baseline;
}

#endif
