"""Notices workers that all compute the same gradients, because a script seeds every process alike.

A worker that is about to push compares its gradient with those in the others' slots. Where all wait for the fold, the last of
them sees the others' gradients of the same step. Elsewhere only the first gradients can be equal, if they are still there.
"""

import logging

import numpy as np

from fastps.kernels.shm.arena import LANE_LIVE
from fastps.store.worker import Worker

logger = logging.getLogger("fastps.torch")

_STEPS = 8  # compared at the start: enough for one of a few workers to be the last one twice


class EqualGradients:
    """Compares one worker's first gradients with those of the others. `reads_slots`: whether the CPU can read the slots."""

    def __init__(self, worker: Worker, *, reads_slots: bool) -> None:
        self._worker = worker
        store = worker.store
        # Whether the next push is compared.
        self.is_on = reads_slots and store.layout.workers > 1 and not store.tables and not worker.generation
        self._found = 0
        # Under other disciplines the weights differ after the first fold, and so do the gradients.
        self._wanted, self._steps = (2, _STEPS) if worker.store.layout.policy.waits_for_fold else (1, 1)

    def compare(self, slot: int) -> None:
        """Compare what is in the slot, before its push. Warns once, if all others have the same bits there, which are not 0."""
        self.is_on = self.is_on and self._worker.own_steps < self._steps
        if not self.is_on:
            return
        store = self._worker.store
        states = store.arena.lane_states()[: store.layout.workers]
        if set(states) != {LANE_LIVE}:
            return
        frozen = store.frozen  # whose memory has no pages
        views = [store.gradient_views(lane, slot) for lane in range(len(states))]
        others = [[view for index, view in enumerate(each) if index not in frozen] for each in views]
        own = others.pop(self._worker.rank)
        are_equal = all(np.array_equal(*pair) for each in others for pair in zip(own, each, strict=True))
        if not are_equal or not any(view.any() for view in own):
            return
        self._found += 1
        if self._found == self._wanted:
            self.is_on = False
            logger.warning(
                "all %d workers push the same gradients, bit for bit: expected other samples on each worker; use"
                " fastps.shard(loader), or fastps.rank() in the seed of the data (docs/how-to/own-script.md#data)",
                len(states),
            )
