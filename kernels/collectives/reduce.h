/* Element-wise reductions of several arrays: the types, the operations, and the loops of each instruction set. */
#ifndef FPS_REDUCE_H
#define FPS_REDUCE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* The types that can be reduced; their numbers are the same in every process of a group. */
enum {
    FPS_ELEMENT_FLOAT32,
    FPS_ELEMENT_FLOAT16,
    FPS_ELEMENT_BFLOAT16,
    FPS_ELEMENT_FLOAT64,
    FPS_ELEMENT_INT8,
    FPS_ELEMENT_UINT8,
    FPS_ELEMENT_INT16,
    FPS_ELEMENT_INT32,
    FPS_ELEMENT_INT64,
    FPS_ELEMENTS
};
enum {
    FPS_REDUCE_SUM,
    FPS_REDUCE_AVERAGE,
    FPS_REDUCE_PRODUCT,
    FPS_REDUCE_MIN,
    FPS_REDUCE_MAX,
    FPS_REDUCE_AND,
    FPS_REDUCE_OR,
    FPS_REDUCE_XOR,
    FPS_REDUCTIONS
};

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
    static const int64_t bytes[FPS_ELEMENTS] = {4, 2, 2, 8, 1, 1, 2, 4, 8};
    return element >= 0 && element < FPS_ELEMENTS ? bytes[element] : 0;
}

#endif
