"""Gradients on devices whose shards are folded while backward goes on: each shard is marked once its last gradient is there.

Hooks of backward count a shard's gradients down. A mark is taken back where more work on these gradients was queued since: by
another backward, by a change that torch counts (clipping, unscaling), or by a copy of a gradient that was set by hand. The push
then marks the shard itself. A write that torch does not count, through `.data` or another library, is not noticed.
"""

from collections.abc import Sequence
from typing import Any

import torch

from fastps.device.arena import DeviceArena
from fastps.torch.gradients import CountedGradients, Gradients


class _Shard:
    """What hooks have seen of one shard: the gradients that this backward has not reached, and the streams of the others.

    `versions`: of the tensors over the slot when the shard was marked; None: it is not marked.
    """

    versions: list[int] | None

    def __init__(self, members: list[int]) -> None:
        self.members = members
        self.begin()

    def begin(self) -> None:
        self.missing = set(self.members)
        self.streams: set[int] = set()
        self.versions = None


class MarkedGradients(Gradients):
    """Gradients that mark the shards of an arena's next push, and are views of the slot. `shards`: of each parameter."""

    def __init__(self, arena: DeviceArena, shards: Sequence[int], *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._arena = arena
        self._shard_of = shards
        members = ([index for index, shard in enumerate(shards) if shard == number] for number in range(max(shards) + 1))
        self._shards = list(map(_Shard, members))

    def put(self, index: int, slot: int, tensor: torch.Tensor) -> bool:
        """Put the gradient into the slot, and mark its shard if it is the last. Where more is accumulated, mark nothing."""
        is_there = super().put(index, slot, tensor)
        if self.accumulates:
            self._forget_all()
        elif is_there and not self.is_apart:
            self._mark(index, self.slots[slot])
        return is_there

    def zero(self, set_to_none: bool) -> None:
        self._forget_all()
        super().zero(set_to_none)

    def collect(self, slot: int) -> bytes:
        """Collect, and take back the marks of shards in which a gradient has changed since."""
        presence = super().collect(slot)
        views = self.slots[slot]
        for number, shard in enumerate(self._shards):
            if shard.versions is not None and shard.versions != [views[member]._version for member in shard.members]:
                self._arena.forget(number)
        return presence

    def release(self, slot: int) -> None:
        self._forget_all()
        super().release(slot)

    def _mark(self, index: int, views: Sequence[torch.Tensor]) -> None:
        """A gradient is in the slot of which `views` are tensors, or work is queued on this thread's stream that puts it."""
        number = self._shard_of[index]
        shard = self._shards[number]
        if index not in shard.missing:
            self._arena.forget(number)
            shard.begin()
        shard.missing.discard(index)
        shard.streams.add(self._arena.compute_stream())
        if not shard.missing and len(shard.streams) == 1:
            shard.versions = [views[member]._version for member in shard.members]
            self._arena.mark_computed(number)

    def _forget_all(self) -> None:
        for number, shard in enumerate(self._shards):
            self._arena.forget(number)
            shard.begin()


class MarkedCountedGradients(MarkedGradients, CountedGradients):
    """Gradients that mark their shards, in slots that p.grad cannot be a view of."""
