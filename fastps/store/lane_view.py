"""The read side of an attached lane: its counters, the pulled weights, and the slot of the next push."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy.typing as npt

from fastps.membership.job_memory import JobMemory
from fastps.store.waiting import LaneWaiter

_MOST_NAMED = 256  # combinations of buffers whose views are cached


class LaneView(LaneWaiter):
    """An attached lane, as its own process reads it. `Worker` adds the methods that change it."""

    begun_at: int

    def __init__(self, store: JobMemory, rank: int) -> None:
        super().__init__(store, rank)
        self.buffers = [0] * self._shards
        self.closed = False
        self._left = False
        self._named_weights: dict[tuple[int, ...], Mapping[str, npt.NDArray[Any]]] = {}
        self._named_gradients: dict[int, Mapping[str, npt.NDArray[Any]]] = {}

    @property
    def steps(self) -> int:
        """The number of steps pushed so far, as the scheduler counts them."""
        return self.lane.steps

    @property
    def own_steps(self) -> int:
        """The number of steps that this worker has pushed itself."""
        return self.lane.steps - self.begun_at

    @property
    def slot(self) -> int:
        """The slot of the next push."""
        return self.lane.slot

    @property
    def posts(self) -> int:
        """The number of pushes and null pushes so far."""
        return self.lane.posts

    @property
    def loss(self) -> float:
        """The training loss that observers see. It is sent with the next push."""
        return self.lane.loss

    @loss.setter
    def loss(self, loss: float) -> None:
        self.lane.loss = loss

    @property
    def stale_blocks(self) -> int:
        """The number of shards that were not fresh when a step began, summed over all steps."""
        return self.lane.stale_blocks

    @property
    def batch_size(self) -> int:
        """The batch size that the last grant carried; 0: the worker chooses."""
        return self.lane.batch()

    @property
    def version(self) -> int:
        """The version of the last pull."""
        return self.lane.version

    @property
    def has_left(self) -> bool:
        """Whether this worker has left or is closed, and so makes no more pushes."""
        return self._left or self.closed

    @property
    def push_folded(self) -> bool:
        """Whether every push of this worker has been folded, dropped or rejected."""
        return self.lane.done() >= self.lane.posted()

    @property
    def weights(self) -> Mapping[str, npt.NDArray[Any]]:
        """Name to read-only array of the pulled weights. The contents do not change before the next pull."""
        key = tuple(self.buffers)
        named = self._named_weights.get(key)
        if named is None:
            named = self._named(self.store.weight_views(key))
            for view in named.values():
                view.flags.writeable = False
            if len(self._named_weights) >= _MOST_NAMED:
                self._named_weights.clear()  # the shards' buffers combine in many ways
            self._named_weights[key] = named
        return named

    @property
    def gradients(self) -> Mapping[str, npt.NDArray[Any]]:
        """Name to array in the slot of the next push, without tables. The slot holds old contents: write every array."""
        if self.slot not in self._named_gradients:
            named = zip(self.store.layout.parameters, self.store.gradient_views(self.rank, self.slot), strict=True)
            self._named_gradients[self.slot] = MappingProxyType(
                {parameter.name: view.reshape(parameter.shape) for parameter, view in named if not parameter.is_table}
            )
        return self._named_gradients[self.slot]

    def _named(self, views: Sequence[npt.NDArray[Any]]) -> Mapping[str, npt.NDArray[Any]]:
        pairs = zip(self.store.layout.parameters, views, strict=True)
        return MappingProxyType({parameter.name: view.reshape(parameter.shape) for parameter, view in pairs})
