"""Workers that failed before they attached: their launcher tells the job, so that no worker waits for them.

A job counts its workers from the start, and peers notice only the death of an attached worker. The launcher reports the others.
"""

import logging
import os

from fastps.errors import ArenaError, AttachError
from fastps.kernels.shm.arena import LANE_FREE
from fastps.membership import discovery
from fastps.system.clock import Clock

logger = logging.getLogger("fastps.launch")

_LOOK_NS = 200_000_000  # between two searches for an arena
_ASK_S = 0.1


class NoShows:
    """The ranks of the launched `job` whose lanes stay unclaimed, in its arenas."""

    def __init__(self, job: str, clock: Clock) -> None:
        self._job = job
        self._clock = clock
        self._ranks: set[int] = set()
        self._told: dict[str, set[int]] = {}  # arena name to the ranks that it was told of
        self._looked_ns = clock.now_ns()

    def add(self, rank: int) -> None:
        """Record that a worker failed and has no replacement."""
        self._ranks.add(rank)

    def tick(self) -> None:
        """Tell every existing arena of the job that does not know yet."""
        now_ns = self._clock.now_ns()
        if not self._ranks or now_ns - self._looked_ns < _LOOK_NS:
            return
        self._looked_ns = now_ns
        for name in discovery.arenas_of(self._job):
            missing = self._ranks - self._told.get(name, set())
            if missing and self._tell(name, missing):
                self._told[name] = set(self._ranks)

    def _tell(self, name: str, ranks: set[int]) -> bool:
        """Mark these ranks as failed in one arena. Returns False if the arena did not answer."""
        try:
            arena = discovery.arena_of(name, _ASK_S, self._clock, writable=True)
        except AttachError:
            return False
        except ArenaError:
            return True  # the arena has another format, which its workers report
        for rank in sorted(ranks):
            if rank < arena.lanes and arena.lane_state(rank) == LANE_FREE:
                # If this process ends after the claim, peers find no listener at the lane and mark it dead.
                generation = arena.claim(rank, os.getpid())
                if generation >= 0 and arena.mark_dead(rank, generation):
                    logger.warning("worker %d failed before it attached to job %s, which goes on without it", rank, name)
        return True
