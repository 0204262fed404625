/* The roofline's loops, compiled once for each instruction set: the includer defines FPS_ISA(name).
 *
 * The rule, the number of gradients and the kind of stores are constants of each inlined call, so that the loop has no branch. For
 * a number without a loop of its own, partial sums of one block at a time stand for one gradient. */

#include "update/stream_tile.h"

/* SGD with momentum, or Adam, on the float i, whose gradients have this sum. Returns the weight. */
static inline __attribute__((always_inline)) float FPS_ISA(apply)(const fps_roofline_job *by, const int is_adam, int64_t i,
                                                                  float sum, float *mean_out, float *square_out) {
    if (!is_adam) {
        *mean_out = by->momentum * by->mean_in[i] + sum;
        return by->weights_in[i] + by->minus_rate * *mean_out;
    }
    *mean_out = by->mean_in[i] + (1 - by->momentum) * (sum - by->mean_in[i]);
    *square_out = by->beta2 * by->square_in[i] + (1 - by->beta2) * sum * sum;
    return by->weights_in[i]
           + by->minus_rate * *mean_out / (__builtin_sqrtf(*square_out) / by->root_correction2 + by->epsilon);
}

static inline __attribute__((always_inline)) float FPS_ISA(sum)(const float *const *gradients, int64_t i, const int count) {
    float sum = gradients[0][i];
#pragma GCC unroll 16
    for (int k = 1; k < count; k++) sum += gradients[k][i];
    return sum;
}

/* One pass: with non-temporal stores a cache line at a time, whose results are in registers until then. */
static inline __attribute__((always_inline)) void FPS_ISA(pass)(const fps_roofline_job *job, const int is_adam, const int count,
                                                                int64_t first, int64_t last, const int streaming) {
    const fps_roofline_job by = *job;
    float *restrict weights_out = by.weights_out, *restrict mean_out = by.mean_out, *restrict square_out = by.square_out;
    const float *gradients[FPS_ROOFLINE_UNROLLED];
    int64_t i = first;
    for (int k = 0; k < count; k++) gradients[k] = by.gradients[k];
    for (; streaming && i + 16 <= last; i += 16) {
        float weights[16] FPS_ON_LINE, means[16] FPS_ON_LINE;
        float squares[16] FPS_ON_LINE;
#pragma GCC ivdep
        for (int j = 0; j < 16; j++)
            weights[j] = FPS_ISA(apply)(&by, is_adam, i + j, FPS_ISA(sum)(gradients, i + j, count), means + j, squares + j);
        FPS_ISA(stream_line)(mean_out + i, means);
        if (is_adam) FPS_ISA(stream_line)(square_out + i, squares);
        FPS_ISA(stream_line)(weights_out + i, weights);
    }
#pragma GCC ivdep
    for (; i < last; i++)
        weights_out[i] = FPS_ISA(apply)(&by, is_adam, i, FPS_ISA(sum)(gradients, i, count), mean_out + i, square_out + i);
}

/* Add `count` gradients, from float `first` on, to the partial sum. */
static inline __attribute__((always_inline)) void FPS_ISA(add_to)(float *restrict sum, const float *const *gradients,
                                                                  int64_t first, int64_t length, const int count) {
#pragma GCC ivdep
    for (int64_t i = 0; i < length; i++) sum[i] += FPS_ISA(sum)(gradients, first + i, count);
}

/* SGD with momentum on any number of gradients. */
static void FPS_ISA(sgd_blocks)(const fps_roofline_job *job, int64_t first, int64_t last, int count, int streaming) {
    float sum[FPS_ROOFLINE_BLOCK] FPS_ON_LINE;
    for (int64_t begin = first; begin < last; begin += FPS_ROOFLINE_BLOCK) {
        const int64_t length = last - begin < FPS_ROOFLINE_BLOCK ? last - begin : FPS_ROOFLINE_BLOCK;
        const float *const sums[1] = {sum};
        fps_roofline_job block = *job;
        int k = 0;
        for (int64_t i = 0; i < length; i++) sum[i] = 0;
        for (; k + 8 <= count; k += 8) FPS_ISA(add_to)(sum, job->gradients + k, begin, length, 8);
        for (; k < count; k++) FPS_ISA(add_to)(sum, job->gradients + k, begin, length, 1);
        block.gradients = sums;
        block.weights_in += begin;
        block.mean_in += begin;
        block.weights_out += begin;
        block.mean_out += begin;
        if (streaming) FPS_ISA(pass)(&block, 0, 1, 0, length, 1);
        else FPS_ISA(pass)(&block, 0, 1, 0, length, 0);
    }
}

static void FPS_ISA(run)(const fps_roofline_job *job, int is_adam, int count, int64_t first, int64_t last, int streaming) {
#define FPS_PASS(adam, number)                                                                                           \
    return streaming ? FPS_ISA(pass)(job, adam, number, first, last, 1) : FPS_ISA(pass)(job, adam, number, first, last, 0)
    if (is_adam) FPS_PASS(1, 1);
    switch (count) {
        case 1: FPS_PASS(0, 1);
        case 2: FPS_PASS(0, 2);
        case 3: FPS_PASS(0, 3);
        case 4: FPS_PASS(0, 4);
        case 8: FPS_PASS(0, 8);
        case 16: FPS_PASS(0, 16);
        default: FPS_ISA(sgd_blocks)(job, first, last, count, streaming);
    }
#undef FPS_PASS
}

#undef FPS_STREAM_WORD
#undef FPS_STREAM
