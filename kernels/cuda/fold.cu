/* The fold on a GPU: the sum of the pushes' gradients, scale, decay, rule, moving average, the weights once more in half
 * precision and the check for non-finite results, in one pass over memory; the check of a push's gradients; and the copy of
 * weights into a replica. NVRTC or nvcc compile this source for a GPU, and with a shim a C compiler makes a host function of it,
 * so that every rule is compared with its oracle on machines without a GPU.
 *
 * The arithmetic is the CPU fold's, line by line, with a fused multiply-add exactly where that has one. It must be compiled
 * without contraction (--fmad=false) and with IEEE division and square root (the default): the bits are then those of the CPU.
 * The host computes the launch arguments, which say what is done to which parameter; a kernel only reads them. They are its
 * parameters, by value, of which CUDA takes 4,096 bytes. It uses no shared memory, no barrier and no atomic.
 *
 * C and C++ both compile it. It includes the rules' table and bodies, which whoever compiles with NVRTC puts in their places,
 * and nothing else but the shim, because NVRTC has no headers. */
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define FPS_DEVICE static __device__ __forceinline__
/* Blocks of 256 threads on a multiprocessor. The fold is bound by memory, and more threads keep more loads in flight: five blocks
 * leave a thread 48 registers, which all rules but Adagrad fit into; with six most rules spill. A user's rule may need more: it
 * gets three blocks, and two if it has many planes. */
