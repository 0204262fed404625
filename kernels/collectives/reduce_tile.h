/* Element-wise reductions of several arrays, compiled once for each instruction set: the includer defines FPS_ISA(name).
 *
 * The arrays are combined in the order of `parts`, a tile at a time, in a buffer that stays in the first-level cache. So an
 * output may be one of the parts. Halves are combined as floats and rounded once. */

#include "update/halves_tile.h"

/* One tile: tile[i] = parts[0][i] OP parts[1][i] OP ...; `expression` combines a with b. */
#define FPS_COMBINE(type, length, one, other, expression)                                                                \
    for (int64_t i = 0; i < length; i++) {                                                                               \
        const type a = (one)[i], b = (other)[i];                                                                         \
        tile[i] = (type)(expression);                                                                                    \
    }
#define FPS_DIVIDE(length) /* an average: one division, after the sum */                                                 \
    for (int64_t i = 0; i < length; i++) tile[i] /= (float)count
#define FPS_KEEP(length) ((void)0)

#define FPS_REDUCTION(name, type, expression, finish)                                                                    \
    static void FPS_ISA(name)(char *out, char *second, const char *const *parts, int count, int64_t elements) {          \
        type tile[FPS_REDUCE_TILE] __attribute__((aligned(64)));                                                         \
        for (int64_t first = 0; first < elements; first += FPS_REDUCE_TILE) {                                            \
            const int64_t length = elements - first < FPS_REDUCE_TILE ? elements - first : FPS_REDUCE_TILE;              \
            const size_t bytes = (size_t)length * sizeof(type), offset = (size_t)first * sizeof(type);                   \
            const type *restrict part = (const type *)(parts[0] + offset);                                               \
            if (count > 1) {                                                                                             \
                const type *restrict other = (const type *)(parts[1] + offset);                                          \
                FPS_COMBINE(type, length, part, other, expression)                                                       \
            } else {                                                                                                     \
                memcpy(tile, part, bytes);                                                                               \
            }                                                                                                            \
            for (int k = 2; k < count; k++) {                                                                            \
                part = (const type *)(parts[k] + offset);                                                                \
                FPS_COMBINE(type, length, tile, part, expression)                                                        \
            }                                                                                                            \
            finish(length);                                                                                              \
            memcpy(out + offset, tile, bytes);                                                                           \
            if (second) memcpy(second + offset, tile, bytes);                                                            \
        }                                                                                                                \
    }

