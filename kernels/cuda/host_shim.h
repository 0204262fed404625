/* A shim that compiles the CUDA kernels for the host: the keywords and types they use, and a launch that is two loops.
 * A GPU loads and stores a vector only at a multiple of the vector's size (else error 716), so a launch names the first address
 * that is none.
 *
 * Threads run one after the other. That is equivalent only because no kernel has a barrier, shared memory or an atomic. */
#ifndef FPS_HOST_SHIM_H
#define FPS_HOST_SHIM_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define FPS_DEVICE static inline __attribute__((always_inline))
#define FPS_KERNEL(blocks) static void
#define FPS_UNROLL
#define FPS_ARGUMENT(type) const void *const
#define FPS_ARGUMENT_OF(type, argument) ((const type *)(argument))

typedef struct {
    float x, y, z, w;
} float4;
typedef struct {
    unsigned short x, y, z, w;
} ushort4;
typedef struct {
    unsigned int x, y, z, w;
} uint4;
typedef struct {
    unsigned int x, y, z;
} fps_dimensions;

static __thread fps_dimensions threadIdx, blockIdx, blockDim;
static __thread unsigned long long fps_misaligned; /* the first address of a vector that is no multiple of its size; 0: none */

#define FPS_WIDE(type, place) (*(type *)fps_checked_vector(place, sizeof(type)))
FPS_DEVICE void *fps_checked_vector(const void *place, unsigned long long size) {
    if ((uintptr_t)place % size && !fps_misaligned) fps_misaligned = (uintptr_t)place;
    return (void *)place;
}

FPS_DEVICE float fps_float_of_bits(unsigned int bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

FPS_DEVICE unsigned int fps_bits_of_float(float value) {
    unsigned int bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

/* IEEE 754 half precision, exactly; a NaN keeps its sign and the top of its payload, and becomes quiet. */
FPS_DEVICE float fps_float_of_half(unsigned short bits) {
    const unsigned int sign = (unsigned int)(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, fraction = bits & 0x3ff;
    if (exponent == 31) return fps_float_of_bits(sign | 0x7f800000u | (fraction ? 0x400000u | fraction << 13 : 0));
    if (exponent == 0) return fps_float_of_bits(sign | fps_bits_of_float((float)fraction * 0x1p-24f));
    return fps_float_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
}

typedef void (*fps_kernel)(const void *);

/* Run every thread of every block, in order. Returns the first misaligned address, or 0. */
static unsigned long long fps_launch_on_host(fps_kernel kernel, const void *argument, int blocks, int threads) {
    int block, thread;
    fps_misaligned = 0;
    blockDim.x = (unsigned int)threads;
    for (block = 0; block < blocks; block++)
        for (thread = 0; thread < threads; thread++) {
            blockIdx.x = (unsigned int)block;
            threadIdx.x = (unsigned int)thread;
            kernel(argument);
        }
    return fps_misaligned;
}

#endif
