"""A fold on a device with buffers of its own, for benchmarks and checks: given arrays go there, results come back.

Refuses to know workers: it is one process, one stream, one fold at a time, on any fastps.device.interface.Device.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastps.device.interface import Device
from fastps.kernels.cuda import host_fold as device_fold
from fastps.kernels.cuda import launch_args as device_order

_PIECE_BYTES = 1 << 22

Push = tuple[Any, Sequence[tuple[float, ...]], Sequence[bool], float, float]
"""A gradient as it lies on the device (float32, or 16-bit words), and the rest as of kernels/update/reference.py's Push."""


class DeviceFold:
    """Buffers, order and tiles of one fold. `close` gives the memory back.

    >>> from fastps.device.host import HostDevice
    >>> shape = device_order.Shape(0, 0, 0.0, ((0, 3, 0),))
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
        device: Device,
        shape: device_order.Shape,
        mode: int,
        pushes: Sequence[Push],
        weights: npt.NDArray[np.float32],
        state: npt.NDArray[np.float32],
        steps: npt.NDArray[np.int64],
        dtype: str,
        scale: float = 1.0,
    ) -> None:
        self._device = device
        self._stream = device.make_stream()
        self._rule, self._dtype = shape.rule, dtype
        self._addresses: list[int] = []
        self._shapes = weights.shape, state.shape
        self._pushes = len(pushes)
        self._staging = device.host_memory(_PIECE_BYTES)
        self._weights_out, self._state_out = self._room(weights.nbytes), self._room(state.nbytes)
        self._flags = self._room(4 * max(1, len(pushes)))
        self._weights_in = self._sent(weights)
        state_in = self._sent(state)
        buffers = device_order.Buffers(self._weights_in, self._weights_out, state_in, self._state_out, len(weights))
        made = [
            device_order.DevicePush(self._sent(gradient), hypers, np.array(presence, np.bool_), scale, rate_scale)
            for gradient, hypers, presence, scale, rate_scale in pushes
        ]
        order, self.steps = device_order.make_order(shape, mode, made, steps, buffers, scale=scale, nonfinite=self._flags)
        tiles = device_order.tiles_of(shape)
        self._blocks = len(tiles) // device_fold.TILE_BYTES
        self._order, self._tiles = self._sent(order), self._sent(tiles)
        # For a benchmark nobody looks for values that are not finite, as in the store.
        plain, _ = device_order.make_order(shape, mode, made, steps, buffers, scale=scale)
        self._plain = self._sent(plain)

    def _room(self, size: int) -> int:
        self._addresses.append(self._device.allocate(max(256, size)))
        return self._addresses[-1]

    def _sent(self, values: npt.NDArray[Any]) -> int:
        """The address of a copy on the device, made in pieces through page-locked memory."""
        address = self._room(values.nbytes)
        data = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        for first in range(0, data.nbytes, _PIECE_BYTES):
            piece = data[first : first + _PIECE_BYTES]
            self._staging[: piece.nbytes] = piece
            self._device.copy(address + first, self._staging.ctypes.data, piece.nbytes, self._stream)
            self._device.synchronize(self._stream)
        return address

    def _fetched(self, address: int, size: int) -> npt.NDArray[np.uint8]:
        """A copy of what lies at an address."""
        values = np.empty(size, np.uint8)
        for first in range(0, size, _PIECE_BYTES):
            piece = values[first : first + _PIECE_BYTES]
            self._device.copy(self._staging.ctypes.data, address + first, piece.nbytes, self._stream)
            self._device.synchronize(self._stream)
            piece[:] = self._staging[: piece.nbytes]
        return values

    def run(self) -> None:
        """Fold once, with the look for values that are not finite, and wait."""
        self._device.launch_fold(self._rule, self._dtype, self._order, self._tiles, self._blocks, self._stream)
        self._device.synchronize(self._stream)

    def run_often(self, times: int) -> None:
        """Fold so often from the same buffers into the same buffers, and wait once."""
        for _ in range(times):
            self._device.launch_fold(self._rule, self._dtype, self._plain, self._tiles, self._blocks, self._stream)
        self._device.synchronize(self._stream)

    def copy_often(self, times: int) -> None:
        """Copy the weights into the place of the new ones so often, and wait once: what the device's memory allows."""
        for _ in range(times):
            self._device.copy(self._weights_out, self._weights_in, 4 * self._shapes[0][0], self._stream)
        self._device.synchronize(self._stream)

    def results(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Weights, state and steps after `run`."""
        weights = self._fetched(self._weights_out, 4 * int(np.prod(self._shapes[0]))).view(np.float32)
        state = self._fetched(self._state_out, 4 * int(np.prod(self._shapes[1]))).view(np.float32)
        return weights.reshape(self._shapes[0]), state.reshape(self._shapes[1]), self.steps

    def nonfinite(self) -> list[int]:
        """For each push whether it had a value that is not finite, 0 or 1."""
        return self._fetched(self._flags, 4 * self._pushes).view(np.int32).tolist()  # type: ignore[no-any-return]

    def close(self) -> None:
        """Give the memory back."""
        for address in self._addresses:
            self._device.close(address)
        self._addresses.clear()