#define FPS_HALF_REDUCTION(name, half, expression, finish)                                                               \
    static void FPS_ISA(name)(char *out, char *second, const char *const *parts, int count, int64_t elements) {          \
        float tile[FPS_REDUCE_TILE] __attribute__((aligned(64))), more[FPS_REDUCE_TILE] __attribute__((aligned(64)));    \
        uint16_t rounded[FPS_REDUCE_TILE] __attribute__((aligned(64)));                                                  \
        for (int64_t first = 0; first < elements; first += FPS_REDUCE_TILE) {                                            \
            const int64_t length = elements - first < FPS_REDUCE_TILE ? elements - first : FPS_REDUCE_TILE;              \
            const size_t bytes = (size_t)length * 2, offset = (size_t)first * 2;                                         \
            FPS_ISA(widen_##half)(tile, (const uint16_t *)(parts[0] + offset), length);                                  \
            for (int k = 1; k < count; k++) {                                                                            \
                FPS_ISA(widen_##half)(more, (const uint16_t *)(parts[k] + offset), length);                              \
                FPS_COMBINE(float, length, tile, more, expression)                                                       \
            }                                                                                                            \
            finish(length);                                                                                              \
            FPS_ISA(narrow_##half)(rounded, tile, length);                                                               \
            memcpy(out + offset, rounded, bytes);                                                                        \
            if (second) memcpy(second + offset, rounded, bytes);                                                         \
        }                                                                                                                \
    }

/* A NaN wins, as in torch.minimum and torch.maximum. */
#define FPS_MIN_OF_FLOATS (a < b || a != a) ? a : b
#define FPS_MAX_OF_FLOATS (a > b || a != a) ? a : b
#define FPS_FLOAT_REDUCTIONS(define, type, last)                                                                         \
    define(sum_##type, last, a + b, FPS_KEEP)                                                                            \
    define(average_##type, last, a + b, FPS_DIVIDE)                                                                      \
    define(product_##type, last, a * b, FPS_KEEP)                                                                        \
    define(min_##type, last, FPS_MIN_OF_FLOATS, FPS_KEEP)                                                                \
    define(max_##type, last, FPS_MAX_OF_FLOATS, FPS_KEEP)
/* Sums and products wrap around, which C defines for unsigned integers alone. */
#define FPS_INTEGER_REDUCTIONS(type, wrapping)                                                                           \
    FPS_REDUCTION(sum_##type, type, (wrapping)a + (wrapping)b, FPS_KEEP)                                                 \
    FPS_REDUCTION(product_##type, type, (wrapping)a * (wrapping)b, FPS_KEEP)                                             \
    FPS_REDUCTION(min_##type, type, a < b ? a : b, FPS_KEEP)                                                             \
    FPS_REDUCTION(max_##type, type, a > b ? a : b, FPS_KEEP)                                                             \
    FPS_REDUCTION(and_##type, type, a & b, FPS_KEEP)                                                                     \
    FPS_REDUCTION(or_##type, type, a | b, FPS_KEEP)                                                                      \
    FPS_REDUCTION(xor_##type, type, a ^ b, FPS_KEEP)

FPS_FLOAT_REDUCTIONS(FPS_REDUCTION, float, float)
FPS_FLOAT_REDUCTIONS(FPS_REDUCTION, double, double)
FPS_FLOAT_REDUCTIONS(FPS_HALF_REDUCTION, float16, float16)
FPS_FLOAT_REDUCTIONS(FPS_HALF_REDUCTION, bfloat16, bfloat16)
FPS_INTEGER_REDUCTIONS(int8_t, uint32_t)
FPS_INTEGER_REDUCTIONS(uint8_t, uint32_t)
FPS_INTEGER_REDUCTIONS(int16_t, uint32_t)
FPS_INTEGER_REDUCTIONS(int32_t, uint32_t)
FPS_INTEGER_REDUCTIONS(int64_t, uint64_t)

#define FPS_FLOAT_ROW(type)                                                                                              \
    {                                                                                                                    \
        [FPS_REDUCE_SUM] = FPS_ISA(sum_##type), [FPS_REDUCE_AVERAGE] = FPS_ISA(average_##type),                          \
        [FPS_REDUCE_PRODUCT] = FPS_ISA(product_##type), [FPS_REDUCE_MIN] = FPS_ISA(min_##type),                          \
        [FPS_REDUCE_MAX] = FPS_ISA(max_##type),                                                                          \
    }
#define FPS_INTEGER_ROW(type)                                                                                            \
    {                                                                                                                    \
        [FPS_REDUCE_SUM] = FPS_ISA(sum_##type), [FPS_REDUCE_PRODUCT] = FPS_ISA(product_##type),                          \
        [FPS_REDUCE_MIN] = FPS_ISA(min_##type), [FPS_REDUCE_MAX] = FPS_ISA(max_##type),                                  \
        [FPS_REDUCE_AND] = FPS_ISA(and_##type), [FPS_REDUCE_OR] = FPS_ISA(or_##type),                                    \
        [FPS_REDUCE_XOR] = FPS_ISA(xor_##type),                                                                          \
    }

/* NULL where a type has no such reduction. */
static const fps_reduce_loop FPS_ISA(reductions)[FPS_ELEMENTS][FPS_REDUCTIONS] = {
    [FPS_ELEMENT_FLOAT32] = FPS_FLOAT_ROW(float),      [FPS_ELEMENT_FLOAT16] = FPS_FLOAT_ROW(float16),
    [FPS_ELEMENT_BFLOAT16] = FPS_FLOAT_ROW(bfloat16),  [FPS_ELEMENT_FLOAT64] = FPS_FLOAT_ROW(double),
    [FPS_ELEMENT_INT8] = FPS_INTEGER_ROW(int8_t),      [FPS_ELEMENT_UINT8] = FPS_INTEGER_ROW(uint8_t),
    [FPS_ELEMENT_INT16] = FPS_INTEGER_ROW(int16_t),    [FPS_ELEMENT_INT32] = FPS_INTEGER_ROW(int32_t),
    [FPS_ELEMENT_INT64] = FPS_INTEGER_ROW(int64_t),
};

#undef FPS_COMBINE
#undef FPS_DIVIDE
#undef FPS_KEEP
#undef FPS_REDUCTION
#undef FPS_HALF_REDUCTION
#undef FPS_MIN_OF_FLOATS
#undef FPS_MAX_OF_FLOATS
#undef FPS_FLOAT_REDUCTIONS
#undef FPS_INTEGER_REDUCTIONS
#undef FPS_FLOAT_ROW
#undef FPS_INTEGER_ROW
