/* The loops over one tile for each instruction set, and the choice between them at run time. */
#ifndef FPS_FOLD_ISA_H
#define FPS_FOLD_ISA_H

#include <string.h>

#include "update/fold.h"
#include "update/fold_coefficients.h"

/* Apply `count` gradients to a tile: their sum, in order, with by[0], or with `each` one after the other, each with its own
 * coefficients, all of one variant. Returns whether the results are finite. */
typedef int (*fps_rule_loop)(const fps_coefficients *by, int64_t length, const FPS_REAL *const *gradients, int count, int each,
                             const fps_place *place);

typedef struct {
    fps_rule_loop rules[FPS_RULE_NUMBERS][2]; /* by number; the second uses non-temporal stores, NULL if at once is 1 */
    void (*sum)(FPS_REAL *restrict, const fps_push *, int, int64_t, int64_t);
    void (*add)(FPS_REAL *restrict, const FPS_REAL *restrict, FPS_REAL, int, int64_t);
    void (*widen_float16)(FPS_REAL *restrict, const uint16_t *restrict, int64_t);
    void (*widen_bfloat16)(FPS_REAL *restrict, const uint16_t *restrict, int64_t);
    void (*narrow_float16)(uint16_t *restrict, const FPS_REAL *restrict, int64_t);
    void (*narrow_bfloat16)(uint16_t *restrict, const FPS_REAL *restrict, int64_t);
    void (*average)(fps_lerp, int64_t, const FPS_REAL *, const FPS_REAL *, FPS_REAL *);
    void (*stream)(FPS_REAL *, const FPS_REAL *, int64_t);
    int (*is_finite)(const FPS_REAL *, int64_t);
} fps_tile_functions;

/* A loop takes at most this many gradients at once; more are summed in the cache first. */
#define FPS_SUMMED_AT_ONCE 4
/* Copies a loop's gradient pointers and coefficients to locals, which no store can alias. Missing gradients are replaced by the
 * first, which is not read in their place; so are missing coefficients. */
#define FPS_LOCAL_OF(from, k, count) from[(count) > (k) ? (k) : 0]
#define FPS_LOCALS(by, pushed, count, each)                                                                              \
    const FPS_REAL *const gradients[FPS_SUMMED_AT_ONCE] = {pushed[0], FPS_LOCAL_OF(pushed, 1, count),                    \
                                                        FPS_LOCAL_OF(pushed, 2, count), FPS_LOCAL_OF(pushed, 3, count)}; \
    const int applied = each ? count : 1;                                                                                \
    fps_coefficients own[FPS_SUMMED_AT_ONCE] = {by[0], FPS_LOCAL_OF(by, 1, applied), FPS_LOCAL_OF(by, 2, applied),       \
                                                FPS_LOCAL_OF(by, 3, applied)};                                           \
    own[1].lerp = own[2].lerp = own[3].lerp = own[0].lerp /* equal, which the compiler cannot see */
/* One loop for each count, so that no loop has a branch; one gradient is its own sum. */
#define FPS_BY_COUNT(loop, ...)                                                                                          \
    do {                                                                                                                 \
        if (count == 1) loop(1, 0, __VA_ARGS__);                                                                         \
        else if (count == 2 && each) loop(2, 1, __VA_ARGS__);                                                            \
        else if (count == 3 && each) loop(3, 1, __VA_ARGS__);                                                            \
        else if (each) loop(4, 1, __VA_ARGS__);                                                                          \
        else if (count == 2) loop(2, 0, __VA_ARGS__);                                                                    \
        else if (count == 3) loop(3, 0, __VA_ARGS__);                                                                    \
        else loop(4, 0, __VA_ARGS__);                                                                                    \
    } while (0)
/* The rules' bodies on the CPU. */
#define FPS_RULE_BODY(name)                                                                                              \
    static inline __attribute__((always_inline)) FPS_REAL FPS_ISA(name##_body)(                                          \
        const fps_coefficients *by, FPS_REAL weight, FPS_REAL step, FPS_REAL *state, const int flags)
#define FPS_MULTIPLY_ADD(a, b, c) FPS_ISA(fma)(a, b, c)
#define FPS_SQUARE_ROOT(value) FPS_REAL_FUNCTION(sqrt)(value)
#define FPS_MAGNITUDE(value) FPS_REAL_FUNCTION(fabs)(value)
#define FPS_QUOTIENT(number, divisor, inverse) FPS_ISA(quotient)(number, divisor, inverse)
#define FPS_LERP(by, start, end) FPS_ISA(lerp)(start, end, (by)->lerp.fraction, (by)->lerp.is_small)

#define FPS_LOOPS "update/fold_tile.h"
#include "update/each_isa.h"

static inline const fps_tile_functions *fps_isa_functions(int isa) { return FPS_OF_ISA(isa, &tile_functions); }

#endif