#define FPS_BLOCKS(rule) ((rule) == FPS_RULE_ADAGRAD ? 4 : 5)
#define FPS_KERNEL(blocks) extern "C" __global__ void __launch_bounds__(256, blocks)
/* A parameter by value whose address may be taken: without __grid_constant__ each thread would make a copy of its own. */
#define FPS_ARGUMENT(type) const __grid_constant__ type
#define FPS_ARGUMENT_OF(type, argument) (&argument)
#define FPS_UNROLL _Pragma("unroll")
#define FPS_WIDE(type, place) (*(type *)(place))
FPS_DEVICE float fps_float_of_half(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
FPS_DEVICE float fps_float_of_bits(unsigned int bits) { return __uint_as_float(bits); }
FPS_DEVICE unsigned int fps_bits_of_float(float value) { return __float_as_uint(value); }
#else
#include "cuda/host_shim.h"
#endif

#include "update/rules.h"

#define FPS_REAL float

/* Numbers shared with the host; those of modes equal the CPU fold's, which the host build checks at import. */
#define FPS_DEVICE_SUM 0
#define FPS_DEVICE_EACH 1
#define FPS_DEVICE_FLOAT32 0
#define FPS_DEVICE_FLOAT16 1
#define FPS_DEVICE_BFLOAT16 2
#define FPS_DEVICE_MOVES 1 /* the moving average of the weights moves in this fold */
#define FPS_DEVICE_WIDTH 4  /* floats that one thread loads at a time */
#define FPS_ARGUMENT_BYTES 4096 /* the most that every version of CUDA takes */
#define FPS_COPY_RUNS 170

typedef long long fps_device_integer;
typedef unsigned long long fps_device_address;

/* A run of floats of one parameter, which one block folds. `first` is a multiple of 16, so vectors are aligned. */
typedef struct {
    fps_device_integer first;
    int length, segment;
} fps_device_tile;

/* The coefficients of one application of the rule, in single precision; names as in fps_coefficients. */
typedef struct {
    float scale, weight_decay, shrink, momentum, undampened, minus_rate, beta2, one_minus_beta2, root_correction2, epsilon;
    float lerp_fraction, gradient_rate, correction, rectification;
    int flags;
} fps_device_coefficients;

/* A class of parameters with the same treatment. FPS_DEVICE_SUM: the gradients of its entries are summed, each times its scale
 * unless `is_plain`, and the rule is applied once with `coefficients`; without entries nothing is applied. FPS_DEVICE_EACH: the
 * rule is applied entry by entry; an entry without a push only moves the average. */
typedef struct {
    int first_entry, entries, coefficients, is_plain;
} fps_device_class;

typedef struct {
    fps_device_address gradient; /* of the push, from the shard's first float on; 0: an entry without a push */
    int coefficients;
    float scale;
} fps_device_entry;

/* The head of a launch's arguments; the tables follow at the given offsets, in bytes from its beginning. */
typedef struct {
    fps_device_address weights_in, weights_out, state_in, state_out;
    fps_device_address halves_out;   /* weights_out once more in half precision, for a model to read; 0: not wanted */
    fps_device_address nonfinite;    /* an int, set to 1 if a fold's results are non-finite; 0: not checked */
    fps_device_address tiles;        /* one a block */
    fps_device_integer state_stride; /* floats between planes */
    int class_of_segment, classes, entries, coefficients; /* offsets of tables: of ints, and of the structs */
    int first_segment;                                    /* the segment that class_of_segment begins with */
    int entry_count;                                      /* for checks on the host, no kernel reads it */
    int mode, rule_planes;
    int has_average; /* 0: none; FPS_DEVICE_MOVES; or 2: it is copied because nothing was pushed */
    int average_is_small;
    float average_fraction;
    int shown_type; /* the type of halves_out */
} fps_launch_args;

typedef struct {
    fps_launch_args head;
    unsigned char tables[FPS_ARGUMENT_BYTES - sizeof(fps_launch_args)];
} fps_fold_argument;

/* The arguments of a check: a slot, whose tiles name its parameters, and int[parameters]. The kernel writes `stamp` for each
 * parameter with a non-finite value, and no other: with another stamp each time, nobody has to write zeros before. */
typedef struct {
    fps_device_address gradient, nonfinite, tiles;
    fps_device_integer values; /* of the slot; like `parameters`, for checks on the host, no kernel reads it */
    int stamp, parameters;
} fps_check_args;

/* The arguments of a copy: runs of memory, each copied by `blocks` blocks. Addresses are multiples of 16 bytes. */
typedef struct {
    fps_device_address source, target;
    fps_device_integer vectors; /* of 16 bytes */
} fps_device_run;

typedef struct {
    unsigned int count, blocks;
    fps_device_run runs[FPS_COPY_RUNS];
} fps_copy_args;

/* A module has the kernels of all of fastps' rules, or those of one user's rule, whose text defines FPS_USERS_PLANES and
 * fps_users_rule(weight, gradient, state, numbers). Its coefficients are a scale and then the numbers that it names. */
#include "cuda/users_rule.h"
#ifdef FPS_USERS_PLANES
#define FPS_DEVICE_MOST_PLANES (FPS_USERS_PLANES > 0 ? FPS_USERS_PLANES : 1)
#undef FPS_BLOCKS
#define FPS_BLOCKS(rule) (FPS_USERS_PLANES > 2 ? 2 : 3)
#else
#define FPS_DEVICE_MOST_PLANES FPS_RULE_PLANES
#endif

typedef struct {
    float weight, planes[FPS_DEVICE_MOST_PLANES], average;
} fps_device_element;

FPS_DEVICE float fps_device_lerp(float start, float end, float fraction, int is_small) {
    return fmaf(fraction, end - start, is_small ? start : end);
}

#define FPS_RULE_BODY(name)                                                                                       \
    FPS_DEVICE float fps_device_##name(const fps_device_coefficients *by, float weight, float step, float *state, \
                                       const int flags)
#define FPS_MULTIPLY_ADD(a, b, c) fmaf(a, b, c)
#define FPS_SQUARE_ROOT(value) sqrtf(value)
#define FPS_MAGNITUDE(value) fabsf(value)
#define FPS_QUOTIENT(number, divisor, inverse) ((number) / (divisor))
#define FPS_LERP(by, start, end) fps_device_lerp(start, end, (by)->lerp_fraction, (by)->flags & FPS_BY_SMALL_LERP)
#include "update/rule_bodies.h"

