/* The loops over one tile, compiled once for each instruction set: the includer defines FPS_ISA(name).
 *
 * Each loop does to one element what torch's single-tensor optimizer does, in torch's order, with a fused multiply-add exactly
 * where ATen has one; the compiler vectorizes it. The bits are therefore torch's, and the same on every instruction set. An
 * output may alias its input at the same element, never at a shifted one: hence ivdep. */

/* a * b + c with one rounding. */
static inline __attribute__((always_inline)) float FPS_ISA(fma)(float a, float b, float c) {
#if defined(__FMA__) || defined(__AVX512F__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    /* Without the instruction: the product is exact in double; the sum is rounded to odd, so that rounding it again to float
     * equals one rounding (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008). */
    double product = (double)a * b, sum = product + c, back = sum - product;
    double error = (product - (sum - back)) + (c - back);
    union { double value; int64_t bits; } odd = {sum};
    if ((error > 0 || error < 0) && !(odd.bits & 1)) odd.bits += (error > 0) == (sum > 0) ? 1 : -1;
    return (float)odd.value;
#endif
}

/* number / divisor to the bit, by cheaper products. Neither may be negative, no step may underflow, and `inverse` must be
 * 1 / divisor, rounded once. The first correction leaves an error below one unit in the last place; from there the second
 * rounds as a division does (Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990). */
static inline __attribute__((always_inline)) float FPS_ISA(quotient)(float number, float divisor, float inverse) {
#if defined(__FMA__) || defined(__AVX512F__) || defined(__aarch64__)
    float ratio = number * inverse;
    ratio = __builtin_fmaf(__builtin_fmaf(-ratio, divisor, number), inverse, ratio);
    ratio = __builtin_fmaf(__builtin_fmaf(-ratio, divisor, number), inverse, ratio);
    return number < __builtin_inff() ? ratio : number;
#else
    (void)inverse;
    return number / divisor;
#endif
}

/* total = sum of the gradients at `first`, in order. */
static void FPS_ISA(sum)(float *restrict total, const fps_push *pushes, int count, int64_t first, int64_t length) {
    const float *a = (const float *)pushes[0].gradient + first, *b = (const float *)pushes[1].gradient + first;
    int next = 2;
    if (count >= 4) {
        const float *c = (const float *)pushes[2].gradient + first, *d = (const float *)pushes[3].gradient + first;
        for (int64_t i = 0; i < length; i++) total[i] = ((a[i] + b[i]) + c[i]) + d[i];
        next = 4;
    } else {
        for (int64_t i = 0; i < length; i++) total[i] = a[i] + b[i];
    }
    for (; next < count; next++) {
        const float *more = (const float *)pushes[next].gradient + first;
        for (int64_t i = 0; i < length; i++) total[i] += more[i];
    }
}

/* total += scale * gradient, or total = scale * gradient. */
static void FPS_ISA(add)(float *restrict total, const float *restrict gradient, float scale, int is_first, int64_t length) {
    if (is_first)
        for (int64_t i = 0; i < length; i++) total[i] = gradient[i] * scale;
    else
        for (int64_t i = 0; i < length; i++) total[i] += gradient[i] * scale;
}

/* IEEE half precision, exactly: exponents move by 112, and those of infinities and NaNs by 112 again. A subnormal half gets an
 * implicit bit that is then subtracted as a float. No subnormal float is read or written on the way. */
static void FPS_ISA(widen_float16)(float *restrict wide, const uint16_t *restrict halves, int64_t length) {
    const union { uint32_t bits; float value; } implicit = {113u << 23};
    for (int64_t i = 0; i < length; i++) {
        union { uint32_t bits; float value; } number = {(halves[i] & 0x7fffu) << 13};
        uint32_t exponent = number.bits & (0x7c00u << 13);
        number.bits += 112u << 23;
        number.bits += exponent == 0x7c00u << 13 ? 112u << 23 : exponent == 0 ? 1u << 23 : 0;
        number.value -= exponent == 0 ? implicit.value : 0.0f;
        number.bits |= (uint32_t)(halves[i] & 0x8000u) << 16;
        wide[i] = number.value;
    }
}

