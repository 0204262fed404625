/* The loops over one tile, compiled once for each instruction set: the includer defines FPS_ISA(name).
 *
 * Each loop does to one element what torch's single-tensor optimizer does, in torch's order, with a fused multiply-add exactly
 * where ATen has one; the compiler vectorizes it. The bits are therefore torch's, and the same on every instruction set. An
 * output may alias its input at the same element, never at a shifted one: hence ivdep. */

#include "update/stream_tile.h"

/* a * b + c with one rounding. */
static inline __attribute__((always_inline)) FPS_REAL FPS_ISA(fma)(FPS_REAL a, FPS_REAL b, FPS_REAL c) {
#if defined(__FMA__) || defined(__AVX512F__) || defined(__aarch64__) || defined(FPS_DOUBLE)
    return FPS_REAL_FUNCTION(fma)(a, b, c); /* of doubles without the instruction, too: libm's, for there is no wider type */
#else
    /* Without the instruction: the product is exact in double; the sum is rounded to odd, so that rounding it again to float
     * equals one rounding (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008). */
    double product = (double)a * b, sum = product + c, back = sum - product;
    double error = (product - (sum - back)) + (c - back);
    union { double value; int64_t bits; } odd = {sum};
    if ((error > 0 || error < 0) && !(odd.bits & 1)) odd.bits += (error > 0) == (sum > 0) ? 1 : -1;
    return (FPS_REAL)odd.value;
#endif
}

/* number / divisor to the bit, of floats by cheaper products. Neither may be negative, no step may underflow, and `inverse`
 * must be 1 / divisor, rounded once. The first correction leaves an error below one unit in the last place; from there the second
 * rounds as a division does (Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990). */
static inline __attribute__((always_inline)) FPS_REAL FPS_ISA(quotient)(FPS_REAL number, FPS_REAL divisor, FPS_REAL inverse) {
#if (defined(__FMA__) || defined(__AVX512F__) || defined(__aarch64__)) && !defined(FPS_DOUBLE)
    float ratio = number * inverse;
    ratio = __builtin_fmaf(__builtin_fmaf(-ratio, divisor, number), inverse, ratio);
    ratio = __builtin_fmaf(__builtin_fmaf(-ratio, divisor, number), inverse, ratio);
    return number < __builtin_inff() ? ratio : number;
#else
    (void)inverse;
    return number / divisor;
#endif
}

/* total = sum of `count` gradients at `first`, in order, or with `more` total += them. Both are constants at every call. */
static inline __attribute__((always_inline)) void FPS_ISA(sum_of)(FPS_REAL *restrict total, const fps_push *pushes,
                                                                  const int count, const int more, int64_t first,
                                                                  int64_t length) {
    const FPS_REAL *from[8];
    for (int push = 0; push < count; push++) from[push] = (const FPS_REAL *)pushes[push].gradient + first;
    for (int64_t i = 0; i < length; i++) {
        FPS_REAL sum = more ? total[i] + from[0][i] : from[0][i];
#pragma GCC unroll 8
        for (int push = 1; push < count; push++) sum += from[push][i];
        total[i] = sum;
    }
}

/* total = sum of the gradients at `first`, in order. Up to eight at a time, so that the processor fetches from as many at once:
 * a tile of one gradient alone has ended before its prefetcher has begun. */
static void FPS_ISA(sum)(FPS_REAL *restrict total, const fps_push *pushes, int count, int64_t first, int64_t length) {
    if (count >= 4) FPS_ISA(sum_of)(total, pushes, 4, 0, first, length);
    else FPS_ISA(sum_of)(total, pushes, 2, 0, first, length);
    for (int next = count >= 4 ? 4 : 2, left; (left = count - next) > 0; next += left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1)
        if (left >= 8) FPS_ISA(sum_of)(total, pushes + next, 8, 1, first, length);
        else if (left >= 4) FPS_ISA(sum_of)(total, pushes + next, 4, 1, first, length);
        else if (left >= 2) FPS_ISA(sum_of)(total, pushes + next, 2, 1, first, length);
        else FPS_ISA(sum_of)(total, pushes + next, 1, 1, first, length);
}

