"""The GPU kernels as host functions: the CUDA source, compiled by the C compiler through a shim.

It serves the device in host memory (for tests, and machines without a GPU) and the comparison of the kernels with their oracle.
The CPU fold is far faster.
"""

cdef extern from "update/fold.h" nogil:
    enum:
        FPS_RULE_SGD
        FPS_RULE_ADAM
        FPS_RULE_ADAGRAD
        FPS_RULE_RMSPROP
        FPS_FOLD_SUM
        FPS_FOLD_EACH

cdef extern from "cuda/fold.cu" nogil:
    enum:
        FPS_DEVICE_SGD
        FPS_DEVICE_ADAM
        FPS_DEVICE_ADAGRAD
        FPS_DEVICE_RMSPROP
        FPS_DEVICE_SUM
        FPS_DEVICE_EACH
        FPS_DEVICE_FLOAT32
        FPS_DEVICE_FLOAT16
        FPS_DEVICE_BFLOAT16
        FPS_BY_DECAY
        FPS_BY_SHRINK
        FPS_BY_MOMENTUM
        FPS_BY_FIRST
        FPS_BY_NESTEROV
        FPS_BY_CENTERED
        FPS_BY_SMALL_LERP
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
    ctypedef void (*fps_kernel)(unsigned long long args, unsigned long long tiles)
    void fps_launch_on_host(fps_kernel kernel, int blocks, int threads, unsigned long long args, unsigned long long tiles)
    void fps_fold_sgd_float32(unsigned long long args, unsigned long long tiles)
    void fps_fold_sgd_float16(unsigned long long args, unsigned long long tiles)
    void fps_fold_sgd_bfloat16(unsigned long long args, unsigned long long tiles)
    void fps_fold_adam_float32(unsigned long long args, unsigned long long tiles)
    void fps_fold_adam_float16(unsigned long long args, unsigned long long tiles)
    void fps_fold_adam_bfloat16(unsigned long long args, unsigned long long tiles)
    void fps_fold_adagrad_float32(unsigned long long args, unsigned long long tiles)
    void fps_fold_adagrad_float16(unsigned long long args, unsigned long long tiles)
    void fps_fold_adagrad_bfloat16(unsigned long long args, unsigned long long tiles)
    void fps_fold_rmsprop_float32(unsigned long long args, unsigned long long tiles)
    void fps_fold_rmsprop_float16(unsigned long long args, unsigned long long tiles)
    void fps_fold_rmsprop_bfloat16(unsigned long long args, unsigned long long tiles)

FLOAT32 = FPS_DEVICE_FLOAT32
FLOAT16 = FPS_DEVICE_FLOAT16
BFLOAT16 = FPS_DEVICE_BFLOAT16
BY_DECAY = FPS_BY_DECAY
BY_SHRINK = FPS_BY_SHRINK
BY_MOMENTUM = FPS_BY_MOMENTUM
BY_FIRST = FPS_BY_FIRST
BY_NESTEROV = FPS_BY_NESTEROV
BY_CENTERED = FPS_BY_CENTERED
BY_SMALL_LERP = FPS_BY_SMALL_LERP
TILE_BYTES = sizeof(fps_device_tile)
COEFFICIENTS_BYTES = sizeof(fps_device_coefficients)
CLASS_BYTES = sizeof(fps_device_class)
ENTRY_BYTES = sizeof(fps_device_entry)
ARGS_BYTES = sizeof(fps_launch_args)

# The CUDA source has no includes, so it repeats these numbers.
if (FPS_DEVICE_SGD, FPS_DEVICE_ADAM, FPS_DEVICE_ADAGRAD, FPS_DEVICE_RMSPROP, FPS_DEVICE_SUM, FPS_DEVICE_EACH) != (
        FPS_RULE_SGD, FPS_RULE_ADAM, FPS_RULE_ADAGRAD, FPS_RULE_RMSPROP, FPS_FOLD_SUM, FPS_FOLD_EACH):
    raise ImportError("fold.cu and fold.h number rules or modes differently")

cdef fps_kernel _KERNELS[4][3]
_KERNELS[0][0] = fps_fold_sgd_float32
_KERNELS[0][1] = fps_fold_sgd_float16
_KERNELS[0][2] = fps_fold_sgd_bfloat16
_KERNELS[1][0] = fps_fold_adam_float32
_KERNELS[1][1] = fps_fold_adam_float16
_KERNELS[1][2] = fps_fold_adam_bfloat16
_KERNELS[2][0] = fps_fold_adagrad_float32
_KERNELS[2][1] = fps_fold_adagrad_float16
_KERNELS[2][2] = fps_fold_adagrad_bfloat16
_KERNELS[3][0] = fps_fold_rmsprop_float32
_KERNELS[3][1] = fps_fold_rmsprop_float16
_KERNELS[3][2] = fps_fold_rmsprop_bfloat16


def launch(int rule, int dtype, unsigned long long args, unsigned long long tiles, int blocks, int threads=256):
    """Run the kernel of a rule and a gradient's dtype with the arguments and tiles at these addresses. Releases the GIL.

    The addresses are read and written unchecked, as on a GPU. Raises ValueError for an unknown kernel.
    """
    if not (0 <= rule < 4 and 0 <= dtype < 3):
        raise ValueError(f"expected a rule of 0 to 3 and a dtype of 0 to 2, found {rule} and {dtype}")
    with nogil:
        fps_launch_on_host(_KERNELS[rule][dtype], blocks, threads, args, tiles)
