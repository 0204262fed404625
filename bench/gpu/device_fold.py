"""A fold on a device with its own buffers, for benchmarks and checks: it copies given arrays there and results back.

It runs in one process, on one stream, one fold at a time, on any CudaDevice.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastps.device.cuda import CudaDevice
from fastps.job.layout import aligned
from fastps.kernels.cuda import launch_args

_PIECE_BYTES = 1 << 22

Push = tuple[Any, Sequence[tuple[float, ...]], Sequence[bool], float, float]
"""A gradient in the device's form (float32, or 16-bit words), and the other fields as in the reference's Push."""


class DeviceFold:
    """The buffers, launches and tiles of one fold. `close` frees the memory.

    >>> from fastps.lab.gpus.cuda_on_host import HostDevice
    >>> shape = launch_args.Shape(0, 0, 0.0, ((0, 3, 0),))
    >>> pushes = [(np.ones(16, np.float32), [(0.5, 0, 0, 0, 0, 0, 0, 0, 0)], [True], 1.0, 1.0)]
    >>> weights, state, steps = np.ones(16, np.float32), np.zeros((0, 16), np.float32), np.zeros(1, np.int64)
    >>> device = HostDevice("host")
    >>> fold = DeviceFold(device, shape, 0, pushes, weights, state, steps, "float32")
    >>> fold.run()
    >>> fold.results()[0][:4].tolist()
    [0.5, 0.5, 0.5, 0.0]
    >>> fold.close(); device.shut()
    """

    def __init__(
        self,
        device: CudaDevice,
        shape: launch_args.Shape,
        mode: int,
        pushes: Sequence[Push],
        weights: npt.NDArray[np.float32],
        state: npt.NDArray[np.float32],
        steps: npt.NDArray[np.int64],
        dtype: str,
        scale: float = 1.0,
        gradients_on: Sequence[CudaDevice] | None = None,
        in_place: bool = False,
    ) -> None:
        """`gradients_on`: the device of each gradient, if they are not all on the fold's own. It must reach them.

        `in_place`: each fold reads what the one before wrote.
        """
        self._device = device
        self._stream = device.make_stream()
        self._kernel = launch_args.fold_kernel(shape.rule, dtype)
        self._addresses: list[tuple[CudaDevice, int]] = []
        self._shapes, stride = (weights.shape, state.shape), aligned(len(weights))
        self._staging = device.host_memory(_PIECE_BYTES)
        self._flags = self._room(4)
        self._weights_in = self._weights_out = self._sent(weights)
        padded = state if stride == len(weights) else np.pad(state, ((0, 0), (0, stride - len(weights))))
        state_in = self._state_out = self._sent(padded)
        if not in_place:
            self._weights_out, self._state_out = self._room(weights.nbytes), self._room(padded.nbytes)
        buffers = launch_args.Buffers(self._weights_in, self._weights_out, state_in, self._state_out, stride)
        places = gradients_on or [device] * len(pushes)
        made = [
            launch_args.DevicePush(self._sent(gradient, on), hypers, np.array(presence, np.bool_), scale, rate_scale)
            for (gradient, hypers, presence, scale, rate_scale), on in zip(pushes, places, strict=True)
        ]
        tiles, factors = self._sent(launch_args.tiles_of(shape)), (scale, 1.0)
        self._launches, self.steps = launch_args.make_launches(
            shape, mode, made, steps, buffers, tiles, factors=factors, nonfinite=self._flags
        )
        # Benchmarks do not check for non-finite values, like a store's fold.
        self._plain, _ = launch_args.make_launches(shape, mode, made, steps, buffers, tiles, factors=factors)

    def _room(self, size: int, on: CudaDevice | None = None) -> int:
        device = on or self._device
        size = 4 * aligned(-(-size // 4))  # whole cache lines, as in a store
        self._addresses.append((device, device.allocate(max(256, size))))
        if device is not self._device:
            self._device.borrow(device)
        return self._addresses[-1][1]

    def _sent(self, values: npt.NDArray[Any], on: CudaDevice | None = None) -> int:
        """Copy values to a device in pieces, through page-locked memory, and return their address."""
        address = self._room(values.nbytes, on)
        data = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        for first in range(0, data.nbytes, _PIECE_BYTES):
            piece = data[first : first + _PIECE_BYTES]
            self._staging[: piece.nbytes] = piece
            self._device.copy(address + first, self._staging.ctypes.data, piece.nbytes, self._stream)
            self._device.synchronize(self._stream)
        return address

    def _fetched(self, address: int, size: int) -> npt.NDArray[np.uint8]:
        """Copy `size` bytes back from an address."""
        values = np.empty(size, np.uint8)
        for first in range(0, size, _PIECE_BYTES):
            piece = values[first : first + _PIECE_BYTES]
            self._device.copy(self._staging.ctypes.data, address + first, piece.nbytes, self._stream)
            self._device.synchronize(self._stream)
            piece[:] = self._staging[: piece.nbytes]
        return values

    def run(self) -> None:
        """Fold once, with the check for non-finite values, and wait."""
        self._launch(self._launches)

    def _launch(self, launches: list[launch_args.Launch], times: int = 1) -> None:
        for launch in launches * times:
            self._device.launch(self._kernel, launch, self._stream)
        self._device.synchronize(self._stream)

    def run_often(self, times: int) -> None:
        """Fold `times` times from the same buffers into the same buffers, and wait once."""
        self._launch(self._plain, times)

    def copy_often(self, times: int) -> None:
        """Copy the weights to the new weights' buffer `times` times, and wait once: the roofline of the device's memory."""
        for _ in range(times):
            self._device.copy(self._weights_out, self._weights_in, 4 * self._shapes[0][0], self._stream)
        self._device.synchronize(self._stream)

    def results(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Return weights, state and steps after `run`."""
        (size,), (planes, _) = self._shapes
        weights = self._fetched(self._weights_out, 4 * size).view(np.float32)
        state = self._fetched(self._state_out, 4 * planes * aligned(size)).view(np.float32)
        return weights, state.reshape(planes, aligned(size))[:, :size], self.steps

    def nonfinite(self) -> bool:
        """Return whether a `run` had non-finite results."""
        return bool(self._fetched(self._flags, 4).view(np.int32)[0])

    def close(self) -> None:
        """Free the memory."""
        for device, address in self._addresses:
            device.close(address)
        self._addresses.clear()