/* total += scale * gradient, or total = scale * gradient. */
static void FPS_ISA(add)(FPS_REAL *restrict total, const FPS_REAL *restrict gradient, FPS_REAL scale, int is_first,
                         int64_t length) {
    if (is_first)
        for (int64_t i = 0; i < length; i++) total[i] = gradient[i] * scale;
    else
        for (int64_t i = 0; i < length; i++) total[i] += gradient[i] * scale;
}

#ifndef FPS_DOUBLE
#include "update/halves_tile.h"
#endif

/* Element i of the sum, in order, of `count` gradients; `count` is a constant at every call. */
static inline __attribute__((always_inline)) FPS_REAL FPS_ISA(gradient)(const FPS_REAL *const *gradients, int64_t i,
                                                                        const int count) {
    FPS_REAL total = gradients[0][i];
    if (count > 1) total += gradients[1][i];
    if (count > 2) total += gradients[2][i];
    if (count > 3) total += gradients[3][i];
    return total;
}

/* start + (end - start) * fraction, from the nearer end, as torch.lerp; fps_lerp_of made `fraction`. */
static inline __attribute__((always_inline)) FPS_REAL FPS_ISA(lerp)(FPS_REAL start, FPS_REAL end, FPS_REAL fraction,
                                                                    int is_small) {
    return FPS_ISA(fma)(fraction, end - start, is_small ? start : end);
}

