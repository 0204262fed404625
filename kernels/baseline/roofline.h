/* The roofline: the plain loop a C programmer would write for one rule and one number of gradients, into fresh buffers.
 *
 * With normal stores it is a loop that the compiler vectorizes; with non-temporal stores it is the same loop, a cache line at a
 * time. `fastps bench` compares the fold with it. Results are not right to the bit: the compiler may contract sums and products.
 * Buffers begin on a cache line, and so does `first`. */
#ifndef FPS_ROOFLINE_H
#define FPS_ROOFLINE_H

#include "update/real.h"

#define FPS_ROOFLINE_UNROLLED 16 /* the most gradients that have a loop of their own */
#define FPS_ROOFLINE_BLOCK 2048  /* floats of one partial sum, where there is no such loop: it stays in the first-level cache */

/* What a rule reads and writes; SGD uses the first optimizer-state tensor, Adam both. */
typedef struct {
    const float *const *gradients;
    const float *weights_in, *mean_in, *square_in;
    float *weights_out, *mean_out, *square_out;
    float minus_rate, momentum, beta2, root_correction2, epsilon;
} fps_roofline_job;

#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")
#define FPS_LOOPS "baseline/roofline_loops.h"
#include "update/each_isa.h"
#pragma GCC pop_options

/* Run the floats [first, last) of the job with the widest instructions of this machine. */
static void fps_roofline_run(const fps_roofline_job *job, int is_adam, int count, int64_t first, int64_t last, int streaming) {
    int isa = FPS_ISA_AVX512;
    while (!fps_isa_available(isa)) isa--;
    FPS_OF_ISA(isa, run)(job, is_adam, count, first, last, streaming);
    if (streaming) FPS_DRAIN();
}

#endif
