"""The GPU kernels as host functions: the CUDA source, compiled by the C compiler through a shim.

It serves the device in host memory (for tests, and machines without a GPU) and the comparison of the kernels with their oracle.
The CPU fold is far faster. It also says what the source's structs are, and computes coefficients as the CPU fold does.
"""

from libc.stdint cimport int64_t

from fastps.kernels.update.fold cimport FPS_FOLD_EACH, FPS_FOLD_SUM, fps_hyper, fps_hyper_of

cdef extern from "update/fold_coefficients.h" nogil:
    pass

cdef extern from "cuda/fold.cu" nogil:
    enum:
        FPS_DEVICE_SUM, FPS_DEVICE_EACH, FPS_ARGUMENT_BYTES
    cpdef enum:
        FLOAT32 "FPS_DEVICE_FLOAT32", FLOAT16 "FPS_DEVICE_FLOAT16", BFLOAT16 "FPS_DEVICE_BFLOAT16"
        COPY_RUNS "FPS_COPY_RUNS", TILE_BYTES "sizeof(fps_device_tile)"
        COEFFICIENTS_BYTES "sizeof(fps_device_coefficients)"
        CLASS_BYTES "sizeof(fps_device_class)", ENTRY_BYTES "sizeof(fps_device_entry)"
        ARGS_BYTES "sizeof(fps_launch_args)", ARGUMENT_BYTES "sizeof(fps_fold_argument)"
        CHECK_ARGS_BYTES "sizeof(fps_check_args)", COPY_ARGS_BYTES "sizeof(fps_copy_args)"
    ctypedef struct fps_device_coefficients:
        pass
    ctypedef void (*fps_kernel)(const void *argument)
    unsigned long long fps_launch_on_host(fps_kernel kernel, const void *argument, int blocks, int threads)

if ARGUMENT_BYTES != FPS_ARGUMENT_BYTES or COPY_ARGS_BYTES > FPS_ARGUMENT_BYTES:
    raise ImportError("a kernel's parameters are larger than CUDA takes")

# The CUDA source includes no header of the host, so it repeats these numbers.
if (FPS_DEVICE_SUM, FPS_DEVICE_EACH) != (FPS_FOLD_SUM, FPS_FOLD_EACH):
    raise ImportError("fold.cu and fold.h number modes differently")

cdef extern from *:
    """
    #define FPS_SAME(name) .name = by.name
    static fps_device_coefficients fps_device_coefficients_of(int rule, const fps_hyper *hyper, double learning_rate,
                                                              double scale, int64_t steps) {
        const fps_coefficients by = fps_coefficients_of(rule, hyper, learning_rate, scale, steps);
        return (fps_device_coefficients){
            FPS_SAME(scale), FPS_SAME(weight_decay), FPS_SAME(shrink), FPS_SAME(momentum), FPS_SAME(undampened),
            FPS_SAME(minus_rate), FPS_SAME(beta2), FPS_SAME(one_minus_beta2), FPS_SAME(root_correction2), FPS_SAME(epsilon),
            FPS_SAME(gradient_rate), FPS_SAME(correction), FPS_SAME(rectification), .lerp_fraction = by.lerp.fraction,
            .flags = by.flags | (by.lerp.is_small ? FPS_BY_SMALL_LERP : 0)};
    }

    typedef struct { const char *name; fps_kernel kernel; } fps_named_kernel;
    #define FPS_NAMED(name) {#name, name},
    #define FPS_NAMED_FOLDS(number, NAME, name, ...) \
        FPS_NAMED(fps_fold_##name##_float32) FPS_NAMED(fps_fold_##name##_float16) FPS_NAMED(fps_fold_##name##_bfloat16)
    static const fps_named_kernel fps_kernels[] = {
        FPS_UPDATE_RULES(FPS_NAMED_FOLDS)
        FPS_NAMED(fps_check_float32) FPS_NAMED(fps_check_float16) FPS_NAMED(fps_check_bfloat16) FPS_NAMED(fps_copy)
    };
    enum { FPS_KERNEL_COUNT = sizeof(fps_kernels) / sizeof(fps_kernels[0]) };
    """
    ctypedef struct fps_named_kernel:
        const char *name
        fps_kernel kernel
    const fps_named_kernel fps_kernels[]
    enum:
        FPS_KERNEL_COUNT
    fps_device_coefficients fps_device_coefficients_of(
        int rule, const fps_hyper *hyper, double learning_rate, double scale, int64_t steps)

_PLACES = {fps_kernels[place].name.decode(): place for place in range(FPS_KERNEL_COUNT)}


def coefficients_of(int rule, hyper, double learning_rate, double scale, int64_t steps):
    """Return the bytes of the coefficients of one application of a rule after `steps` others.

    `hyper`: a 9-tuple as in the CPU's `fold`. The learning rate and the gradient's scale are the final ones.

    >>> import numpy as np
    >>> float(np.frombuffer(coefficients_of(0, (0.5, 0, 0, 0, 0, 0, 0, 0, 0), 0.25, 3.0, 0), np.float32)[0])
    3.0
    """
    cdef fps_hyper words = fps_hyper_of(hyper)
    cdef fps_device_coefficients by = fps_device_coefficients_of(rule, &words, learning_rate, scale, steps)
    return (<const char *> &by)[:sizeof(by)]


def launch(str kernel, const unsigned char[::1] argument, int blocks, int threads=256):
    """Run the kernel of a name with its argument, the bytes of a struct. Releases the GIL.

    Memory is read and written unchecked, as on a GPU. Raises ValueError for an unknown kernel, and for a vector that is not
    aligned to its size, which a GPU would not load or store.
    """
    if kernel not in _PLACES:
        raise ValueError(f"expected a kernel of {', '.join(_PLACES)}, found {kernel}")
    cdef fps_kernel of = fps_kernels[<int>_PLACES[kernel]].kernel
    cdef unsigned long long misaligned
    with nogil:
        misaligned = fps_launch_on_host(of, &argument[0], blocks, threads)
    if misaligned:
        raise ValueError(
            f"expected vectors on multiples of their size, as a GPU demands (error 716), found one at {misaligned:#x}"
        )
