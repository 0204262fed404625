"""A peer that holds up the others because it is stopped: by a signal, by a debugger, or with its container.

A lane that holds a shard lock, or has a part of a fold, works for all. It has stopped if what it works on has not changed
for a while and its process has used no processor time meanwhile. Then this lane passes it by: it takes over, and leaves
alone what the other may still write when it wakes. An error of judgement costs the other one fold, which is made again, and
no result.
"""

import logging
from collections.abc import Callable
from typing import NamedTuple

from fastps.errors import ArenaError
from fastps.job import limits
from fastps.kernels.protocol.lane import BUSY, Lane
from fastps.kernels.shm.arena import Arena
from fastps.membership.job_memory import JobMemory
from fastps.system import proc, shared_memory

logger = logging.getLogger("fastps.membership")


class _Look(NamedTuple):
    """Who a shard waits for and at what, since when, and what its process had used of the processor then."""

    holder: tuple[int, tuple[int, int]]
    since_ns: int
    used: str


def patience_ns(store: JobMemory) -> int:
    """How long a stopped peer is waited for, in ns; 0: for ever.

    Rows are folded in place, a device has its own order of work, an agent's fold is made on another arena, and no other lane
    has an optimizer that runs in Python.
    """
    layout = store.layout
    cannot = store.arena.n_tables or layout.owner_lanes or layout.has_no_state or layout.rule.runs_in_python
    return 0 if cannot else limits.stall_ns()


class Stalls:
    """What a lane of a job waits for, and since when it has not changed.

    `lane` waits, and combines. `stall_ns` is how long nothing may change; 0: nobody is passed by.
    """

    def __init__(self, lane: Lane, descriptor: int, stall_ns: int) -> None:
        self._lane = lane
        self._arena: Arena = lane.arena
        self._descriptor = descriptor  # the arena's memfd: the spare buffers get their pages when they are needed
        # The first look comes up to a slice after the stop, and the last one up to a slice after the time is over.
        self._patience_ns = max(stall_ns - 2 * limits.SLICE_NS, 1) if stall_ns else 0
        self._looks: dict[int, _Look] = {}  # by shard
        self._has_spare = False

    def check(self, now_ns: int, combined: Callable[[int], None]) -> None:
        """Pass by a peer that has stopped. `combined` gets the outcome of what this lane then combines."""
        if not self._patience_ns:
            return
        for shard, holder in enumerate(self._lane.holders()):
            look = self._looks.get(shard)
            if holder is None:
                self._looks.pop(shard, None)
            elif look is None or look.holder != holder:
                self._looks[shard] = _Look(holder, now_ns, self._processor_time(holder[0]))
            elif now_ns - look.since_ns >= self._patience_ns:
                used = self._processor_time(holder[0])
                self._looks[shard] = _Look(holder, now_ns, used)
                if used == look.used and used and self._reserve():
                    self._pass_by(holder[0], now_ns - look.since_ns, now_ns, combined)
            elif (
                not self._has_spare
                and now_ns - look.since_ns >= self._patience_ns // 2
                and "" != look.used == self._processor_time(holder[0])
            ):
                self._reserve()  # it is likely to be needed, and takes a while for a large model

    def _pass_by(self, peer: int, stood_ns: int, now_ns: int, combined: Callable[[int], None]) -> None:
        outcome = self._lane.pass_by(peer, now_ns)
        if outcome == BUSY:
            return
        self._looks.clear()
        name = "the server" if peer == self._arena.server_lane else f"worker {peer}"
        logger.warning(
            "%s (process %d) has stood still for %.1f s in the middle of a fold: the others go on without it, and it can go on"
            " when it wakes; look whether it is stopped, or has a core",
            name, self._arena.process_id(peer), (stood_ns + limits.SLICE_NS) / 1e9,
        )  # fmt: skip
        combined(outcome)

    def _processor_time(self, peer: int) -> str:
        """What changes while the peer's process runs; empty if that cannot be told: it may be in another PID namespace.

        The kernel counts this time in ticks of 10 ms or less. A process that is stopped uses none, whatever it has used before.
        """
        return proc.processor_time(self._arena.process_id(peer))

    def _reserve(self) -> bool:
        """Give the spare buffers pages, once. False if there is no memory for them: then the stopped peer is waited for."""
        if self._has_spare:
            return True
        try:
            for offset, length in self._arena.spare_ranges():
                shared_memory.allocate(self._descriptor, offset, length, "a spare buffer, to go on without a stopped worker,")
        except ArenaError as error:
            logger.warning("%s; the others wait for the stopped worker", error)
            self._patience_ns = 0
            return False
        self._has_spare = True
        return True