/* One application of the rule on one element; `rule` is a constant wherever this is inlined. */
FPS_DEVICE void fps_device_apply(const fps_device_coefficients *by, fps_device_element *at, float gradient, const int rule) {
    const float step = gradient * by->scale;
#define FPS_DEVICE_APPLY(number, NAME, name, ...) \
    if (rule == number) at->weight = fps_device_##name(by, at->weight, step, at->planes, by->flags);
#ifdef FPS_USERS_PLANES
    at->weight = fps_users_rule(at->weight, step, at->planes, &by->scale + 1);
#else
    FPS_UPDATE_RULES(FPS_DEVICE_APPLY)
#endif
#undef FPS_DEVICE_APPLY
}

/* The most state planes of a rule. */
FPS_DEVICE int fps_device_planes(const int rule) {
#ifdef FPS_USERS_PLANES
    if (rule == FPS_RULE_USER) return FPS_USERS_PLANES;
#endif
#define FPS_DEVICE_PLANES(number, NAME, name, planes, ...) \
    if (rule == number) return planes;
    FPS_UPDATE_RULES(FPS_DEVICE_PLANES)
#undef FPS_DEVICE_PLANES
    return 0;
}

/* The planes that can stay non-finite while the weight is finite, one bit each. */
FPS_DEVICE int fps_device_checked(const int rule) {
#ifdef FPS_USERS_PLANES
    if (rule == FPS_RULE_USER) return (1 << FPS_USERS_PLANES) - 1;
#endif
#define FPS_DEVICE_CHECKED(number, NAME, name, planes, at_once, writes, checked, ...) \
    if (rule == number) return checked;
    FPS_UPDATE_RULES(FPS_DEVICE_CHECKED)
#undef FPS_DEVICE_CHECKED
    return 0;
}

/* Load `width` floats from `place`; FPS_DEVICE_WIDTH floats are one vector load. */
FPS_DEVICE void fps_device_load(float *to, const float *from, fps_device_integer place, const int width) {
    if (width == FPS_DEVICE_WIDTH) {
        float4 four = FPS_WIDE(const float4, from + place);
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    } else {
        to[0] = from[place];
    }
}

FPS_DEVICE void fps_device_store(float *to, fps_device_integer place, const float *from, const int width) {
    if (width == FPS_DEVICE_WIDTH) {
        float4 four;
        four.x = from[0], four.y = from[1], four.z = from[2], four.w = from[3];
        FPS_WIDE(float4, to + place) = four;
    } else {
        to[place] = from[0];
    }
}

FPS_DEVICE float fps_device_widened(unsigned short bits, const int dtype) {
    return dtype == FPS_DEVICE_FLOAT16 ? fps_float_of_half(bits) : fps_float_of_bits((unsigned int)bits << 16);
}

FPS_DEVICE int fps_device_is_nonfinite(float value) { return (fps_bits_of_float(value) & 0x7f800000u) == 0x7f800000u; }

/* A float rounded to the nearest bfloat16 or IEEE half, ties to even, with the bits of the CPU's loops. A half beyond the
 * largest is an infinity. A subnormal half is rounded by a sum of floats: its last digit is that of a float near 0.5. */
