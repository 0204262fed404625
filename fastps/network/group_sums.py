"""The sums of a replica over the group of all nodes: begun by parts, some during backward, and awaited in their order.

All nodes begin the sums of a version's parts in one order, each as soon as it can. A sum that was begun during backward may be
of gradients that the script has changed since. Each node says so in its row, and all make these sums again behind the others.
So the result does not depend on when a sum was begun.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch.distributed import Work

from fastps.job.nodes import Nodes
from fastps.job.wire import CHUNK_BYTES, sum_ranges
from fastps.kernels.protocol.lane import Lane
from fastps.kernels.shm.arena import LANE_FREE, LANE_JOINING, LANE_LIVE
from fastps.membership.job_memory import JobMemory
from fastps.network.group import Group, GroupLostError, Groups
from fastps.network.leaf import Upstream
from fastps.network.replica_state import LocalPush, ReplicaMemory
from fastps.network.rows import MOST_PARTS, Row
from fastps.store.lane_room import STALE_NULL, STALE_OTHERS, STALE_SCALED, STALE_WRITTEN, LaneRooms

logger = logging.getLogger("fastps.network")
_MOST_STALE = 3
_WHY_STALE = {
    STALE_WRITTEN: "were written after it (clipped, unscaled, or accumulated outside no_sync())",
    STALE_SCALED: "were scaled",
    STALE_NULL: "were skipped",
    STALE_OTHERS: "came from other workers than before",
}
_PATIENCE = 4.0  # a sum may take so many node timeouts for each chunk, once the rows have come
Rows = Mapping[int, Row]


class GroupSums:
    """The sums of one replica. `upstream` says which nodes are lost."""

    def __init__(
        self, store: JobMemory, nodes: Nodes, groups: Groups, memory: ReplicaMemory, rooms: LaneRooms, upstream: Upstream
    ) -> None:
        self._store, self._nodes, self._groups, self._memory = store, nodes, groups, memory
        self._rooms, self._upstream = rooms, upstream
        self._parts = sum_ranges(memory.numbers)
        self._works: list[Work | None] = []  # the sums under way, of the first parts
        self._early: tuple[list[LocalPush], int] = ([], 0)  # of what, and how many sums were begun during backward
        self._stale_versions = 0  # of which sums that were begun during backward were made again
        self._losses = 0  # how many nodes were lost when the group was formed
        self._lanes = [Lane(store.arena, lane) for lane in range(store.layout.lanes)]

    @property
    def group_nonce(self) -> int:
        """The number that names the present group; 0 without one."""
        return self._groups.nonce

    @property
    def begun(self) -> int:
        """How many sums are under way."""
        return len(self._works)

    def begin(self, pushes: Sequence[LocalPush]) -> None:
        """Begin the sums of the parts whose sums are not under way, if there is a group. Raises GroupLostError."""
        group = self._groups.now
        if group is None:
            return
        for first, last in self._parts[len(self._works) :]:
            self._works.append(group.all_reduce(self._memory.add(pushes, first, last)))

    def begin_early(self) -> None:
        """Begin the sums of the parts that all live workers have marked during backward, in their order."""
        group, states = self._groups.now, self._store.arena.lane_states()
        if group is None or self._store.arena.slots > 1:
            return
        if self._stale_versions >= _MOST_STALE or LANE_FREE in states[: self._store.layout.workers]:
            return
        live = [lane for lane in self._lanes if states[lane.index] in (LANE_LIVE, LANE_JOINING)]
        marked = min((lane.marked() for lane in live), default=0)
        if marked <= len(self._works):
            return
        present = np.ones(len(self._store.layout.parameters), np.bool_)
        pushes = [LocalPush(lane.index, 0, 1.0, present) for lane in live]
        if self._works and [push.lane for push in self._early[0]] != [push.lane for push in pushes]:
            return
        for first, last in self._parts[len(self._works) : marked]:
            self._works.append(group.all_reduce(self._memory.add(pushes, first, last)))
        self._early = pushes, len(self._works)

    def stale(self, pushes: Sequence[LocalPush]) -> int:
        """The parts whose sums were begun during backward in another form than they count, a bit each, and why."""
        early, count = self._early
        every = (1 << count) - 1
        if not count:
            return 0
        if [push.lane for push in early] != [push.lane for push in pushes]:
            return every | STALE_OTHERS
        if any(push.scale != 1.0 for push in pushes):
            return every | STALE_SCALED
        said = 0
        for push in pushes:
            said |= self._rooms.stale(push.lane)
        return said & (every | ~((1 << MOST_PARTS) - 1)) if said & every else 0

    def stale_of(self, rows: Rows) -> int:
        """The parts that are summed again. After three versions with such parts no sum begins during backward any more."""
        stale = 0
        for row in rows.values():
            stale |= row.stale
        if stale and self._stale_versions < _MOST_STALE:
            self._stale_versions += 1
            if self._stale_versions == _MOST_STALE:
                why = next(text for bit, text in _WHY_STALE.items() if stale & bit)
                logger.warning(
                    "node %d: sums no longer begin during backward, because gradients of the last step %s; each step that is"
                    " alike is summed after backward",
                    self._nodes.number, why,
                )  # fmt: skip
        return stale & ((1 << MOST_PARTS) - 1)

    def arrive(self, group: Group, pushes: Sequence[LocalPush], stale: int) -> Iterator[tuple[int, int]]:
        """Wait for the sum of each part in turn; its range. Those that are stale are made again, behind the others."""
        again = []
        for number, (first, last) in enumerate(self._parts):
            group.wait(self._works[number], self._limit_s(self._memory.sums[first:last]), self._look)
            if stale >> number & 1:
                again.append((first, last))
            else:
                yield first, last
        self._works, self._early = [], ([], 0)
        for first, last in again:
            self._works.append(group.all_reduce(self._memory.add(pushes, first, last)))
        for work, (first, last) in zip(self._works, again, strict=True):
            group.wait(work, self._limit_s(self._memory.sums[first:last]), self._look)
            yield first, last
        self._works = []

    def group_of(self, rows: Rows) -> Group:
        """The group of the nodes that take part: the present one, if all are in it. Raises GroupLostError."""
        now, members = self._groups.now, tuple(sorted(rows))
        if now is not None and now.members == members:
            is_of_these = now.nonce == rows[members[0]].nonce
            if is_of_these or all(row.group == now.nonce for row in rows.values()):
                return now
        return self.form_group(rows)

    def form_group(self, rows: Rows) -> Group:
        """Form another group of the nodes that take part. Raises GroupLostError."""
        self.lose_group()
        members, policy = tuple(sorted(rows)), self._nodes.policy
        self._losses = self._upstream.losses
        return self._groups.form(members, rows[members[0]].nonce, policy.timeout_s, self._store.timeout_s)

    def lose_group(self) -> None:
        """Give the group up, and what is under way."""
        if self._works:
            self._early = [], 0
            self._works, self._memory.sums = [], torch.zeros_like(self._memory.sums)  # a sum may still write the other
        self._groups.lose()

    def gather(self, rows: Rows, sizes: Mapping[int, int], own: bytes, *, are_over: bool = False) -> dict[int, bytes]:
        """A block of each node, of these sizes. Raises GroupLostError.

        `are_over`: whether the sums that nodes had begun are over. Else those that not all have begun would keep the group.
        """
        has_begun = not are_over and any(row.begun for row in rows.values())
        group, number = self.form_group(rows) if has_begun else self.group_of(rows), self._nodes.number
        blocks = {node: torch.zeros(size, dtype=torch.uint8) for node, size in sizes.items() if size}
        if number in blocks:
            blocks[number].numpy()[:] = np.frombuffer(own, np.uint8)[: sizes[number]]
        self.broadcast(group, [(block, node) for node, block in sorted(blocks.items())])
        return {node: block.numpy().tobytes() for node, block in blocks.items()}

    def broadcast(self, group: Group, tensors: Sequence[tuple[torch.Tensor, int]]) -> None:
        """Copy each tensor of a node into those of the others. Raises GroupLostError."""
        limit_s = sum(self._limit_s(tensor) for tensor, _ in tensors)
        for work in [group.broadcast(tensor, source) for tensor, source in tensors]:
            group.wait(work, limit_s, self._look)

    def _limit_s(self, tensor: torch.Tensor) -> float:
        return _PATIENCE * self._nodes.policy.timeout_s * max(1.0, tensor.nbytes / CHUNK_BYTES)

    def _look(self) -> None:
        """Raise what ends the wait for a sum."""
        self._upstream.check()
        if self._upstream.losses != self._losses:
            raise GroupLostError("a node was lost")
