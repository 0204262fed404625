/* The fold on a GPU: the sum of the pushes' gradients, scale, decay, rule, moving average and the check for non-finite values,
 * in one pass over memory. NVRTC or nvcc compile this source for a GPU, and with a shim a C compiler makes a host function of
 * it, so that every rule is compared with its oracle on machines without a GPU.
 *
 * The arithmetic is the CPU fold's, line by line, with a fused multiply-add exactly where that has one. It must be compiled
 * without contraction (--fmad=false) and with IEEE division and square root (the default): the bits are then those of the CPU.
 * The host computes the launch arguments, which say what is done to which parameter; a kernel only reads them. It uses no
 * shared memory, no barrier and no atomic.
 *
 * C and C++ both compile it. It includes nothing but the shim, because NVRTC has no headers. */
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define FPS_DEVICE static __device__ __forceinline__
#define FPS_KERNEL extern "C" __global__ void __launch_bounds__(256)
#define FPS_UNROLL _Pragma("unroll")
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

/* Numbers shared with the host; those of rules and modes equal the CPU fold's, which the host build checks at import. */
#define FPS_DEVICE_SGD 0
#define FPS_DEVICE_ADAM 1
#define FPS_DEVICE_ADAGRAD 2
#define FPS_DEVICE_RMSPROP 3
#define FPS_DEVICE_SUM 0
#define FPS_DEVICE_EACH 1
#define FPS_DEVICE_FLOAT32 0
#define FPS_DEVICE_FLOAT16 1
#define FPS_DEVICE_BFLOAT16 2
#define FPS_DEVICE_PLANES 3 /* most state planes of a rule */
#define FPS_DEVICE_MOVES 1 /* the moving average of the weights moves in this fold */
#define FPS_DEVICE_WIDTH 4  /* floats that one thread loads at a time */

#define FPS_BY_DECAY 1
#define FPS_BY_SHRINK 2
#define FPS_BY_MOMENTUM 4
#define FPS_BY_FIRST 8
#define FPS_BY_NESTEROV 16
#define FPS_BY_CENTERED 32
#define FPS_BY_SMALL_LERP 64 /* lerp from the near end, as torch.lerp */

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
    float lerp_fraction;
    int flags;
} fps_device_coefficients;

/* A class of parameters with the same treatment. FPS_DEVICE_SUM: the gradients of its entries are summed, each times its scale
 * unless `is_plain`, and the rule is applied once with `coefficients`; without entries nothing is applied. FPS_DEVICE_EACH: the
 * rule is applied entry by entry; an entry without a push (-1) only moves the average. */
typedef struct {
    int first_entry, entries, coefficients, is_plain;
} fps_device_class;

typedef struct {
    int push, coefficients;
    float scale;
    int reserved;
} fps_device_entry;

/* The head of a launch's arguments; the tables follow at the given offsets, in bytes from its beginning. */
typedef struct {
    fps_device_address weights_in, weights_out, state_in, state_out;
    fps_device_address nonfinite;    /* int[pushes], set to 1 where a push's gradient is non-finite; 0: not checked */
    fps_device_integer state_stride; /* floats between planes */
    fps_device_integer class_of_segment, classes, entries, coefficients, gradients; /* int; the structs; addresses */
    int mode, rule_planes;
    int has_average; /* 0: none; FPS_DEVICE_MOVES; or 2: it is copied because nothing was pushed */
    int average_is_small;
    float average_fraction;
    int reserved;
} fps_launch_args;

typedef struct {
    float weight, planes[FPS_DEVICE_PLANES], average;
} fps_device_element;

FPS_DEVICE float fps_device_lerp(float start, float end, float fraction, int is_small) {
    return fmaf(fraction, end - start, is_small ? start : end);
}

