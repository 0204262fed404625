"""The fold's kernels on a GPU beside the bandwidth of a plain copy there: `fastps bench kernels --backend cuda`.

Bytes are those that must be moved: gradients read, weights and state read and written. A copy reads and writes each byte.
Compilation, single launches and the making of launch arguments are not timed: `bench step --device cuda` times a step's host
work.
"""

import numpy as np

from fastps.bench.gpu.device_fold import DeviceFold
from fastps.bench.kernels import BETA2, EPSILON, KERNELS, LEARNING_RATE, MOMENTUM, Kernel
from fastps.bench.measure import BenchOptions, Row, check, interleaved, repeated, whole_lines
from fastps.device.cuda import CudaDevice
from fastps.kernels.cuda import launch_args
from fastps.kernels.update import fold

DRAWN = 1 << 22  # numbers that are drawn and repeated: to draw 100 million takes longer than all folds


def measure(options: BenchOptions) -> list[Row]:
    """Return a row for each kernel, gradient dtype and size. Raises DeviceError without a GPU."""
    from fastps.device.cuda import CudaDevice

    device = CudaDevice()
    try:
        return rows_on(device, options)
    finally:
        device.shut()


def rows_on(device: CudaDevice, options: BenchOptions) -> list[Row]:
    """Return the same rows for a given device."""
    return [
        row
        for kernel in KERNELS
        for size in options.parameters
        for dtype in launch_args.DTYPES
        for row in [_row(device, kernel, size, dtype, options)]
    ]


def _row(device: CudaDevice, kernel: Kernel, parameters: int, dtype: str, options: BenchOptions) -> Row:
    size = whole_lines(parameters)
    random = np.random.default_rng(0)
    weights = np.resize(random.standard_normal(min(size, DRAWN), np.float32), size)
    is_adam = kernel.planes == 2
    hyper = (LEARNING_RATE, 0.0 if is_adam else MOMENTUM, 0.0, 0.0, MOMENTUM, BETA2, EPSILON, 0.0, 0)
    gradients = [_gradient(random, size, dtype) for _ in range(kernel.gradients)]
    rule = fold.RULE_ADAM if is_adam else fold.RULE_SGD
    state = np.zeros((kernel.planes, size), np.float32)
    made = DeviceFold(
        device,
        launch_args.Shape(rule, kernel.planes, 0.0, ((0, size, 0),)),
        fold.FOLD_SUM,
        [(gradient, [hyper], [True], 1.0, 1.0) for gradient in gradients],
        weights,
        state,
        np.full(1, 1, np.int64),
        dtype,
    )
    try:
        made.run()
        moved = float(np.abs(made.results()[0] - weights).max())
        check(moved > 1e-3, "weights that moved", f"{moved:g}")
        sides = {"fold": repeated(made.run_often, options.repeat_s), "copy": repeated(made.copy_often, options.repeat_s)}
        spreads = interleaved(sides, options.repeats)
    finally:
        made.close()
    moved_bytes = size * (kernel.gradients * launch_args.DTYPE_BYTES[dtype] + 8 * (1 + kernel.planes))
    bytes_per_s = moved_bytes / spreads["fold"].median
    copy_bytes_per_s = 8 * size / spreads["copy"].median
    return {
        "bench": "kernels",
        "name": kernel.name if dtype == "float32" else f"{kernel.name}-{dtype}",
        "size": parameters,
        "backend": "cuda",
        **spreads["fold"].row(),
        "bytes_per_s": bytes_per_s,
        "copy_bytes_per_s": copy_bytes_per_s,
        "limit_share": bytes_per_s / copy_bytes_per_s,
        "checked": True,
    }


def _gradient(random: np.random.Generator, size: int, dtype: str) -> "np.ndarray[tuple[int], np.dtype[np.generic]]":
    values = random.standard_normal(min(size, DRAWN), np.float32)
    if dtype == "bfloat16":
        return np.resize((values.view(np.uint32) >> 16).astype(np.uint16), size)
    return np.resize(values if dtype == "float32" else values.astype(np.float16), size)
