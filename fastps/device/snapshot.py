"""A copy of a pinned version from devices to page-locked host memory, on a stream of its own, while folds and steps go on.

The copies are queued behind the folds that make the version. Buffers that they read stay pinned until they are done, so no
later fold writes them: the process waits for the copies before it unpins.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastps.device.arena import DeviceArena
from fastps.device.cuda import CudaDevice
from fastps.membership.job_memory import VersionCopy, Views


class Snapshots:
    """The stream and the memory of one lane's copies. One copy at a time: the arena lets one worker at a time pin a version.

    Attributes:
        stream: the stream on which the copies run.
        copied: the event behind the copies.
    """

    def __init__(self, arena: DeviceArena, device: CudaDevice) -> None:
        self._arena = arena
        self.device = device
        self.stream: Any = device.make_stream()
        self.copied: Any = device.make_event()
        self._memory: npt.NDArray[np.float32] | None = None

    def begin(self, weights: Sequence[int], state: Sequence[int]) -> "Snapshot":
        """Queue the copies of these buffers, one of weights and of state for each shard.

        Raises UnsupportedError without peer access to all homes.
        """
        arena, layout = self._arena, self._arena.layout
        if self._memory is None:
            count = layout.buffer_floats * (1 + layout.planes)
            self._memory = self.device.host_memory(4 * max(1, count)).view(np.float32)
        pieces = []
        for index, parameter in enumerate(layout.parameters):
            shard = parameter.shard
            sources = [arena.weights_address(weights[shard], index)]
            sources += [arena.plane_address(state[shard], plane, index) for plane in range(layout.planes)]
            pieces += [(number, index, source) for number, source in enumerate(sources) if parameter.length]
        arena.await_folds(self.stream)
        for number, index, source in pieces:
            target = self._view(number, index)
            self.device.copy(target.ctypes.data, source, target.nbytes, self.stream)
        self.device.record(self.copied, self.stream)
        return Snapshot(self)

    def views(self, number: int) -> Views:
        """Views of the copied weights (0), or of optimizer-state tensor `number` - 1, one for each parameter."""
        return [self._view(number, index) for index in range(len(self._arena.layout.parameters))]

    def _view(self, number: int, index: int) -> npt.NDArray[np.float32]:
        assert self._memory is not None
        layout, parameter = self._arena.layout, self._arena.layout.parameters[index]
        return self._memory[layout.buffer_floats * number + parameter.offset :][: parameter.length]


class Snapshot(VersionCopy):
    """A copy that is under way. Another thread than the worker's may wait for it."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots
        self._is_done = False

    def views(self, number: int) -> Views:
        """See VersionCopy. Waits for the copies. Raises DeviceError if one has failed."""
        self.end()
        return self._snapshots.views(number)

    def end(self) -> None:
        """See VersionCopy. Waits for the copies, once."""
        if not self._is_done:
            self._is_done = True
            self._snapshots.device.synchronize_event(self._snapshots.copied)