FPS_DEVICE unsigned short fps_device_narrowed(float value, int type) {
    const unsigned int bits = fps_bits_of_float(value), size = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000u;
    unsigned int half;
    if (type == FPS_DEVICE_BFLOAT16)
        return (unsigned short)(size > 0x7f800000u ? 0x7fc0u : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
    if (size < 113u << 23) half = fps_bits_of_float(fps_float_of_bits(size) + 0.5f) - 0x3f000000u;
    else half = (size - (112u << 23) + 0xfffu + (size >> 13 & 1u)) >> 13;
    if (size >= 143u << 23) half = size > 0x7f800000u ? 0x7e00u : 0x7c00u;
    return (unsigned short)(sign | half);
}

FPS_DEVICE void fps_device_store_halves(unsigned short *to, fps_device_integer place, const float *from, const int width,
                                        int type) {
    if (width == FPS_DEVICE_WIDTH) {
        ushort4 four;
        four.x = fps_device_narrowed(from[0], type), four.y = fps_device_narrowed(from[1], type);
        four.z = fps_device_narrowed(from[2], type), four.w = fps_device_narrowed(from[3], type);
        FPS_WIDE(ushort4, to + place) = four;
    } else {
        to[place] = fps_device_narrowed(from[0], type);
    }
}

/* Load a push's gradient as floats. */
FPS_DEVICE void fps_device_gradient(float *to, fps_device_address address, fps_device_integer place, const int width,
                                    const int dtype) {
    if (dtype == FPS_DEVICE_FLOAT32) {
        fps_device_load(to, (const float *)address, place, width);
    } else if (width == FPS_DEVICE_WIDTH) {
        ushort4 four = FPS_WIDE(const ushort4, (const unsigned short *)address + place);
        to[0] = fps_device_widened(four.x, dtype), to[1] = fps_device_widened(four.y, dtype);
        to[2] = fps_device_widened(four.z, dtype), to[3] = fps_device_widened(four.w, dtype);
    } else {
        to[0] = fps_device_widened(((const unsigned short *)address)[place], dtype);
    }
}

/* The sum of a class's gradients in its entries' order; a scale common to all is in the coefficients. */
FPS_DEVICE void fps_device_sum(float *total, const fps_launch_args *args, const fps_device_class *of, fps_device_integer place,
                               const int width, const int dtype) {
    const fps_device_entry *entries = (const fps_device_entry *)((const char *)args + args->entries) + of->first_entry;
    int entry, i;
    for (entry = 0; entry < of->entries; entry++) {
        float more[FPS_DEVICE_WIDTH];
        fps_device_gradient(more, entries[entry].gradient, place, width, dtype);
        FPS_UNROLL
        for (i = 0; i < width; i++) {
            float term = of->is_plain ? more[i] : more[i] * entries[entry].scale;
            total[i] = entry == 0 ? term : total[i] + term;
        }
    }
}

FPS_DEVICE void fps_device_average(const fps_launch_args *args, fps_device_element *at) {
    at->average = fps_device_lerp(at->average, at->weight, args->average_fraction, args->average_is_small);
}

/* Flag results that are non-finite: a sum of squares is checked, too, because it would hide what it divides. */
FPS_DEVICE void fps_device_flag(const fps_launch_args *args, const fps_device_element *elements, const int width, const int rule) {
    int i, plane, found = 0;
    FPS_UNROLL
    for (i = 0; i < width; i++) {
        found |= fps_device_is_nonfinite(elements[i].weight);
        FPS_UNROLL
        for (plane = 0; plane < FPS_DEVICE_MOST_PLANES; plane++)
            if (fps_device_checked(rule) >> plane & 1) found |= fps_device_is_nonfinite(elements[i].planes[plane]);
    }
    if (found) *(int *)args->nonfinite = 1; /* a benign race: every writer writes 1 */
}

/* Fold `width` elements from `place`, from the loads to the stores. The average follows versions, as in fps_fold_job.
 *
 * One function although it is long: elements stay in registers from the loads to the stores. */
FPS_DEVICE void fps_device_fold(const fps_launch_args *args, const fps_device_class *of, fps_device_integer place,
                                const int width, const int rule, const int dtype) {
    const int planes = fps_device_planes(rule);
    const fps_device_coefficients *by =
        (const fps_device_coefficients *)((const char *)args + args->coefficients);
    const fps_device_integer stride = args->state_stride;
    fps_device_element elements[FPS_DEVICE_WIDTH];
    float values[FPS_DEVICE_WIDTH];
    int i, plane, entry, is_applied = args->mode == FPS_DEVICE_SUM && of->entries > 0;
    fps_device_load(values, (const float *)args->weights_in, place, width);
    FPS_UNROLL
    for (i = 0; i < width; i++) {
        elements[i].weight = values[i];
        elements[i].average = 0;
        FPS_UNROLL
        for (plane = 0; plane < FPS_DEVICE_MOST_PLANES; plane++) elements[i].planes[plane] = 0;
    }
    FPS_UNROLL
    for (plane = 0; plane < planes; plane++)
        if (plane < args->rule_planes) {
            fps_device_load(values, (const float *)args->state_in + plane * stride, place, width);
            FPS_UNROLL
            for (i = 0; i < width; i++) elements[i].planes[plane] = values[i];
        }
    if (args->has_average) {
        fps_device_load(values, (const float *)args->state_in + args->rule_planes * stride, place, width);
        FPS_UNROLL
        for (i = 0; i < width; i++) elements[i].average = values[i];
    }
    if (args->mode == FPS_DEVICE_SUM) {
        if (of->entries > 0) fps_device_sum(values, args, of, place, width, dtype);
        FPS_UNROLL
        for (i = 0; i < width; i++) {
            if (of->entries > 0) fps_device_apply(by + of->coefficients, &elements[i], values[i], rule);
            if (args->has_average == FPS_DEVICE_MOVES) fps_device_average(args, &elements[i]);
        }
    } else {
        const fps_device_entry *entries =
            (const fps_device_entry *)((const char *)args + args->entries) + of->first_entry;
        for (entry = 0; entry < of->entries; entry++) {
            const fps_device_address gradient = entries[entry].gradient;
            is_applied |= gradient != 0;
            if (gradient) fps_device_gradient(values, gradient, place, width, dtype);
            FPS_UNROLL
            for (i = 0; i < width; i++) {
                if (gradient) fps_device_apply(by + entries[entry].coefficients, &elements[i], values[i], rule);
                if (args->has_average == FPS_DEVICE_MOVES) fps_device_average(args, &elements[i]);
            }
        }
    }
    if (args->nonfinite && is_applied) fps_device_flag(args, elements, width, rule);
    FPS_UNROLL
    for (i = 0; i < width; i++) values[i] = elements[i].weight;
    fps_device_store((float *)args->weights_out, place, values, width);
    if (args->halves_out)
        fps_device_store_halves((unsigned short *)args->halves_out, place, values, width, args->shown_type);
    FPS_UNROLL
    for (plane = 0; plane < planes; plane++)
        if (plane < args->rule_planes) {
            FPS_UNROLL
            for (i = 0; i < width; i++) values[i] = elements[i].planes[plane];
            fps_device_store((float *)args->state_out + plane * stride, place, values, width);
        }
    if (args->has_average) {
        FPS_UNROLL
        for (i = 0; i < width; i++) values[i] = elements[i].average;
        fps_device_store((float *)args->state_out + args->rule_planes * stride, place, values, width);
    }
}

/* Fold one tile with one block: whole vectors first, then the remaining elements, one a thread. */
FPS_DEVICE void fps_device_fold_tile(const fps_launch_args *args, const int rule, const int dtype) {
    const fps_device_tile tile = ((const fps_device_tile *)args->tiles)[blockIdx.x];
    const int *const class_of_segment = (const int *)((const char *)args + args->class_of_segment);
    const int index = class_of_segment[tile.segment - args->first_segment];
    const fps_device_class of = ((const fps_device_class *)((const char *)args + args->classes))[index];
    const int vectors_end = tile.length & ~(FPS_DEVICE_WIDTH - 1);
    int place;
    for (place = FPS_DEVICE_WIDTH * (int)threadIdx.x; place < vectors_end; place += FPS_DEVICE_WIDTH * (int)blockDim.x)
        fps_device_fold(args, &of, tile.first + place, FPS_DEVICE_WIDTH, rule, dtype);
    for (place = vectors_end + (int)threadIdx.x; place < tile.length; place += (int)blockDim.x)
        fps_device_fold(args, &of, tile.first + place, 1, rule, dtype);
}

#define FPS_FOLD_KERNEL(name, rule, dtype)                                                   \
    FPS_KERNEL(FPS_BLOCKS(rule)) fps_fold_##name(FPS_ARGUMENT(fps_fold_argument) argument) { \
        fps_device_fold_tile(&FPS_ARGUMENT_OF(fps_fold_argument, argument)->head, rule, dtype); \
    }
