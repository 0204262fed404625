"""The first version of a job on devices, in host memory until the devices' memory exists: weights, optimizer state, average.

Store and checkpoint write it as they write an arena's first buffers. A server reads it in its own process: the memory is a
memfd that it inherits.
"""

import mmap
import os

import numpy as np
import numpy.typing as npt

from fastps.errors import ArenaError
from fastps.job.layout import Layout

Views = list[npt.NDArray[np.float32]]


class FirstVersion:
    """The first weights and optimizer-state tensors of a layout, as flat views of float32, one for each parameter."""

    def __init__(self, layout: Layout, *, is_resumed: bool, descriptor: int = -1) -> None:
        """Make the memory; with a `descriptor`, map what another process wrote. Raises ArenaError if there is too little."""
        size = max(mmap.PAGESIZE, 4 * layout.buffer_floats * (1 + layout.planes))
        self.descriptor = descriptor  # the memfd, until `close`
        try:
            if descriptor < 0:
                self.descriptor = os.memfd_create("fastps-first", os.MFD_CLOEXEC)
                os.ftruncate(self.descriptor, size)
            self._memory = mmap.mmap(self.descriptor, size)
        except (OSError, ValueError) as error:
            self.close()
            raise ArenaError(
                f"expected {size:,} bytes of host memory for the first weights, found too little: {error}"
            ) from error
        floats = np.frombuffer(self._memory, np.float32)
        first = [
            [floats[layout.buffer_floats * number + each.offset :][: each.length] for each in layout.parameters]
            for number in range(1 + layout.planes)
        ]
        self.weights, self.planes = first[0], first[1:]  # the last plane is the weights' average, if there is one
        self.is_resumed = is_resumed  # from a checkpoint
        initial = [layout.rule.initial_value(plane) for plane in range(len(layout.rule.planes))]
        begun = [*initial, *([1.0] if layout.policy.ema else [])]
        # The planes that are not all zeros.
        self.written = [plane for plane, value in enumerate(begun) if value or is_resumed]

    def close(self) -> None:
        """Close the descriptor. The views stay as long as they are used. May be called twice."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