/* bfloat16 is the upper half of a float. */
static void FPS_ISA(widen_bfloat16)(float *restrict wide, const uint16_t *restrict halves, int64_t length) {
    for (int64_t i = 0; i < length; i++) {
        union { uint32_t bits; float value; } number = {(uint32_t)halves[i] << 16};
        wide[i] = number.value;
    }
}

/* The larger magnitude of two, as bits: those of an infinity or a NaN are larger than those of any number. */
static inline __attribute__((always_inline)) int32_t FPS_ISA(larger)(int32_t most, float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    bits &= 0x7fffffff;
    return bits > most ? bits : most;
}

/* Element i of the sum, in order, of `count` gradients; `count` is a constant at every call. */
static inline __attribute__((always_inline)) float FPS_ISA(gradient)(const float *const *gradients, int64_t i, const int count) {
    float total = gradients[0][i];
    if (count > 1) total += gradients[1][i];
    if (count > 2) total += gradients[2][i];
    if (count > 3) total += gradients[3][i];
    return total;
}

/* start + (end - start) * fraction, from the nearer end, as torch.lerp; fps_lerp_of made `fraction`. */
static inline __attribute__((always_inline)) float FPS_ISA(lerp)(float start, float end, float fraction, int is_small) {
    return FPS_ISA(fma)(fraction, end - start, is_small ? start : end);
}

/* The moving average of the weights, by lerp, so that the average of constant weights equals them to the bit. */
static void FPS_ISA(average)(fps_lerp by, int64_t length, const float *weights, const float *average_in, float *average_out) {
    if (by.is_small) {
#pragma GCC ivdep
        for (int64_t i = 0; i < length; i++)
            average_out[i] = FPS_ISA(lerp)(average_in[i], weights[i], by.fraction, 1);
    } else {
#pragma GCC ivdep
        for (int64_t i = 0; i < length; i++)
            average_out[i] = FPS_ISA(lerp)(average_in[i], weights[i], by.fraction, 0);
    }
}

/* The loops of SGD and Adam take `count` gradients at once: they apply their sum, in order, with by[0], or with `each` apply
 * them one after the other, each with its own coefficients, while the element is in registers. They return the largest
 * magnitude of their results as bits, so that non-finite results are found without another pass. */

/* Non-temporal stores of one cache line. */
static inline __attribute__((always_inline)) void FPS_ISA(stream_line)(float *to, const float *from) {
    for (int i = 0; i < FPS_LINE_FLOATS; i += (int)(sizeof(FPS_STREAM_WORD) / sizeof(float))) FPS_STREAM(to + i, from + i);
}

/* torch.optim.SGD on element i; returns the weight, and updates the momentum buffer `*buffer`. */
static inline __attribute__((always_inline)) float FPS_ISA(sgd_element)(
    const fps_coefficients *own, const float *const *gradients, int64_t i, float weight, float *buffer, const int applied,
    const int count, const int each, const int decay, const int momentum, const int first, const int nesterov) {
#pragma GCC unroll 4
    for (int k = 0; k < applied; k++) {
        float step = (each ? gradients[k][i] : FPS_ISA(gradient)(gradients, i, count)) * own[k].scale;
        if (decay) step = FPS_ISA(fma)(weight, own[k].weight_decay, step);
        if (momentum) {
            *buffer = first ? step : FPS_ISA(fma)(step, own[k].undampened, *buffer * own[k].momentum);
            step = nesterov ? FPS_ISA(fma)(*buffer, own[k].momentum, step) : *buffer;
        }
        weight = FPS_ISA(fma)(step, own[k].minus_rate, weight);
    }
    return weight;
}

/* Counts and flags are constants at every call, so each call is a loop without a branch. With `streaming` the loop takes one
 * cache line at a time, whose results are in registers or the nearest cache when they are stored. */
