"""The GPU kernels as host functions: the CUDA source, compiled by the C compiler through a shim.

It serves the device in host memory (for tests, and machines without a GPU) and the comparison of the kernels with their oracle.
The CPU fold is far faster.
"""

cdef extern from "update/fold.h" nogil:
    enum:
        FPS_FOLD_SUM
        FPS_FOLD_EACH

cdef extern from "cuda/fold.cu" nogil:
    enum:
        FPS_DEVICE_SUM
        FPS_DEVICE_EACH
        FPS_DEVICE_FLOAT32
        FPS_DEVICE_FLOAT16
        FPS_DEVICE_BFLOAT16
        FPS_ARGUMENT_BYTES
        FPS_COPY_RUNS
    ctypedef struct fps_device_tile:
        pass
    ctypedef struct fps_device_coefficients:
        pass
    ctypedef struct fps_device_class:
        pass
    ctypedef struct fps_device_entry:
        pass
    ctypedef struct fps_launch_args:
        pass
    ctypedef struct fps_check_args:
        pass
    ctypedef struct fps_copy_args:
        pass
    ctypedef struct fps_fold_argument:
        pass
    ctypedef void (*fps_kernel)(const void *argument)
    unsigned long long fps_launch_on_host(fps_kernel kernel, const void *argument, int blocks, int threads)

FLOAT32 = FPS_DEVICE_FLOAT32
FLOAT16 = FPS_DEVICE_FLOAT16
BFLOAT16 = FPS_DEVICE_BFLOAT16
TILE_BYTES = sizeof(fps_device_tile)
COEFFICIENTS_BYTES = sizeof(fps_device_coefficients)
CLASS_BYTES = sizeof(fps_device_class)
ENTRY_BYTES = sizeof(fps_device_entry)
ARGS_BYTES = sizeof(fps_launch_args)
CHECK_ARGS_BYTES = sizeof(fps_check_args)
COPY_ARGS_BYTES = sizeof(fps_copy_args)
ARGUMENT_BYTES = sizeof(fps_fold_argument)
COPY_RUNS = FPS_COPY_RUNS

if ARGUMENT_BYTES != FPS_ARGUMENT_BYTES or COPY_ARGS_BYTES > FPS_ARGUMENT_BYTES:
    raise ImportError("a kernel's parameters are larger than CUDA takes")

# The CUDA source includes no header of the host, so it repeats these numbers.
if (FPS_DEVICE_SUM, FPS_DEVICE_EACH) != (FPS_FOLD_SUM, FPS_FOLD_EACH):
    raise ImportError("fold.cu and fold.h number modes differently")

cdef extern from *:
    """
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

_PLACES = {fps_kernels[place].name.decode(): place for place in range(FPS_KERNEL_COUNT)}


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