#define FPS_FOLD_KERNELS(number, NAME, name, ...)                 \
    FPS_FOLD_KERNEL(name##_float32, number, FPS_DEVICE_FLOAT32)   \
    FPS_FOLD_KERNEL(name##_float16, number, FPS_DEVICE_FLOAT16)   \
    FPS_FOLD_KERNEL(name##_bfloat16, number, FPS_DEVICE_BFLOAT16)
#ifdef FPS_USERS_PLANES
FPS_FOLD_KERNELS(FPS_RULE_USER, USERS, users, 0)
#else
FPS_UPDATE_RULES(FPS_FOLD_KERNELS)
#endif

/* Whether a word of one float, or of two halves, has a non-finite one: all bits of its exponent are 1. */
FPS_DEVICE int fps_device_has_nonfinite(unsigned int word, const int dtype) {
    const unsigned int exponent = dtype == FPS_DEVICE_FLOAT32 ? 0x7f800000u : dtype == FPS_DEVICE_FLOAT16 ? 0x7c00u : 0x7f80u;
    return (word & exponent) == exponent || (dtype != FPS_DEVICE_FLOAT32 && (word >> 16 & exponent) == exponent);
}

/* Check one tile of a slot with one block: whole vectors of 16 bytes first, then the remaining values, one a thread. */
FPS_DEVICE void fps_device_check_tile(const fps_check_args *args, const int dtype) {
    const fps_device_tile tile = ((const fps_device_tile *)args->tiles)[blockIdx.x];
    const int size = dtype == FPS_DEVICE_FLOAT32 ? 4 : 2, values = 16 / size, vectors = tile.length / values;
    const char *const begin = (const char *)args->gradient + size * tile.first;
    int found = 0, place;
    for (place = (int)threadIdx.x; place < vectors; place += (int)blockDim.x) {
        const uint4 four = FPS_WIDE(const uint4, (const uint4 *)begin + place);
        found |= fps_device_has_nonfinite(four.x, dtype) | fps_device_has_nonfinite(four.y, dtype)
                 | fps_device_has_nonfinite(four.z, dtype) | fps_device_has_nonfinite(four.w, dtype);
    }
    for (place = vectors * values + (int)threadIdx.x; place < tile.length; place += (int)blockDim.x)
        found |= fps_device_has_nonfinite(
            dtype == FPS_DEVICE_FLOAT32 ? ((const unsigned int *)begin)[place] : ((const unsigned short *)begin)[place], dtype);
    if (found) ((int *)args->nonfinite)[tile.segment] = args->stamp; /* a benign race: every writer writes the same */
}

#define FPS_CHECK_KERNEL(name, dtype)                                             \
    FPS_KERNEL(5) fps_check_##name(FPS_ARGUMENT(fps_check_args) argument) {       \
        fps_device_check_tile(FPS_ARGUMENT_OF(fps_check_args, argument), dtype); \
    }
FPS_CHECK_KERNEL(float32, FPS_DEVICE_FLOAT32)
FPS_CHECK_KERNEL(float16, FPS_DEVICE_FLOAT16)
FPS_CHECK_KERNEL(bfloat16, FPS_DEVICE_BFLOAT16)

/* Copy runs of memory. Neighbouring blocks copy different runs, so that the links to all homes are busy at a time. */
FPS_KERNEL(5) fps_copy(FPS_ARGUMENT(fps_copy_args) argument) {
    const fps_copy_args *const args = FPS_ARGUMENT_OF(fps_copy_args, argument);
    const fps_device_run run = args->runs[blockIdx.x % args->count];
    const fps_device_integer step = (fps_device_integer)args->blocks * blockDim.x;
    fps_device_integer at = (fps_device_integer)(blockIdx.x / args->count) * blockDim.x + threadIdx.x;
    for (; at < run.vectors; at += step)
        FPS_WIDE(uint4, (uint4 *)run.target + at) = FPS_WIDE(const uint4, (const uint4 *)run.source + at);
}