static inline __attribute__((always_inline)) int32_t FPS_ISA(sgd_loop)(
    const fps_coefficients *by, int64_t length, const float *const *pushed, const int count, const int each,
    const float *weights_in, float *weights_out, const float *buffer_in, float *buffer_out, const int streaming, const int decay,
    const int momentum, const int first, const int nesterov) {
    FPS_LOCALS(by, pushed, count, each);
    int32_t most = 0;
    int64_t i = 0;
    if (streaming) {
        int32_t mosts[FPS_LINE_FLOATS] FPS_ON_LINE = {0};
        float weights[FPS_LINE_FLOATS] FPS_ON_LINE, buffers[FPS_LINE_FLOATS] FPS_ON_LINE;
        for (; i + FPS_LINE_FLOATS <= length; i += FPS_LINE_FLOATS) {
#pragma GCC ivdep
            for (int j = 0; j < FPS_LINE_FLOATS; j++) {
                float buffer = momentum && !first ? buffer_in[i + j] : 0;
                weights[j] = FPS_ISA(sgd_element)(own, gradients, i + j, weights_in[i + j], &buffer, applied, count, each, decay,
                                                  momentum, first, nesterov);
                buffers[j] = buffer;
                mosts[j] = FPS_ISA(larger)(mosts[j], weights[j]);
            }
            if (momentum) FPS_ISA(stream_line)(buffer_out + i, buffers);
            FPS_ISA(stream_line)(weights_out + i, weights);
        }
        for (int j = 0; j < FPS_LINE_FLOATS; j++) most = mosts[j] > most ? mosts[j] : most;
    }
#pragma GCC ivdep
    for (; i < length; i++) {
        float buffer = momentum && !first ? buffer_in[i] : 0;
        float weight = FPS_ISA(sgd_element)(own, gradients, i, weights_in[i], &buffer, applied, count, each, decay, momentum, first,
                                            nesterov);
        if (momentum) buffer_out[i] = buffer;
        weights_out[i] = weight;
        most = FPS_ISA(larger)(most, weight);
    }
    return most;
}

static inline __attribute__((always_inline)) int FPS_ISA(sgd_by_flags)(
    const fps_coefficients *by, int64_t length, const float *const *pushed, int count, int each, const float *weights_in,
    float *weights_out, const float *buffer_in, float *buffer_out, const int streaming) {
    int32_t most;
#define FPS_SGD_LOOP(count, each, decay, momentum, first, nesterov)                                                      \
    most = FPS_ISA(sgd_loop)(by, length, pushed, count, each, weights_in, weights_out, buffer_in, buffer_out, streaming, \
                             decay, momentum, first, nesterov)
#define FPS_SGD(...) FPS_BY_COUNT(FPS_SGD_LOOP, __VA_ARGS__)
#define FPS_SGD_DECAY(momentum, first, nesterov)                                                                         \
    do {                                                                                                                 \
        if (by->has_decay) FPS_SGD(1, momentum, first, nesterov);                                                        \
        else FPS_SGD(0, momentum, first, nesterov);                                                                      \
    } while (0)
    if (!by->has_momentum) FPS_SGD_DECAY(0, 0, 0);
    else if (by->is_first && by->is_nesterov) FPS_SGD_DECAY(1, 1, 1);
    else if (by->is_first) FPS_SGD_DECAY(1, 1, 0);
    else if (by->is_nesterov) FPS_SGD_DECAY(1, 0, 1);
    else FPS_SGD_DECAY(1, 0, 0);
#undef FPS_SGD_DECAY
#undef FPS_SGD
#undef FPS_SGD_LOOP
    return most < FPS_INFINITY_BITS;
}

/* Separate functions, so that neither kind of store costs the other registers. */
static __attribute__((noinline)) int FPS_ISA(sgd)(
    const fps_coefficients *by, int64_t length, const float *const *pushed, int count, int each, const float *weights_in,
    float *weights_out, const float *buffer_in, float *buffer_out) {
    return FPS_ISA(sgd_by_flags)(by, length, pushed, count, each, weights_in, weights_out, buffer_in, buffer_out, 0);
}

