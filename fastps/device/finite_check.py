"""The checks for non-finite values on a device: of a push's gradients before it is posted, and of a fold's results after it.

A kernel reads the slot behind the work that writes it, and names each parameter with a non-finite value. The host waits for it,
and writes what it found into the push's slot in the arena: a combiner rejects the push by that, as on the CPU.

A fold's own kernel sets a flag if finite gradients gave non-finite results. The weights are published by then, so nothing is
rejected: the next fold of this lane, or its end, raises an error.
"""

import numpy as np
import numpy.typing as npt

from fastps.device.cuda import CudaDevice
from fastps.device.interface import Stream
from fastps.device.plan import LEAST_BYTES
from fastps.errors import NonFiniteWeightsError
from fastps.job.layout import Layout
from fastps.kernels.cuda import launch_args


class FiniteCheck:
    """The check of one worker's slots on its device. Call `queue`, wait for the stream, then call `found`.

    The kernel marks a parameter with the check's number, so no memory is cleared in between, and what an earlier check has
    written counts for nothing.
    """

    def __init__(self, device: CudaDevice, layout: Layout) -> None:
        self._device = device
        self._kernel = launch_args.check_kernel(layout.gradient_type)
        self._segments = [(each.offset, each.length) for each in layout.parameters]
        self._is_empty = not any(length for _, length in self._segments)
        self._number = 0
        self._check: launch_args.Launch | None = None

    def queue(self, slot: int, stream: Stream) -> None:
        """Queue the check of the gradients at an address on the device, behind the stream's work."""
        device = self._device
        if self._is_empty:
            return
        if self._check is None:
            self._check = self._prepare(stream)
        self._number = self._number % 0x7FFFFFFF + 1
        device.launch(self._kernel, launch_args.aim(self._check, slot, self._number), stream)
        device.copy(self._marks.ctypes.data, self._device_marks, self._marks.nbytes, stream)

    def _prepare(self, stream: Stream) -> launch_args.Launch:
        """Allocate, and make the launch, at the first check: a device of a worker that never pushes needs nothing."""
        device, tiles = self._device, launch_args.tiles_of_segments(self._segments)
        self._marks = device.host_memory(4 * len(self._segments)).view(np.int32)
        table = device.host_memory(tiles.nbytes)
        table[:] = tiles
        address = device.allocate(max(LEAST_BYTES, tiles.nbytes))
        device.copy(address, table.ctypes.data, tiles.nbytes, stream)
        self._device_marks = device.allocate(max(LEAST_BYTES, self._marks.nbytes))
        return launch_args.check_launch(self._segments, 0, self._device_marks, 0, address)

    def found(self) -> npt.NDArray[np.bool_]:
        """Whether each parameter of the slot is non-finite (bool[parameters]). The caller has waited for the stream."""
        return np.zeros(len(self._segments), np.bool_) if self._is_empty else np.equal(self._marks, self._number)


class ResultsCheck:
    """The flags of the folds that one lane queues, one a shard, on its device and in pinned memory of the host."""

    def __init__(self, device: CudaDevice, shards: int) -> None:
        self._device = device
        self._shards = shards
        self._address = 0  # allocated at the first fold, because most lanes of several devices fold some shards only
        self._told: npt.NDArray[np.int32] | None = None

    def flag(self, shard: int) -> int:
        """The address on the device that a fold of the shard sets to 1."""
        if not self._address:
            self._address = self._device.allocate(max(LEAST_BYTES, 4 * self._shards))
            self._told = self._device.host_memory(4 * self._shards).view(np.int32)
        return self._address + 4 * shard

    def tell(self, shard: int, stream: Stream) -> None:
        """Queue the copy of a shard's flag to the host, behind a fold on the stream."""
        assert self._told is not None
        self._device.copy(self._told.ctypes.data + 4 * shard, self.flag(shard), 4, stream)

    def check(self) -> None:
        """Raise NonFiniteWeightsError if a fold that is known to have ended had non-finite results. Does not wait."""
        if self._told is None or not self._told.any():
            return
        shards = ", ".join(str(shard) for shard in np.flatnonzero(self._told))
        raise NonFiniteWeightsError(
            f"expected finite weights on the device {self._device.identity}, found Inf or NaN in shard {shards} after a fold of"
            " finite gradients: lower the learning rate, or clip the gradients, and restart from a checkpoint"
        )
