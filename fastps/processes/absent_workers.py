"""Workers that failed before they attached, and will not come: their launcher tells the job, so that nobody waits for them.

A job counts its workers from the beginning, and its peers find out only about those who were there. Refuses to know why a
worker failed, and to tell of one that has attached: the others see to that (membership.py).
"""

import logging
import os

from fastps.errors import ArenaError, AttachError
from fastps.kernels.shm.arena import LANE_FREE, Arena
from fastps.membership import discovery
from fastps.system import shared_memory
from fastps.system.clock import Clock

logger = logging.getLogger("fastps.launch")

_LOOK_NS = 200_000_000  # between two looks for an arena
_ASK_S = 0.1


class NoShows:
    """The ranks of the launched `job` whose lanes nobody will claim, in this arena of it or the next."""

    def __init__(self, job: str, clock: Clock) -> None:
        self._job = job
        self._clock = clock
        self._ranks: set[int] = set()
        self._told: dict[str, set[int]] = {}  # by the arena's name
        self._looked_ns = clock.now_ns()

    def add(self, rank: int) -> None:
        """That worker has failed, and nobody comes in its place."""
        self._ranks.add(rank)

    def tick(self) -> None:
        """Tell every arena of the job that is there now and does not know yet."""
        now_ns = self._clock.now_ns()
        if not self._ranks or now_ns - self._looked_ns < _LOOK_NS:
            return
        self._looked_ns = now_ns
        for name in discovery.arenas_of(self._job):
            missing = self._ranks - self._told.get(name, set())
            if missing and self._tell(name, missing):
                self._told[name] = set(self._ranks)

    def _tell(self, name: str, ranks: set[int]) -> bool:
        """Count these out in one arena; False where it did not answer."""
        try:
            answer = discovery.find(name, None, _ASK_S, self._clock)
        except AttachError:
            return False
        os.close(answer.pidfd)
        try:
            arena = Arena(shared_memory.map_shared(answer.memfd))
        except (ValueError, ArenaError):
            return True  # not one that this fastps can read: its workers will say so
        finally:
            os.close(answer.memfd)
        for rank in sorted(ranks):
            if rank < arena.lanes and arena.lane_state(rank) == LANE_FREE:
                # From the claim on, a peer would find that nobody answers there, should this process end just now.
                generation = arena.claim(rank, os.getpid())
                if generation >= 0 and arena.mark_dead(rank, generation):
                    logger.warning("worker %d failed before it attached to job %s, which goes on without it", rank, name)
        return True
