"""The beginning of a launched job: workers that are lost while one alone is attached, or before they have attached.

The arena of a worker that is alone ends with it, and a replacement makes another. The launcher holds the arena's memory until a
second worker has attached, so that it can say what was lost. A job counts its workers from the start, and peers notice only the
death of an attached worker. The launcher reports the others.
"""

import contextlib
import logging
import os

from fastps.errors import ArenaError, AttachError
from fastps.job.layout import Description
from fastps.kernels.shm.arena import LANE_FREE, LANE_LEAVING, LANE_LEFT, Arena
from fastps.membership import discovery
from fastps.system.clock import Clock

logger = logging.getLogger("fastps.launch")

_ASK_S = 0.1
_LOOK_NS = 200_000_000  # between two searches for an arena
_GONE = (LANE_LEFT, LANE_LEAVING)


class Beginning:
    """The first arena of the launched `job`, until it has two workers, and the ranks whose lanes stay unclaimed in its arenas.

    `is_watched`: whether looks still wait for the first arena.
    """

    def __init__(self, job: str, clock: Clock) -> None:
        self._job = job
        self._clock = clock
        self._arena: Arena | None = None
        self._is_shared = self.is_watched = False
        self._missing: set[int] = set()
        self._told: dict[str, set[int]] = {}  # arena name to the ranks that it was told of
        self._told_ns = clock.now_ns()

    def tick(self) -> None:
        """Look for the first arena, and tell the arenas of the ranks that are missing."""
        self.check()
        if self._missing and self._clock.now_ns() - self._told_ns >= _LOOK_NS:
            self._told_ns = self._clock.now_ns()
            for name in discovery.arenas_of(self._job):
                missing = self._missing - self._told.get(name, set())
                if missing and self._tell(name, missing):
                    self._told[name] = set(self._missing)

    def check(self) -> None:
        """Find the arena, and forget its memory once two workers have attached."""
        if self._arena is None and not self._is_shared and (names := discovery.arenas_of(self._job)):
            with contextlib.suppress(AttachError, ArenaError):  # it has ended, or its workers say what is wrong
                self._arena = discovery.arena_of(names[0], _ASK_S, self._clock)
        if self._arena is not None and sum(state != LANE_FREE for state in self._arena.lane_states()) > 1:
            self._arena, self._is_shared = None, True
        self.is_watched = self._arena is None and not self._is_shared

    def is_over(self) -> bool:
        """Whether a replacement could not join: the job, which it would join first, has ended.

        One that a lost worker alone had begun has not.
        """
        if self._arena is not None:
            self.check()
        has_left = self._arena is not None and any(state in _GONE for state in self._arena.lane_states())
        running = discovery.instances_of(self._job)
        return 0 not in running and (self._is_shared or has_left or bool(running))

    def continues(self) -> bool:
        """Whether a running arena of the job goes on without a lost worker: the script's own on_worker_loss= says so."""
        for name in discovery.arenas_of(self._job):
            with contextlib.suppress(AttachError, ArenaError, ValueError):  # it has ended, or is of another fastps
                offer, text = discovery.find_described(name, _ASK_S, self._clock)
                with offer:
                    return Description.of(text).continues
        return False

    def replaced(self, rank: int) -> int | None:
        """If this worker's replacement begins the job anew, say so. Returns the number of lost steps; None: it is unknown."""
        if rank or discovery.arenas_of(self._job):
            return 0
        steps = int(self._arena.counters(0)["steps"]) if self._arena is not None else None
        lost = f"the {steps} steps that it had made" if steps is not None else "any steps that it had made"
        logger.warning("worker 0 ended before another one had attached: the job begins anew, and %s are lost", lost)
        self._arena, self._is_shared = None, False
        return steps

    def lose(self, rank: int) -> None:
        """Record that a worker failed and has no replacement."""
        self._missing.add(rank)

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