static __attribute__((noinline)) int FPS_ISA(sgd_streaming)(
    const fps_coefficients *by, int64_t length, const float *const *pushed, int count, int each, const float *weights_in,
    float *weights_out, const float *buffer_in, float *buffer_out) {
    return FPS_ISA(sgd_by_flags)(by, length, pushed, count, each, weights_in, weights_out, buffer_in, buffer_out, 1);
}

/* torch.optim.Adam and AdamW: lerp_, mul_, addcmul_, sqrt, div, add_, addcdiv_, as single-tensor torch calls them. All pushes
 * share the lerp of the mean. */
static inline __attribute__((always_inline)) float FPS_ISA(adam_element)(
    const fps_coefficients *own, fps_lerp lerp, const float *const *gradients, int64_t i, float weight, float *mean, float *square,
    const int applied, const int count, const int each, const int decay, const int shrink) {
#pragma GCC unroll 4
    for (int k = 0; k < applied; k++) {
        float step = (each ? gradients[k][i] : FPS_ISA(gradient)(gradients, i, count)) * own[k].scale;
        if (shrink) weight = weight * own[k].shrink;
        if (decay) step = FPS_ISA(fma)(weight, own[k].weight_decay, step);
        *mean = FPS_ISA(lerp)(*mean, step, lerp.fraction, lerp.is_small);
        *square = FPS_ISA(fma)(own[k].one_minus_beta2 * step, step, *square * own[k].beta2);
        float root = FPS_ISA(quotient)(__builtin_sqrtf(*square), own[k].root_correction2, own[k].inverse_root_correction2);
        weight = weight + (own[k].minus_rate * *mean) / (root + own[k].epsilon);
    }
    return weight;
}

static inline __attribute__((always_inline)) int32_t FPS_ISA(adam_loop)(
    const fps_coefficients *by, int64_t length, const float *const *pushed, const int count, const int each,
    const float *weights_in, float *weights_out, const float *mean_in, float *mean_out, const float *square_in,
    float *square_out, const int streaming, const int decay, const int shrink) {
    FPS_LOCALS(by, pushed, count, each);
    const fps_lerp lerp = own[0].lerp;
    int32_t most = 0;
    int64_t i = 0;
    if (streaming) {
        int32_t mosts[FPS_LINE_FLOATS] FPS_ON_LINE = {0};
        float weights[FPS_LINE_FLOATS] FPS_ON_LINE, means[FPS_LINE_FLOATS] FPS_ON_LINE, squares[FPS_LINE_FLOATS] FPS_ON_LINE;
        for (; i + FPS_LINE_FLOATS <= length; i += FPS_LINE_FLOATS) {
#pragma GCC ivdep
            for (int j = 0; j < FPS_LINE_FLOATS; j++) {
                float mean = mean_in[i + j], square = square_in[i + j];
                weights[j] = FPS_ISA(adam_element)(own, lerp, gradients, i + j, weights_in[i + j], &mean, &square, applied, count,
                                                   each, decay, shrink);
                means[j] = mean;
                squares[j] = square;
                mosts[j] = FPS_ISA(larger)(FPS_ISA(larger)(mosts[j], weights[j]), square);
            }
            FPS_ISA(stream_line)(mean_out + i, means);
            FPS_ISA(stream_line)(square_out + i, squares);
            FPS_ISA(stream_line)(weights_out + i, weights);
        }
        for (int j = 0; j < FPS_LINE_FLOATS; j++) most = mosts[j] > most ? mosts[j] : most;
    }
#pragma GCC ivdep
    for (; i < length; i++) {
        float mean = mean_in[i], square = square_in[i];
        float weight = FPS_ISA(adam_element)(own, lerp, gradients, i, weights_in[i], &mean, &square, applied, count, each, decay,
                                             shrink);
        mean_out[i] = mean;
        square_out[i] = square;
        weights_out[i] = weight;
        most = FPS_ISA(larger)(FPS_ISA(larger)(most, weight), square);
    }
    return most;
}

