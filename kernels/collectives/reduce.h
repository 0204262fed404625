/* Element-wise reductions of several arrays: the types, the operations, and the loops of each instruction set. */
#ifndef FPS_REDUCE_H
#define FPS_REDUCE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* The types that can be reduced, with their bytes, and the reductions. Their numbers, by this order, are the same in every process
 * of a group. */
#define FPS_ELEMENT_TYPES(TYPE)                                                                                          \
    TYPE(FLOAT32, float32, 4)                                                                                            \
    TYPE(FLOAT16, float16, 2)                                                                                            \
    TYPE(BFLOAT16, bfloat16, 2)                                                                                          \
    TYPE(FLOAT64, float64, 8)                                                                                            \
    TYPE(INT8, int8, 1)                                                                                                  \
    TYPE(UINT8, uint8, 1)                                                                                                \
    TYPE(INT16, int16, 2)                                                                                                \
    TYPE(INT32, int32, 4)                                                                                                \
    TYPE(INT64, int64, 8)
#define FPS_REDUCTION_NAMES(NAME)                                                                                        \
    NAME(SUM, sum) NAME(AVERAGE, average) NAME(PRODUCT, product) NAME(MIN, min) NAME(MAX, max)                           \
    NAME(AND, and) NAME(OR, or) NAME(XOR, xor)
#define FPS_ELEMENT_NUMBER(NAME, ...) FPS_ELEMENT_##NAME,
#define FPS_REDUCTION_NUMBER(NAME, ...) FPS_REDUCE_##NAME,
enum { FPS_ELEMENT_TYPES(FPS_ELEMENT_NUMBER) FPS_ELEMENTS };
enum { FPS_REDUCTION_NAMES(FPS_REDUCTION_NUMBER) FPS_REDUCTIONS };
#undef FPS_ELEMENT_NUMBER
#undef FPS_REDUCTION_NUMBER

#define FPS_REDUCE_TILE 1024 /* elements */

/* Combine `count` arrays in order and write the result to `out`, which may be one of them, and to `second` unless it is NULL.
 * */
typedef void (*fps_reduce_loop)(char *out, char *second, const char *const *parts, int count, int64_t elements);

#define FPS_LOOPS "collectives/reduce_tile.h"
#include "update/each_isa.h"

/* The loop of an instruction set. NULL where a type has no such reduction. */
static inline fps_reduce_loop fps_reduce_loop_of(int isa, int element, int reduction) {
    if (element < 0 || element >= FPS_ELEMENTS || reduction < 0 || reduction >= FPS_REDUCTIONS) return NULL;
    return FPS_OF_ISA(isa, reductions)[element][reduction];
}

static inline int64_t fps_element_bytes(int element) {
#define FPS_BYTES_OF(NAME, name, bytes) bytes,
    static const int64_t bytes[] = {FPS_ELEMENT_TYPES(FPS_BYTES_OF)};
#undef FPS_BYTES_OF
    return element >= 0 && element < FPS_ELEMENTS ? bytes[element] : 0;
}

#endif
