/* The roofline's loops, compiled once for each instruction set: the includer defines FPS_ISA(name).
 *
 * The number of gradients is a constant of each inlined call, so that the loop has no branch. For a number without a loop of
 * its own, partial sums of one block at a time stand for one gradient. */

#if defined(__AVX512F__)
#define FPS_VECTOR __m512
#define FPS_STORE_STREAMING(address, value) _mm512_stream_ps(address, value)
#define FPS_ROOT(value) _mm512_sqrt_ps(value)
#elif defined(__AVX2__)
#define FPS_VECTOR __m256
#define FPS_STORE_STREAMING(address, value) _mm256_stream_ps(address, value)
#define FPS_ROOT(value) _mm256_sqrt_ps(value)
#elif defined(__x86_64__)
#define FPS_VECTOR __m128
#define FPS_STORE_STREAMING(address, value) _mm_stream_ps(address, value)
#define FPS_ROOT(value) _mm_sqrt_ps(value)
#else
typedef float fps_vector __attribute__((vector_size(16)));
#define FPS_VECTOR fps_vector
#define FPS_STORE_STREAMING(address, value) (*(fps_vector *)(address) = (value))
#define FPS_ROOT(value) ((fps_vector){sqrtf((value)[0]), sqrtf((value)[1]), sqrtf((value)[2]), sqrtf((value)[3])})
#endif
#define FPS_WIDTH ((int64_t)(sizeof(FPS_VECTOR) / sizeof(float)))
#define FPS_AT(pointer, i) (*(const FPS_VECTOR *)((pointer) + (i)))
#define FPS_LINE_VECTORS (16 / FPS_WIDTH) /* non-temporal stores combine into whole lines when they are adjacent */

/* SGD with momentum, a float at a time. */
static inline __attribute__((always_inline)) void FPS_ISA(sgd_plain)(const fps_roofline_job *job, int64_t first, int64_t last,
                                                                     const int count) {
    const float *weights = job->weights_in, *mean = job->mean_in;
    float *restrict weights_out = job->weights_out, *restrict mean_out = job->mean_out;
    const float *gradients[FPS_ROOFLINE_UNROLLED];
    const float momentum = job->momentum, minus_rate = job->minus_rate;
    for (int k = 0; k < count; k++) gradients[k] = job->gradients[k];
#pragma GCC ivdep
    for (int64_t i = first; i < last; i++) {
        float sum = gradients[0][i];
#pragma GCC unroll 16
        for (int k = 1; k < count; k++) sum += gradients[k][i];
        float step = momentum * mean[i] + sum;
        mean_out[i] = step;
        weights_out[i] = weights[i] + minus_rate * step;
    }
}

static inline __attribute__((always_inline)) void FPS_ISA(stream_line)(float *line, const FPS_VECTOR *values) {
#pragma GCC unroll 16
    for (int64_t j = 0; j < FPS_LINE_VECTORS; j++) FPS_STORE_STREAMING(line + j * FPS_WIDTH, values[j]);
}

static inline __attribute__((always_inline)) void FPS_ISA(sgd_streaming)(const fps_roofline_job *job, int64_t first, int64_t last,
                                                                         const int count) {
    const FPS_VECTOR none = {0}, momentum = none + job->momentum, minus_rate = none + job->minus_rate;
    int64_t i = first;
    for (; i + 16 <= last; i += 16) {
        FPS_VECTOR steps[FPS_LINE_VECTORS], weights[FPS_LINE_VECTORS];
#pragma GCC unroll 16
        for (int64_t j = 0; j < FPS_LINE_VECTORS; j++) {
            FPS_VECTOR sum = FPS_AT(job->gradients[0], i + j * FPS_WIDTH);
#pragma GCC unroll 16
            for (int k = 1; k < count; k++) sum += FPS_AT(job->gradients[k], i + j * FPS_WIDTH);
            steps[j] = momentum * FPS_AT(job->mean_in, i + j * FPS_WIDTH) + sum;
            weights[j] = FPS_AT(job->weights_in, i + j * FPS_WIDTH) + minus_rate * steps[j];
        }
        FPS_ISA(stream_line)(job->mean_out + i, steps);
        FPS_ISA(stream_line)(job->weights_out + i, weights);
    }
    FPS_ISA(sgd_plain)(job, i, last, count);
}