/* One application of the rule on one element; `rule` is a constant wherever this is inlined. */
FPS_DEVICE void fps_device_apply(const fps_device_coefficients *by, fps_device_element *at, float gradient, const int rule) {
    const int flags = by->flags;
    float weight = at->weight, step = gradient * by->scale;
    if (rule == FPS_DEVICE_ADAM && (flags & FPS_BY_SHRINK)) weight = weight * by->shrink;
    if (flags & FPS_BY_DECAY) step = fmaf(weight, by->weight_decay, step);
    if (rule == FPS_DEVICE_SGD) {
        if (flags & FPS_BY_MOMENTUM) {
            float buffer = flags & FPS_BY_FIRST ? step : fmaf(step, by->undampened, at->planes[0] * by->momentum);
            at->planes[0] = buffer;
            step = flags & FPS_BY_NESTEROV ? fmaf(buffer, by->momentum, step) : buffer;
        }
        weight = fmaf(step, by->minus_rate, weight);
    } else if (rule == FPS_DEVICE_ADAM) {
        float mean = fps_device_lerp(at->planes[0], step, by->lerp_fraction, flags & FPS_BY_SMALL_LERP);
        float square = fmaf(by->one_minus_beta2 * step, step, at->planes[1] * by->beta2);
        at->planes[0] = mean;
        at->planes[1] = square;
        weight = weight + (by->minus_rate * mean) / (sqrtf(square) / by->root_correction2 + by->epsilon);
    } else if (rule == FPS_DEVICE_ADAGRAD) {
        float sum = fmaf(step, step, at->planes[0]);
        at->planes[0] = sum;
        weight = weight + (by->minus_rate * step) / (sqrtf(sum) + by->epsilon);
    } else {
        float square = fmaf(by->one_minus_beta2 * step, step, at->planes[0] * by->beta2), variance = square, root;
        at->planes[0] = square;
        if (flags & FPS_BY_CENTERED) {
            float mean = fps_device_lerp(at->planes[2], step, by->lerp_fraction, flags & FPS_BY_SMALL_LERP);
            at->planes[2] = mean;
            variance = fmaf(-mean, mean, square);
        }
        root = sqrtf(variance) + by->epsilon;
        if (flags & FPS_BY_MOMENTUM) {
            float buffer = at->planes[1] * by->momentum + step / root;
            at->planes[1] = buffer;
            weight = fmaf(buffer, by->minus_rate, weight);
        } else {
            weight = weight + (by->minus_rate * step) / root;
        }
    }
    at->weight = weight;
}

/* Load `width` floats from `place`; FPS_DEVICE_WIDTH floats are one vector load. */
FPS_DEVICE void fps_device_load(float *to, const float *from, fps_device_integer place, const int width) {
    if (width == FPS_DEVICE_WIDTH) {
        float4 four = *(const float4 *)(from + place);
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    } else {
        to[0] = from[place];
    }
}

FPS_DEVICE void fps_device_store(float *to, fps_device_integer place, const float *from, const int width) {
    if (width == FPS_DEVICE_WIDTH) {
        float4 four;
        four.x = from[0], four.y = from[1], four.z = from[2], four.w = from[3];
        *(float4 *)(to + place) = four;
    } else {
        to[place] = from[0];
    }
}

FPS_DEVICE float fps_device_widened(unsigned short bits, const int dtype) {
    return dtype == FPS_DEVICE_FLOAT16 ? fps_float_of_half(bits) : fps_float_of_bits((unsigned int)bits << 16);
}

/* Load a push's gradient as floats; set its flag if one is non-finite (all exponent bits are 1). */
FPS_DEVICE void fps_device_gradient(float *to, const fps_launch_args *args, int push, fps_device_integer place,
                                    const int width, const int dtype) {
    const fps_device_address address =
        ((const fps_device_address *)((const char *)args + args->gradients))[push];
    int i, is_finite = 1;
    if (dtype == FPS_DEVICE_FLOAT32) {
        fps_device_load(to, (const float *)address, place, width);
    } else if (width == FPS_DEVICE_WIDTH) {
        ushort4 four = *(const ushort4 *)((const unsigned short *)address + place);
        to[0] = fps_device_widened(four.x, dtype), to[1] = fps_device_widened(four.y, dtype);
        to[2] = fps_device_widened(four.z, dtype), to[3] = fps_device_widened(four.w, dtype);
    } else {
        to[0] = fps_device_widened(((const unsigned short *)address)[place], dtype);
    }
    if (args->nonfinite) {
        FPS_UNROLL
        for (i = 0; i < width; i++) is_finite &= (fps_bits_of_float(to[i]) & 0x7f800000u) != 0x7f800000u;
        if (!is_finite) ((int *)args->nonfinite)[push] = 1; /* a benign race: every writer writes 1 */
    }
}

