"""The GPU kernels as host functions: the CUDA source, compiled by the C compiler through a shim.

It serves the device in host memory (for tests, and machines without a GPU) and the comparison of the kernels with their oracle.
The CPU fold is far faster.
"""

cdef extern from "update/fold.h" nogil:
    enum:
        FPS_FOLD_SUM
        FPS_FOLD_EACH
        FPS_RULE_NUMBERS

cdef extern from "cuda/fold.cu" nogil:
    enum:
        FPS_DEVICE_SUM
        FPS_DEVICE_EACH
        FPS_DEVICE_FLOAT32
        FPS_DEVICE_FLOAT16
        FPS_DEVICE_BFLOAT16
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
    ctypedef void (*fps_kernel)(unsigned long long args, unsigned long long tiles)
    unsigned long long fps_launch_on_host(
        fps_kernel kernel, int blocks, int threads, unsigned long long args, unsigned long long tiles
    )

FLOAT32 = FPS_DEVICE_FLOAT32
FLOAT16 = FPS_DEVICE_FLOAT16
BFLOAT16 = FPS_DEVICE_BFLOAT16
TILE_BYTES = sizeof(fps_device_tile)
COEFFICIENTS_BYTES = sizeof(fps_device_coefficients)
CLASS_BYTES = sizeof(fps_device_class)
ENTRY_BYTES = sizeof(fps_device_entry)
ARGS_BYTES = sizeof(fps_launch_args)
CHECK_ARGS_BYTES = sizeof(fps_check_args)

# The CUDA source includes no header of the host, so it repeats these numbers.
if (FPS_DEVICE_SUM, FPS_DEVICE_EACH) != (FPS_FOLD_SUM, FPS_FOLD_EACH):
    raise ImportError("fold.cu and fold.h number modes differently")

cdef extern from *:
    """
    #define FPS_KERNELS_OF(number, NAME, name, ...) \
        [number] = {fps_fold_##name##_float32, fps_fold_##name##_float16, fps_fold_##name##_bfloat16},
    static const fps_kernel fps_kernels[FPS_RULE_NUMBERS][3] = {FPS_UPDATE_RULES(FPS_KERNELS_OF)};
    """
    const fps_kernel fps_kernels[FPS_RULE_NUMBERS][3]
    fps_kernel fps_check_float32
    fps_kernel fps_check_float16
    fps_kernel fps_check_bfloat16


cdef _run(fps_kernel kernel, int blocks, int threads, unsigned long long args, unsigned long long tiles):
    """Launch, and raise ValueError if a vector was loaded or stored where a GPU would not."""
    cdef unsigned long long misaligned
    with nogil:
        misaligned = fps_launch_on_host(kernel, blocks, threads, args, tiles)
    if misaligned:
        raise ValueError(
            f"expected vectors on multiples of their size, as a GPU demands (error 716), found one at {misaligned:#x}"
        )


def launch(int rule, int dtype, unsigned long long args, unsigned long long tiles, int blocks, int threads=256):
    """Run the kernel of a rule and a gradient's dtype with the arguments and tiles at these addresses. Releases the GIL.

    The addresses are read and written unchecked, as on a GPU. Raises ValueError for an unknown kernel, and for a vector that is
    not aligned to its size.
    """
    if not (0 <= rule < FPS_RULE_NUMBERS and 0 <= dtype < 3) or fps_kernels[rule][dtype] == NULL:
        raise ValueError(f"expected a number of a rule of the fold and a dtype of 0 to 2, found {rule} and {dtype}")
    _run(fps_kernels[rule][dtype], blocks, threads, args, tiles)


def launch_check(int dtype, unsigned long long args, unsigned long long tiles, int blocks, int threads=256):
    """Run the check of a slot's gradients of a dtype, as `launch`. Raises ValueError as `launch`."""
    cdef fps_kernel[3] kernels = [fps_check_float32, fps_check_float16, fps_check_bfloat16]
    if not 0 <= dtype < 3:
        raise ValueError(f"expected a dtype of 0 to 2, found {dtype}")
    _run(kernels[dtype], blocks, threads, args, tiles)
