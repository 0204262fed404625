"""Marks of the parts of a push that are in the slot already, so that an agent sums them over the nodes during backward.

A part may be marked before its gradients are final: a script may scale, clip or accumulate after its hook has run. So
`announce` says before the push which marked parts count in another form, by the version counters of the gradients, and these
are summed again. A write through `.data`, which torch does not count, is not noticed.
"""

from typing import Any

import torch

from fastps.job.wire import sum_ranges
from fastps.store.lane_room import STALE_NULL, STALE_SCALED, STALE_WRITTEN, LaneRooms
from fastps.store.worker import Worker
from fastps.torch.gradients import Gradients


class EarlyMarks:
    """The marks of one worker, whose hooks put all gradients into one slot."""

    def __init__(self, worker: Worker, gradients: Gradients) -> None:
        self._lane, self._gradients, self._rank = worker.lane, gradients, worker.rank
        self._rooms = LaneRooms(worker.store, 0)
        layout = worker.store.layout
        width = layout.floats_each
        ranges = sum_ranges(layout.buffer_floats // width)
        places = [(each.offset // width, (each.offset + each.length) // width) for each in layout.parameters]
        self._parts = [
            [part for part, (first, last) in enumerate(ranges) if begin < last and end > first] for begin, end in places
        ]
        self._sizes = [sum(part in parts for parts in self._parts) for part in range(len(ranges))]
        self._posts = -1  # of the lane when the marks of the next push began
        self._missing: list[int] = []  # for each part, parameters whose gradients have not come
        self._versions: dict[int, int] = {}  # of the gradients that have come
        self._marked = 0
        self._said = 0

    @staticmethod
    def of(worker: Worker, gradients: Any) -> "EarlyMarks | None":
        """The marks of a worker of a replica; None where no agent reads them, or where each push is clipped."""
        layout = worker.store.layout
        keeps = type(gradients) is Gradients and gradients.keeps_slot and worker.store.arena.slots == 1
        return EarlyMarks(worker, gradients) if layout.server == "replica" and keeps and not layout.policy.clip else None

    def put(self, index: int, tensor: torch.Tensor) -> None:
        """A hook has put this parameter's gradient into the slot, or autograd has added to it there."""
        gradient = tensor.grad
        if gradient is None or self._gradients.accumulates:
            return
        if self._posts != self._lane.posts:
            self._posts, self._marked = self._lane.posts, 0
            self._missing, self._versions = list(self._sizes), {}
        is_new = index not in self._versions
        if is_new or self._parts[index][-1] >= self._marked:
            self._versions[index] = gradient._version
        if not is_new:
            return
        for part in self._parts[index]:
            self._missing[part] -= 1
        marked = self._marked
        while marked < len(self._missing) and not self._missing[marked]:
            marked += 1
        if marked > self._marked:
            self._marked = marked
            self._lane.mark(marked)

    def announce(self, slot: int, scale: float, *, is_null: bool) -> None:
        """Say which of the marked parts the next push, of this slot, has in another form than they had."""
        marked = self._marked if self._posts == self._lane.posts else 0
        stale = 0
        if marked and (is_null or scale != 1.0):
            stale = (1 << marked) - 1 | (STALE_NULL if is_null else STALE_SCALED)
        elif marked:
            views, tensors = self._gradients.slots[slot], self._gradients.tensors
            for index, version in self._versions.items():
                gradient = tensors[index].grad
                if gradient is not views[index] or gradient._version != version:
                    for part in self._parts[index]:
                        stale |= (1 << part) * (part < marked)
            stale |= STALE_WRITTEN * (stale > 0)
        if stale != self._said:
            self._rooms.set_stale(self._rank, stale)
            self._said = stale