static inline __attribute__((always_inline)) int FPS_ISA(adam_by_flags)(
    const fps_coefficients *by, int64_t length, const float *const *pushed, int count, int each, const float *weights_in,
    float *weights_out, const float *mean_in, float *mean_out, const float *square_in, float *square_out, const int streaming) {
    int32_t most;
#define FPS_ADAM_LOOP(count, each, decay, shrink)                                                                        \
    most = FPS_ISA(adam_loop)(by, length, pushed, count, each, weights_in, weights_out, mean_in, mean_out, square_in,      \
                              square_out, streaming, decay, shrink)
#define FPS_ADAM(...) FPS_BY_COUNT(FPS_ADAM_LOOP, __VA_ARGS__)
    if (by->has_shrink) FPS_ADAM(0, 1);
    else if (by->has_decay) FPS_ADAM(1, 0);
    else FPS_ADAM(0, 0);
#undef FPS_ADAM
#undef FPS_ADAM_LOOP
    return most < FPS_INFINITY_BITS;
}

static __attribute__((noinline)) int FPS_ISA(adam)(
    const fps_coefficients *by, int64_t length, const float *const *pushed, int count, int each, const float *weights_in,
    float *weights_out, const float *mean_in, float *mean_out, const float *square_in, float *square_out) {
    return FPS_ISA(adam_by_flags)(by, length, pushed, count, each, weights_in, weights_out, mean_in, mean_out, square_in,
                                  square_out, 0);
}

static __attribute__((noinline)) int FPS_ISA(adam_streaming)(
    const fps_coefficients *by, int64_t length, const float *const *pushed, int count, int each, const float *weights_in,
    float *weights_out, const float *mean_in, float *mean_out, const float *square_in, float *square_out) {
    return FPS_ISA(adam_by_flags)(by, length, pushed, count, each, weights_in, weights_out, mean_in, mean_out, square_in,
                                  square_out, 1);
}

/* torch.optim.Adagrad: addcmul_, sqrt, add_, addcdiv_. */
static inline __attribute__((always_inline)) void FPS_ISA(adagrad_loop)(
    const fps_coefficients *by, int64_t length, const float *gradient, const float *weights_in, float *weights_out,
    const float *sum_in, float *sum_out, const int decay) {
    const float scale = by->scale, weight_decay = by->weight_decay, epsilon = by->epsilon, minus_rate = by->minus_rate;
#pragma GCC ivdep
    for (int64_t i = 0; i < length; i++) {
        float weight = weights_in[i], step = gradient[i] * scale;
        if (decay) step = FPS_ISA(fma)(weight, weight_decay, step);
        float sum = FPS_ISA(fma)(step, step, sum_in[i]);
        sum_out[i] = sum;
        weights_out[i] = weight + (minus_rate * step) / (__builtin_sqrtf(sum) + epsilon);
    }
}

static void FPS_ISA(adagrad)(const fps_coefficients *by, int64_t length, const float *gradient, const float *weights_in,
                             float *weights_out, const float *sum_in, float *sum_out) {
    if (by->has_decay) FPS_ISA(adagrad_loop)(by, length, gradient, weights_in, weights_out, sum_in, sum_out, 1);
    else FPS_ISA(adagrad_loop)(by, length, gradient, weights_in, weights_out, sum_in, sum_out, 0);
}

/* torch.optim.RMSprop: mul_, addcmul_, centered lerp_ and addcmul, sqrt, add_, then addcdiv_, or with momentum mul_, addcdiv_
 * and add_. `stride` separates the planes of squares, of momentum, and of the gradients' average. */
