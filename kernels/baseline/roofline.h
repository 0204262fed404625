/* The roofline: the plain loop a C programmer would write for one rule and one number of gradients, into fresh buffers.
 *
 * With normal stores it is a loop that the compiler vectorizes; with non-temporal stores it is the same arithmetic, vector by
 * vector. `fastps bench` compares the fold with it. Results are not right to the bit: the compiler may contract sums and
 * products. Buffers begin on a cache line, and so does `first`. */
#ifndef FPS_ROOFLINE_H
#define FPS_ROOFLINE_H

#include <math.h>
#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define FPS_ROOFLINE_UNROLLED 16 /* the most gradients that have a loop of their own */
#define FPS_ROOFLINE_BLOCK 2048  /* floats of one partial sum, where there is no such loop: it stays in the first-level cache */

/* What a rule reads and writes; SGD uses the first optimizer-state tensor, Adam both. */
typedef struct {
    const float *const *gradients;
    const float *weights_in, *mean_in, *square_in;
    float *weights_out, *mean_out, *square_out;
    float minus_rate, momentum, beta2, root_correction2, epsilon;
} fps_roofline_job;

#if defined(__x86_64__)
#define FPS_VECTOR __m128
#define FPS_STORE_STREAMING(address, value) _mm_stream_ps(address, value)
#define FPS_ROOT(value) _mm_sqrt_ps(value)
#define FPS_DRAIN() _mm_sfence() /* non-temporal stores must leave the core before the clock is read */
#else
typedef float fps_vector __attribute__((vector_size(16)));
#define FPS_VECTOR fps_vector
#define FPS_STORE_STREAMING(address, value) (*(fps_vector *)(address) = (value))
#define FPS_ROOT(value) ((fps_vector){sqrtf((value)[0]), sqrtf((value)[1]), sqrtf((value)[2]), sqrtf((value)[3])})
#define FPS_DRAIN() ((void)0)
#endif
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")
#define FPS_ISA(name) name##_baseline
#include "baseline/roofline_loops.h"
#undef FPS_ISA
#pragma GCC pop_options
#undef FPS_VECTOR
#undef FPS_STORE_STREAMING
#undef FPS_ROOT

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")
#pragma GCC target("avx2,fma")
#define FPS_VECTOR __m256
#define FPS_STORE_STREAMING(address, value) _mm256_stream_ps(address, value)
#define FPS_ROOT(value) _mm256_sqrt_ps(value)
#define FPS_ISA(name) name##_avx2
#include "baseline/roofline_loops.h"
#undef FPS_ISA
#undef FPS_VECTOR
#undef FPS_STORE_STREAMING
#undef FPS_ROOT
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")
#pragma GCC target("avx512f,fma,prefer-vector-width=512")
#define FPS_VECTOR __m512
#define FPS_STORE_STREAMING(address, value) _mm512_stream_ps(address, value)
#define FPS_ROOT(value) _mm512_sqrt_ps(value)
#define FPS_ISA(name) name##_avx512
#include "baseline/roofline_loops.h"
#undef FPS_ISA
#undef FPS_VECTOR
#undef FPS_STORE_STREAMING
#undef FPS_ROOT
#pragma GCC pop_options
#endif

/* Run the floats [first, last) of the job with the widest instructions of this machine. */
static void fps_roofline_run(const fps_roofline_job *job, int is_adam, int count, int64_t first, int64_t last, int streaming) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("fma"))
        run_avx512(job, is_adam, count, first, last, streaming);
    else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        run_avx2(job, is_adam, count, first, last, streaming);
    else
#endif
        run_baseline(job, is_adam, count, first, last, streaming);
    if (streaming) FPS_DRAIN();
}

#endif
