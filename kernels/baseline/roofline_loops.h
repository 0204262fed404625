/* The loops of limit.h, compiled once for each instruction set: the includer defines FPS_ISA(name) and the vector's words.
 *
 * Each function is inlined with constants for the number of gradients, so that each call is a loop without a branch. */

#define FPS_WIDTH ((int64_t)(sizeof(FPS_VECTOR) / sizeof(float)))
#define FPS_AT(pointer, i) (*(const FPS_VECTOR *)((pointer) + (i)))
#define FPS_LINE_VECTORS (16 / FPS_WIDTH) /* streamed lines leave the core whole where they are written one after the other */

/* SGD with momentum, a float at a time. */
static inline __attribute__((always_inline)) void FPS_ISA(sgd_plain)(const fps_limit_job *job, int64_t first, int64_t last,
                                                                     const int count) {
    const float *weights = job->weights_in, *mean = job->mean_in;
    float *restrict weights_out = job->weights_out, *restrict mean_out = job->mean_out;
    const float *gradients[FPS_LIMIT_GRADIENTS];
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

static inline __attribute__((always_inline)) void FPS_ISA(sgd_streaming)(const fps_limit_job *job, int64_t first, int64_t last,
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
static void FPS_ISA(adam_plain)(const fps_limit_job *job, int64_t first, int64_t last) {
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

static void FPS_ISA(adam_streaming)(const fps_limit_job *job, int64_t first, int64_t last) {
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

static void FPS_ISA(run)(const fps_limit_job *job, int is_adam, int count, int64_t first, int64_t last, int streaming) {
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
    }
#undef FPS_SGD
}

#undef FPS_WIDTH
#undef FPS_AT
#undef FPS_LINE_VECTORS