/* The moving average of the weights, by lerp, so that the average of constant weights equals them to the bit. */
static void FPS_ISA(average)(fps_lerp by, int64_t length, const FPS_REAL *weights, const FPS_REAL *average_in,
                             FPS_REAL *average_out) {
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

#include "update/rule_bodies.h"

typedef FPS_REAL (*FPS_ISA(rule_body))(const fps_coefficients *by, FPS_REAL weight, FPS_REAL step, FPS_REAL *state,
                                       const int flags);

/* Load or store the element i of the planes whose bits are set. */
static inline __attribute__((always_inline)) void FPS_ISA(load_planes)(
    FPS_REAL *state, const FPS_REAL *from, int64_t stride, int64_t i, const int planes) {
    if (planes & 1) state[0] = from[i];
    if (planes & 2) state[1] = from[stride + i];
    if (planes & 4) state[2] = from[2 * stride + i];
}

static inline __attribute__((always_inline)) void FPS_ISA(store_planes)(
    FPS_REAL *to, const FPS_REAL *state, int64_t stride, int64_t i, const int planes) {
    if (planes & 1) to[i] = state[0];
    if (planes & 2) to[stride + i] = state[1];
    if (planes & 4) to[2 * stride + i] = state[2];
}

/* One element's applications of a rule; returns the weight, and updates its state. */
static inline __attribute__((always_inline)) FPS_REAL FPS_ISA(element)(
    FPS_ISA(rule_body) body, const fps_coefficients *own, const FPS_REAL *const *gradients, int64_t i, FPS_REAL weight,
    FPS_REAL *state, const int applied, const int count, const int each, const int flags) {
#pragma GCC unroll 4
    for (int k = 0; k < applied; k++) {
        FPS_REAL step = (each ? gradients[k][i] : FPS_ISA(gradient)(gradients, i, count)) * own[k].scale;
        weight = body(&own[k], weight, step, state, flags);
    }
    return weight;
}

/* The largest magnitude so far, with an element's weight and the checked planes, as bits. Non-finite results are thus found
 * without another pass. */
static inline __attribute__((always_inline)) FPS_REAL_BITS FPS_ISA(most_of)(FPS_REAL_BITS most, FPS_REAL weight,
                                                                            const FPS_REAL *state, const int checked) {
    most = fps_larger(most, weight);
    if (checked & 1) most = fps_larger(most, state[0]);
    if (checked & 2) most = fps_larger(most, state[1]);
    if (checked & 4) most = fps_larger(most, state[2]);
    return most;
}

/* The loop of a rule's variant. The body, the counts, the flags and the planes are constants at every call, so each call is a
 * loop without a branch. With `streaming` the loop takes one cache line at a time, whose results are in registers or the
 * nearest cache when they are stored. */
static inline __attribute__((always_inline)) FPS_REAL_BITS FPS_ISA(rule_loop)(
    FPS_ISA(rule_body) body, const fps_coefficients *by, int64_t length, const FPS_REAL *const *pushed, const int count,
    const int each, const fps_place *place, const int streaming, const int flags, const int writes, const int checked) {
    FPS_LOCALS(by, pushed, count, each);
    const FPS_REAL *weights_in = place->weights, *state_in = place->state;
    FPS_REAL *weights_out = place->weights_out, *state_out = place->state_out;
    const int64_t stride = place->stride, out_stride = place->out_stride;
    const int reads = flags & FPS_BY_FIRST ? 0 : writes;
    FPS_REAL_BITS most = 0;
    int64_t i = 0;
    if (streaming) {
        FPS_REAL_BITS mosts[FPS_LINE_REALS] FPS_ON_LINE = {0};
        FPS_REAL weights[FPS_LINE_REALS] FPS_ON_LINE, states[FPS_RULE_PLANES * FPS_LINE_REALS] FPS_ON_LINE;
        FPS_REAL *const kept = place->kept;
        for (; i + FPS_LINE_REALS <= length; i += FPS_LINE_REALS) {
#pragma GCC ivdep
            for (int j = 0; j < FPS_LINE_REALS; j++) {
                FPS_REAL state[FPS_RULE_PLANES] = {0};
                FPS_ISA(load_planes)(state, state_in, stride, i + j, reads);
                weights[j] = FPS_ISA(element)(body, own, gradients, i + j, weights_in[i + j], state, applied, count, each,
                                              flags);
                FPS_ISA(store_planes)(states, state, FPS_LINE_REALS, j, writes);
                mosts[j] = FPS_ISA(most_of)(mosts[j], weights[j], state, checked);
            }
            if (writes & 1) FPS_ISA(stream_line)(state_out + i, states);
            if (writes & 2) FPS_ISA(stream_line)(state_out + out_stride + i, states + FPS_LINE_REALS);
            if (writes & 4) FPS_ISA(stream_line)(state_out + 2 * out_stride + i, states + 2 * FPS_LINE_REALS);
            FPS_ISA(stream_line)(weights_out + i, weights);
            if (kept) memcpy(kept + i, weights, sizeof(weights));
        }
        for (int j = 0; j < FPS_LINE_REALS; j++) most = mosts[j] > most ? mosts[j] : most;
    }
#pragma GCC ivdep
    for (; i < length; i++) {
        FPS_REAL state[FPS_RULE_PLANES] = {0};
        FPS_ISA(load_planes)(state, state_in, stride, i, reads);
        FPS_REAL weight = FPS_ISA(element)(body, own, gradients, i, weights_in[i], state, applied, count, each, flags);
        FPS_ISA(store_planes)(state_out, state, out_stride, i, writes);
        weights_out[i] = weight;
        most = FPS_ISA(most_of)(most, weight, state, checked);
    }
    return most;
}

/* Each rule's two functions: a loop for each variant and count. They are separate so that neither kind of store costs the other
 * registers. */
#define FPS_LOOP_OF(count, each, rule, variant)                                                                          \
    most = FPS_ISA(rule_loop)(body, by, length, pushed, count, each, place, streaming, variant, fps_writes(rule, variant),\
                              checked)
#define FPS_VARIANT(rule, variant)                                                                                       \
    case variant:                                                                                                        \
        if (at_once == 1) FPS_LOOP_OF(1, 0, rule, variant);                                                              \
        else FPS_BY_COUNT(FPS_LOOP_OF, rule, variant);                                                                   \
        break;
#define FPS_RULE_FUNCTIONS(number, NAME, name, planes, at_once_, writes, checked_, ...)                                  \
    _Static_assert(number < FPS_RULE_NUMBERS && !FPS_IS_USERS(number) && planes <= FPS_RULE_PLANES, "row of " #name);    \
    static inline __attribute__((always_inline)) int FPS_ISA(name##_by_flags)(                                           \
        const fps_coefficients *by, int64_t length, const FPS_REAL *const *pushed, int count, int each,                  \
        const fps_place *place, const int streaming) {                                                                   \
        const FPS_ISA(rule_body) body = FPS_ISA(name##_body);                                                            \
        const int at_once = FPS_AT_ONCE(at_once_), checked = checked_;                                                   \
        FPS_REAL_BITS most = 0;                                                                                          \
        switch (by->flags) {                                                                                             \
            FPS_##NAME##_VARIANTS(FPS_VARIANT, number)                                                                   \
            default: __builtin_trap(); /* a combination of flags that is none of the rule's variants */                  \
        }                                                                                                                \
        return most < FPS_INFINITY_BITS;                                                                                 \
    }                                                                                                                    \
    static __attribute__((noinline)) int FPS_ISA(name##_plain)(                                                          \
        const fps_coefficients *by, int64_t length, const FPS_REAL *const *pushed, int count, int each,                  \
        const fps_place *place) {                                                                                        \
        return FPS_ISA(name##_by_flags)(by, length, pushed, count, each, place, 0);                                      \
    }                                                                                                                    \
    static __attribute__((noinline)) int FPS_ISA(name##_streaming)(                                                      \
        const fps_coefficients *by, int64_t length, const FPS_REAL *const *pushed, int count, int each,                  \
        const fps_place *place) {                                                                                        \
        return FPS_ISA(name##_by_flags)(by, length, pushed, count, each, place, 1);                                      \
    }
FPS_UPDATE_RULES(FPS_RULE_FUNCTIONS)
#undef FPS_RULE_FUNCTIONS
#undef FPS_VARIANT
#undef FPS_LOOP_OF

/* Whether no value of a tile is infinite or NaN, for a user's rule. */
static int FPS_ISA(is_finite)(const FPS_REAL *values, int64_t length) {
    FPS_REAL_BITS most = 0;
    for (int64_t i = 0; i < length; i++) most = fps_larger(most, values[i]);
    return most < FPS_INFINITY_BITS;
}

/* Copy a staged tile with non-temporal stores: by its next use the caches would have evicted it anyway. */
static void FPS_ISA(stream)(FPS_REAL *to, const FPS_REAL *from, int64_t length) {
    const int64_t width = sizeof(FPS_STREAM_WORD) / sizeof(FPS_REAL);
    int64_t i = 0;
    if ((uintptr_t)to % sizeof(FPS_STREAM_WORD) == 0)
        for (; i + width <= length; i += width) FPS_STREAM(to + i, from + i);
    memcpy(to + i, from + i, (length - i) * sizeof(FPS_REAL));
}

#define FPS_RULE_ENTRY(number, NAME, name, planes, at_once, ...) \
    [number] = {FPS_ISA(name##_plain), FPS_AT_ONCE(at_once) > 1 ? FPS_ISA(name##_streaming) : NULL},
static const fps_tile_functions FPS_ISA(tile_functions) = {
    .rules = {FPS_UPDATE_RULES(FPS_RULE_ENTRY)},
    .sum = FPS_ISA(sum),
    .add = FPS_ISA(add),
#ifndef FPS_DOUBLE
    .widen_float16 = FPS_ISA(widen_float16),
    .widen_bfloat16 = FPS_ISA(widen_bfloat16),
    .narrow_float16 = FPS_ISA(narrow_float16),
    .narrow_bfloat16 = FPS_ISA(narrow_bfloat16),
#endif
    .average = FPS_ISA(average),
    .stream = FPS_ISA(stream),
    .is_finite = FPS_ISA(is_finite),
};
#undef FPS_RULE_ENTRY
#undef FPS_STREAM_WORD
#undef FPS_STREAM
