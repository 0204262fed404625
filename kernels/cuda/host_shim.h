/* What fold.cu needs of CUDA, for a host compiler: the words of the language, and a launch that is two loops.
 *
 * What it refuses to be: quick, or a model of a GPU. Threads run one after the other, which is the same thing only because no
 * kernel of ours has a barrier, shared memory or an atomic. */
#ifndef FPS_CUDA_SHIM_H
#define FPS_CUDA_SHIM_H

#include <math.h>
#include <string.h>

#define FPS_DEVICE static inline __attribute__((always_inline))
#define FPS_KERNEL static void
#define FPS_UNROLL

typedef struct {
    float x, y, z, w;
} float4;
typedef struct {
    unsigned short x, y, z, w;
} ushort4;
typedef struct {
    unsigned int x, y, z;
} fps_dimensions;

static __thread fps_dimensions threadIdx, blockIdx, blockDim;

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

/* IEEE 754 half precision, exactly; what is not a number keeps its sign and the top of its payload, and becomes quiet. */
FPS_DEVICE float fps_float_of_half(unsigned short bits) {
    const unsigned int sign = (unsigned int)(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, fraction = bits & 0x3ff;
    if (exponent == 31) return fps_float_of_bits(sign | 0x7f800000u | (fraction ? 0x400000u | fraction << 13 : 0));
    if (exponent == 0) return fps_float_of_bits(sign | fps_bits_of_float((float)fraction * 0x1p-24f));
    return fps_float_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
}

typedef void (*fps_kernel)(unsigned long long, unsigned long long);

/* Every thread of every block, in order. */
static void fps_launch_on_host(fps_kernel kernel, int blocks, int threads, unsigned long long order,
                               unsigned long long tiles) {
    int block, thread;
    blockDim.x = (unsigned int)threads;
    for (block = 0; block < blocks; block++)
        for (thread = 0; thread < threads; thread++) {
            blockIdx.x = (unsigned int)block;
            threadIdx.x = (unsigned int)thread;
            kernel(order, tiles);
        }
}

#endif
