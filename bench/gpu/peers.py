"""Checks between the GPUs of one machine, for the GPU check: peer access, bandwidth of each pair, and folds over peers.

The devices are those of one process, as a server has them: each borrows the memory of the others.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastps.bench.gpu.device_fold import DeviceFold
from fastps.bench.gpu.report import not_run
from fastps.bench.measure import Row, interleaved, repeated
from fastps.device.cuda import CudaDevice
from fastps.kernels.cuda import launch_args
from fastps.kernels.update import fold

REPEATS = 5
_HYPER = (0.1, 0.9, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0)  # SGD with momentum


def check_pairs(devices: Sequence[CudaDevice], size: int, repeat_s: float = 0.1) -> list[Row]:
    """Return a row for each ordered pair: whether one reads the other, and the bytes/s of a copy of `size` bytes.

    A pair without peer access copies through page-locked host memory, as a job does.
    """
    return [
        _pair_row((reader, source), devices[reader], devices[source], size, repeat_s)
        for reader in range(len(devices))
        for source in range(len(devices))
        if reader != source
    ]


def _pair_row(numbers: tuple[int, int], reader: CudaDevice, source: CudaDevice, size: int, repeat_s: float) -> Row:
    streams = reader.make_stream(), source.make_stream()
    addresses = reader.allocate(size), source.allocate(size)
    staging = source.host_memory(size)
    staging[:] = np.arange(size, dtype=np.uint64).view(np.uint8)[:size] if size % 8 == 0 else 7
    source.copy(addresses[1], staging.ctypes.data, size, streams[1])
    source.synchronize(streams[1])
    expected = staging.copy()
    has_access = reader.can_reach(source.identity)
    if has_access:
        reader.borrow(source)

    def copy(times: int) -> None:
        for _ in range(times):
            if has_access:
                reader.copy(addresses[0], addresses[1], size, streams[0])
                continue
            source.copy(staging.ctypes.data, addresses[1], size, streams[1])
            source.synchronize(streams[1])
            reader.copy(addresses[0], staging.ctypes.data, size, streams[0])
        reader.synchronize(streams[0])

    seconds = interleaved({"copy": repeated(copy, repeat_s)}, REPEATS)["copy"].median
    staging[:] = 0
    reader.copy(staging.ctypes.data, addresses[0], size, streams[0])
    reader.synchronize(streams[0])
    is_equal = bool(np.array_equal(staging, expected))
    reader.close(addresses[0])
    for address in (addresses[1], staging.ctypes.data):
        source.close(address)
    return {
        "check": "peers",
        "name": f"GPU {numbers[0]} reads GPU {numbers[1]}",
        "access": has_access,
        "bytes": size,
        "bytes_per_s": size / seconds,
        "ok": is_equal,
    }


def check_folds(devices: Sequence[CudaDevice], parameters: int, repeat_s: float = 0.1) -> list[Row]:
    """Return a row for each GPU: a fold there whose gradients are one on each GPU has the bits of a fold of local ones."""
    return [_fold_row(number, devices, parameters, repeat_s) for number in range(len(devices))]


def _fold_row(number: int, devices: Sequence[CudaDevice], parameters: int, repeat_s: float) -> Row:
    home = devices[number]
    reached = [device for device in devices if home.can_reach(device.identity)]
    name = f"GPU {number}"
    if len(reached) < 2:
        return not_run("fold over peers", name, "no other GPU has peer access: gradients go through host memory")
    random = np.random.default_rng(number)
    weights = random.standard_normal(parameters, np.float32)
    state = random.standard_normal((1, parameters), np.float32)
    gradients = [random.standard_normal(parameters, np.float32) for _ in reached]
    shape = launch_args.Shape(fold.RULE_SGD, 1, 0.0, ((0, parameters, 0),))
    pushes = [(gradient, [_HYPER], [True], 1.0, 1.0) for gradient in gradients]
    steps, scale = np.full(1, 5, np.int64), 1.0 / len(reached)
    made: dict[str, DeviceFold] = {}
    for kind, places in (("local", None), ("peers", reached)):
        made[kind] = DeviceFold(
            home, shape, fold.FOLD_SUM, pushes, weights, state, steps, "float32", scale=scale, gradients_on=places
        )
        made[kind].run()
    results: dict[str, tuple[Any, ...]] = {kind: each.results() for kind, each in made.items()}
    spreads = interleaved({kind: repeated(each.run_often, repeat_s) for kind, each in made.items()}, REPEATS)
    for each in made.values():
        each.close()
    same = all(np.array_equal(one, other) for one, other in zip(results["local"], results["peers"], strict=True))
    return {
        "check": "fold over peers",
        "name": name,
        "gpus": len(reached),
        "parameters": parameters,
        "bytes_per_s": 4 * parameters * (len(reached) - 1) / spreads["peers"].median,
        "ratio": spreads["peers"].median / spreads["local"].median,
        "ok": bool(same),
    }


def devices_of(count: int) -> list[Any]:
    """A device of each GPU that this process sees."""
    from fastps.device.cuda import CudaDevice

    return [CudaDevice(index) for index in range(count)]