static inline __attribute__((always_inline)) void FPS_ISA(rmsprop_loop)(
    const fps_coefficients *by, int64_t length, const float *gradient, const float *weights_in, float *weights_out,
    const float *state_in, float *state_out, int64_t stride, const int decay, const int momentum, const int centered) {
    const float scale = by->scale, weight_decay = by->weight_decay, factor = by->momentum, epsilon = by->epsilon;
    const float beta2 = by->beta2, one_minus_beta2 = by->one_minus_beta2, minus_rate = by->minus_rate;
    const fps_lerp lerp = by->lerp;
#pragma GCC ivdep
    for (int64_t i = 0; i < length; i++) {
        float weight = weights_in[i], step = gradient[i] * scale;
        if (decay) step = FPS_ISA(fma)(weight, weight_decay, step);
        float square = FPS_ISA(fma)(one_minus_beta2 * step, step, state_in[i] * beta2), variance = square;
        state_out[i] = square;
        if (centered) {
            float mean = FPS_ISA(lerp)(state_in[2 * stride + i], step, lerp.fraction, lerp.is_small);
            state_out[2 * stride + i] = mean;
            variance = FPS_ISA(fma)(-mean, mean, square);
        }
        float root = __builtin_sqrtf(variance) + epsilon;
        if (momentum) {
            float buffer = state_in[stride + i] * factor + step / root;
            state_out[stride + i] = buffer;
            weights_out[i] = FPS_ISA(fma)(buffer, minus_rate, weight);
        } else {
            weights_out[i] = weight + (minus_rate * step) / root;
        }
    }
}

static void FPS_ISA(rmsprop)(const fps_coefficients *by, int64_t length, const float *gradient, const float *weights_in,
                             float *weights_out, const float *state_in, float *state_out, int64_t stride) {
#define FPS_RMSPROP(decay, momentum, centered)                                                                           \
    FPS_ISA(rmsprop_loop)(by, length, gradient, weights_in, weights_out, state_in, state_out, stride, decay, momentum, centered)
#define FPS_RMSPROP_DECAY(momentum, centered)                                                                            \
    do {                                                                                                                 \
        if (by->has_decay) FPS_RMSPROP(1, momentum, centered);                                                           \
        else FPS_RMSPROP(0, momentum, centered);                                                                         \
    } while (0)
    if (by->has_momentum && by->is_centered) FPS_RMSPROP_DECAY(1, 1);
    else if (by->has_momentum) FPS_RMSPROP_DECAY(1, 0);
    else if (by->is_centered) FPS_RMSPROP_DECAY(0, 1);
    else FPS_RMSPROP_DECAY(0, 0);
#undef FPS_RMSPROP_DECAY
#undef FPS_RMSPROP
}

/* Whether no value of a tile is infinite or NaN, for rules whose loops do not check. */
static int FPS_ISA(is_finite)(const float *values, int64_t length) {
    int32_t most = 0;
    for (int64_t i = 0; i < length; i++) most = FPS_ISA(larger)(most, values[i]);
    return most < FPS_INFINITY_BITS;
}

/* Copy a staged tile with non-temporal stores: by its next use the caches would have evicted it anyway. */
static void FPS_ISA(stream)(float *to, const float *from, int64_t length) {
    const int64_t width = sizeof(FPS_STREAM_WORD) / sizeof(float);
    int64_t i = 0;
    if ((uintptr_t)to % sizeof(FPS_STREAM_WORD) == 0)
        for (; i + width <= length; i += width) FPS_STREAM(to + i, from + i);
    memcpy(to + i, from + i, (length - i) * sizeof(float));
}

static const fps_tile_functions FPS_ISA(tile_functions) = {
    FPS_ISA(sum), FPS_ISA(add), FPS_ISA(widen_float16), FPS_ISA(widen_bfloat16), FPS_ISA(average), FPS_ISA(sgd),
    FPS_ISA(sgd_streaming), FPS_ISA(adam), FPS_ISA(adam_streaming), FPS_ISA(adagrad), FPS_ISA(rmsprop), FPS_ISA(stream),
    FPS_ISA(is_finite)};
