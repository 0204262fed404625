"""The jobs of a process beside the one whose end it waits for: they combine meanwhile, and are left if nobody would go on.

A script ends its optimizers one after the other. Where loops are of unequal length, others may still wait in the second job for
a push of a process that waits for them in the first.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fastps.kernels.protocol.wait import Wait
from fastps.kernels.shm.arena import LANE_LIVE
from fastps.membership.membership import waiting
from fastps.store.attached_lane import AttachedLane

_PAUSE_NS = 5_000_000
_STUCK_NS = 300_000_000


class Elsewhere(NamedTuple):
    """Another job of this process, and the call by which the process leaves that job for good."""

    worker: AttachedLane
    leave: Callable[[], None]


class Standstill:
    """Notices that nobody moves while `worker`, which is in the jobs `elsewhere`, too, waits until all have left its job."""

    def __init__(self, worker: AttachedLane, elsewhere: Sequence[Elsewhere]) -> None:
        self._arena, self._clock, self._elsewhere = worker.store.arena, worker.store.clock, elsewhere
        self._seen: Any = None  # where the workers waited at the last look
        self._since_ns = 0

    def beside(self) -> list[tuple[AttachedLane, Wait]]:
        """The waits that let the other jobs' lanes combine meanwhile."""
        waits = [(each.worker, Wait(each.worker.lane)) for each in self._elsewhere]
        for _, wait in waits:
            wait.begin_own(_PAUSE_NS, self._clock.now_ns(), combines=True)
        return waits

    def leave_if_stuck(self) -> None:
        """Leave the other jobs if all that have not left this one wait, some of them there, and have not moved for a while."""
        if not self._elsewhere:
            return
        arena, now_ns = self._arena, self._clock.now_ns()
        here = {arena.process_id(lane) for lane, state in enumerate(arena.lane_states()[: arena.lanes]) if state == LANE_LIVE}
        there = {process: made for each in self._elsewhere for process, made in waiting(each.worker.store.arena).items()}
        found = there, waiting(arena)
        if found != self._seen or not here <= there.keys() | found[1].keys() or here.isdisjoint(there):
            self._seen, self._since_ns = found, now_ns
        elif now_ns - self._since_ns > _STUCK_NS:
            for each in self._elsewhere:
                each.leave()
