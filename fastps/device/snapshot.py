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


class Snapshots(VersionCopy):
    """One lane's copies, with their stream and memory. One at a time: the arena lets one worker at a time pin a version.

    Another thread than the worker's may wait for it.
    """

    def __init__(self, arena: DeviceArena, device: CudaDevice) -> None:
        self._arena = arena
        self.device = device
        self.stream: Any = device.make_stream()
        self.copied: Any = device.make_event()  # behind the copies
        floats = arena.layout.buffer_floats * (1 + arena.layout.planes)
        self._is_done = True
        self._floats = device.host_memory(4 * max(1, floats)).view(np.float32)

    def begin(self, weights: Sequence[int], state: Sequence[int]) -> VersionCopy:
        """Queue the copies of these buffers, one of weights and of state for each shard.

        Raises UnsupportedError without peer access to all homes.
        """
        arena, layout = self._arena, self._arena.layout
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
        self._is_done = False
        return self

    def views(self, number: int) -> Views:
        """Wait for the copies. Raises DeviceError if one has failed."""
        self.end()
        return [self._view(number, index) for index in range(len(self._arena.layout.parameters))]

    def end(self) -> None:
        if not self._is_done:
            self._is_done = True
            self.device.synchronize_event(self.copied)

    def _view(self, number: int, index: int) -> npt.NDArray[np.float32]:
        layout, parameter = self._arena.layout, self._arena.layout.parameters[index]
        return self._floats[layout.buffer_floats * number + parameter.offset :][: parameter.length]
