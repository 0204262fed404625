"""A model's buffers (BatchNorm's running statistics): published by each worker, averaged for evaluation.

One slot a lane in the arena; the caller holds the turn while it reads or writes them. Refuses to run during training steps:
running statistics are a worker's own until somebody evaluates.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastps.errors import UsageError

_VALID_BYTES = 64  # the first line of a slot: 1 when its worker has published


class ModelBuffers:
    """The buffers of a module, in the module's order; none when there is no module."""

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._given = model is not None
        self._buffers = dict(model.named_buffers()) if model is not None else {}

    @property
    def nbytes(self) -> int:
        """Bytes of a slot; 0 when there is nothing to publish."""
        total = sum(_aligned(buffer.nbytes) for buffer in self._buffers.values())
        return _VALID_BYTES + total if total else 0

    def publish(self, slot: npt.NDArray[np.uint8]) -> None:
        """Write all buffers into this worker's slot."""
        if not self._given:
            raise UsageError("average_buffers() needs the model: pass model= when wrapping the optimizer")
        if not self._buffers:
            return
        for buffer, view in zip(self._buffers.values(), self._views(slot), strict=True):
            view.copy_(buffer)
        slot[0] = 1

    def average(self, slots: list[npt.NDArray[np.uint8]]) -> None:
        """Give the module the average of the slots that were published.

        A variance is averaged by its moments about the common mean: mean(var + mean^2) - mean(mean)^2; a counter is the
        maximum; anything else is averaged as it is.
        """
        if not self._buffers:
            return
        published = [self._views(slot) for slot in slots if slot[0]]
        names = list(self._buffers)
        columns = {name: [views[index] for views in published] for index, name in enumerate(names)}
        for name, buffer in self._buffers.items():
            values = columns[name]
            mean_name = name.removesuffix("running_var") + "running_mean"
            if not buffer.is_floating_point():
                buffer.copy_(torch.stack(values).amax(0))
            elif name.endswith("running_var") and mean_name in columns:
                means = columns[mean_name]
                moments = torch.stack([value + mean**2 for value, mean in zip(values, means, strict=True)])
                buffer.copy_(moments.mean(0) - torch.stack(means).mean(0) ** 2)
            else:
                buffer.copy_(torch.stack(values).mean(0))

    def _views(self, slot: npt.NDArray[np.uint8]) -> list[torch.Tensor]:
        views: list[Any] = []
        offset = _VALID_BYTES
        for buffer in self._buffers.values():
            piece = torch.from_numpy(slot[offset : offset + buffer.nbytes])
            views.append(piece.view(buffer.dtype).view(buffer.shape))
            offset += _aligned(buffer.nbytes)
        return views


def _aligned(size: int) -> int:
    return -(-size // 64) * 64