/* The sum of a class's gradients in its entries' order; a scale common to all is in the coefficients. */
FPS_DEVICE void fps_device_sum(float *total, const fps_launch_args *args, const fps_device_class *of, fps_device_integer place,
                               const int width, const int dtype) {
    const fps_device_entry *entries = (const fps_device_entry *)((const char *)args + args->entries) + of->first_entry;
    int entry, i;
    for (entry = 0; entry < of->entries; entry++) {
        float more[FPS_DEVICE_WIDTH];
        fps_device_gradient(more, args, entries[entry].push, place, width, dtype);
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

/* Fold `width` elements from `place`, from the loads to the stores. The average follows versions, as in fps_fold_job.
 *
 * One function although it is long: elements stay in registers from the loads to the stores. */
FPS_DEVICE void fps_device_fold(const fps_launch_args *args, const fps_device_class *of, fps_device_integer place,
                                const int width, const int rule, const int dtype) {
    const int planes = rule == FPS_DEVICE_ADAM ? 2 : rule == FPS_DEVICE_RMSPROP ? 3 : 1;
    const fps_device_coefficients *by =
        (const fps_device_coefficients *)((const char *)args + args->coefficients);
    const fps_device_integer stride = args->state_stride;
    fps_device_element elements[FPS_DEVICE_WIDTH];
    float values[FPS_DEVICE_WIDTH];
    int i, plane, entry;
    fps_device_load(values, (const float *)args->weights_in, place, width);
    FPS_UNROLL
    for (i = 0; i < width; i++) {
        elements[i].weight = values[i];
        elements[i].planes[0] = elements[i].planes[1] = elements[i].planes[2] = elements[i].average = 0;
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
            const int push = entries[entry].push;
            if (push >= 0) fps_device_gradient(values, args, push, place, width, dtype);
            FPS_UNROLL
            for (i = 0; i < width; i++) {
                if (push >= 0) fps_device_apply(by + entries[entry].coefficients, &elements[i], values[i], rule);
                if (args->has_average == FPS_DEVICE_MOVES) fps_device_average(args, &elements[i]);
            }
        }
    }
    FPS_UNROLL
    for (i = 0; i < width; i++) values[i] = elements[i].weight;
    fps_device_store((float *)args->weights_out, place, values, width);
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
FPS_DEVICE void fps_device_fold_tile(fps_device_address args_address, fps_device_address tiles, const int rule,
                                     const int dtype) {
    const fps_launch_args *args = (const fps_launch_args *)args_address;
    const fps_device_tile tile = ((const fps_device_tile *)tiles)[blockIdx.x];
    const int index = ((const int *)((const char *)args + args->class_of_segment))[tile.segment];
    const fps_device_class of = ((const fps_device_class *)((const char *)args + args->classes))[index];
    const int vectors_end = tile.length & ~(FPS_DEVICE_WIDTH - 1);
    int place;
    for (place = FPS_DEVICE_WIDTH * (int)threadIdx.x; place < vectors_end; place += FPS_DEVICE_WIDTH * (int)blockDim.x)
        fps_device_fold(args, &of, tile.first + place, FPS_DEVICE_WIDTH, rule, dtype);
    for (place = vectors_end + (int)threadIdx.x; place < tile.length; place += (int)blockDim.x)
        fps_device_fold(args, &of, tile.first + place, 1, rule, dtype);
}

#define FPS_FOLD_KERNEL(name, rule, dtype)                                               \
    FPS_KERNEL fps_fold_##name(fps_device_address args, fps_device_address tiles) {     \
        fps_device_fold_tile(args, tiles, rule, dtype);                                 \
    }
#define FPS_FOLD_KERNELS(name, rule)                              \
    FPS_FOLD_KERNEL(name##_float32, rule, FPS_DEVICE_FLOAT32)     \
    FPS_FOLD_KERNEL(name##_float16, rule, FPS_DEVICE_FLOAT16)     \
    FPS_FOLD_KERNEL(name##_bfloat16, rule, FPS_DEVICE_BFLOAT16)
FPS_FOLD_KERNELS(sgd, FPS_DEVICE_SGD)
FPS_FOLD_KERNELS(adam, FPS_DEVICE_ADAM)
FPS_FOLD_KERNELS(adagrad, FPS_DEVICE_ADAGRAD)
FPS_FOLD_KERNELS(rmsprop, FPS_DEVICE_RMSPROP)
