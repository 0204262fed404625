"""What an attached lane shows: its counters, the weights that it pulled, and the slot of its next push."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from fastps.membership.job_memory import JobMemory
from fastps.store.waiting import TurnTaker

_MOST_NAMED = 256  # combinations of buffers whose views are kept


class LaneView(TurnTaker):
    """An attached lane as its own process sees it. `Worker` adds what changes it."""

    begun_at: int

    def __init__(self, store: JobMemory, rank: int) -> None:
        super().__init__(store, rank)
        self.buffers = [0] * self._shards
        self.closed = False
        self._left = False
        self._named_weights: dict[tuple[int, ...], Mapping[str, npt.NDArray[np.float32]]] = {}
        self._named_gradients: dict[int, Mapping[str, npt.NDArray[Any]]] = {}

    @property
    def steps(self) -> int:
        """Steps pushed so far."""
        return self.lane.steps

    @property
    def own_steps(self) -> int:
        """Steps that this worker itself has pushed."""
        return self.lane.steps - self.begun_at

    @property
    def slot(self) -> int:
        """The slot of the next push."""
        return self.lane.slot

    @property
    def posts(self) -> int:
        """Pushes and null pushes so far."""
        return self.lane.posts

    @property
    def loss(self) -> float:
        """What others shall see of the training; travels with the next push."""
        return self.lane.loss

    @loss.setter
    def loss(self, loss: float) -> None:
        self.lane.loss = loss

    @property
    def stale_blocks(self) -> int:
        """Shards that were not fresh when a step began."""
        return self.lane.stale_blocks

    @property
    def batch_size(self) -> int:
        """The batch that the last grant carried; 0: the worker's own choice."""
        return self.lane.batch()

    @property
    def version(self) -> int:
        """The version of the weights that were pulled last."""
        return self.lane.version

    @property
    def has_left(self) -> bool:
        """Whether this worker pushes no more."""
        return self._left or self.closed

    @property
    def push_folded(self) -> bool:
        """Whether every push of this worker is done with."""
        return self.lane.done() >= self.lane.posted()

    @property
    def weights(self) -> Mapping[str, npt.NDArray[np.float32]]:
        """Name to read-only array of the pulled weights; the arrays are those of one version until the next pull."""
        key = tuple(self.buffers)
        named = self._named_weights.get(key)
        if named is None:
            named = self._named(self.store.weight_views(key))
            for view in named.values():
                view.flags.writeable = False
            if len(self._named_weights) >= _MOST_NAMED:
                self._named_weights.clear()  # shards combine in many ways
            self._named_weights[key] = named
        return named

    @property
    def gradients(self) -> Mapping[str, npt.NDArray[Any]]:
        """Name to array in the slot of the next push. Their contents are what was left there: write all of them."""
        if self.slot not in self._named_gradients:
            self._named_gradients[self.slot] = self._named(self.store.gradient_views(self.rank, self.slot))
        return self._named_gradients[self.slot]

    def _named(self, views: Sequence[npt.NDArray[Any]]) -> Mapping[str, npt.NDArray[Any]]:
        pairs = zip(self.store.layout.parameters, views, strict=True)
        return MappingProxyType({parameter.name: view.reshape(parameter.shape) for parameter, view in pairs})