/* Adam on one gradient. */
static void FPS_ISA(adam_plain)(const fps_roofline_job *job, int64_t first, int64_t last) {
    const float *gradient = job->gradients[0], *weights = job->weights_in, *mean = job->mean_in, *square = job->square_in;
    float *restrict weights_out = job->weights_out, *restrict mean_out = job->mean_out, *restrict square_out = job->square_out;
    const float fraction = 1 - job->momentum, beta2 = job->beta2, root_correction2 = job->root_correction2;
    const float epsilon = job->epsilon, minus_rate = job->minus_rate;
#pragma GCC ivdep
    for (int64_t i = first; i < last; i++) {
        float average = mean[i] + fraction * (gradient[i] - mean[i]);
        float power = beta2 * square[i] + (1 - beta2) * gradient[i] * gradient[i];
        mean_out[i] = average;
        square_out[i] = power;
        weights_out[i] = weights[i] + minus_rate * average / (__builtin_sqrtf(power) / root_correction2 + epsilon);
    }
}

static void FPS_ISA(adam_streaming)(const fps_roofline_job *job, int64_t first, int64_t last) {
    const FPS_VECTOR none = {0}, fraction = none + (1 - job->momentum), beta2 = none + job->beta2;
    const FPS_VECTOR root_correction2 = none + job->root_correction2, epsilon = none + job->epsilon;
    const FPS_VECTOR minus_rate = none + job->minus_rate, rest2 = none + (1 - job->beta2);
    int64_t i = first;
    for (; i + 16 <= last; i += 16) {
        FPS_VECTOR averages[FPS_LINE_VECTORS], powers[FPS_LINE_VECTORS], weights[FPS_LINE_VECTORS];
#pragma GCC unroll 16
        for (int64_t j = 0; j < FPS_LINE_VECTORS; j++) {
            const int64_t at = i + j * FPS_WIDTH;
            FPS_VECTOR gradient = FPS_AT(job->gradients[0], at), mean = FPS_AT(job->mean_in, at);
            averages[j] = mean + fraction * (gradient - mean);
            powers[j] = beta2 * FPS_AT(job->square_in, at) + rest2 * gradient * gradient;
            weights[j] = FPS_AT(job->weights_in, at)
                         + minus_rate * averages[j] / (FPS_ROOT(powers[j]) / root_correction2 + epsilon);
        }
        FPS_ISA(stream_line)(job->mean_out + i, averages);
        FPS_ISA(stream_line)(job->square_out + i, powers);
        FPS_ISA(stream_line)(job->weights_out + i, weights);
    }
    FPS_ISA(adam_plain)(job, i, last);
}

/* Add `count` gradients, from float `first` on, to the partial sum. */
static inline __attribute__((always_inline)) void FPS_ISA(add_to)(float *restrict sum, const float *const *gradients,
                                                                  int64_t first, int64_t length, const int count) {
#pragma GCC ivdep
    for (int64_t i = 0; i < length; i++) {
        float value = sum[i];
#pragma GCC unroll 16
        for (int k = 0; k < count; k++) value += gradients[k][first + i];
        sum[i] = value;
    }
}

/* SGD with momentum on any number of gradients. */
static void FPS_ISA(sgd_blocks)(const fps_roofline_job *job, int64_t first, int64_t last, int count, int streaming) {
    float sum[FPS_ROOFLINE_BLOCK] __attribute__((aligned(64)));
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
        if (streaming) FPS_ISA(sgd_streaming)(&block, 0, length, 1);
        else FPS_ISA(sgd_plain)(&block, 0, length, 1);
    }
}

static void FPS_ISA(run)(const fps_roofline_job *job, int is_adam, int count, int64_t first, int64_t last, int streaming) {
#define FPS_SGD(number)                                                                                                  \
    case number:                                                                                                         \
        if (streaming) FPS_ISA(sgd_streaming)(job, first, last, number);                                                 \
        else FPS_ISA(sgd_plain)(job, first, last, number);                                                               \
        return
    if (is_adam) {
        if (streaming) FPS_ISA(adam_streaming)(job, first, last);
        else FPS_ISA(adam_plain)(job, first, last);
        return;
    }
    switch (count) {
        FPS_SGD(1);
        FPS_SGD(2);
        FPS_SGD(3);
        FPS_SGD(4);
        FPS_SGD(8);
        FPS_SGD(16);
        default: FPS_ISA(sgd_blocks)(job, first, last, count, streaming);
    }
#undef FPS_SGD
}

#undef FPS_VECTOR
#undef FPS_STORE_STREAMING
#undef FPS_ROOT
#undef FPS_WIDTH
#undef FPS_AT
#undef FPS_LINE_VECTORS
