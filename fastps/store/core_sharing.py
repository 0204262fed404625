"""The cores that a job's workers run on, and what follows: who spins while it waits, who helps with a fold, who begins where.

Workers may share their cores, or have some each (pinned by taskset, numactl or a launcher): every lane says in the arena which
are its own. Refuses to choose cores for anyone, and to count those of other jobs.
"""

import os

from fastps.job import limits as config
from fastps.job.layout import Layout
from fastps.kernels.protocol.lane import Lane
from fastps.kernels.shm.arena import Arena


class Cores:
    """Of one attached lane of `arena`: says which are its process' own, and tells the lane what follows from all of them.

    `takers`: how many processes take turns, or wait for them. `spins` is how often a wait looks before it sleeps.
    `last_wait_ns`: how long the owner's last wait took, which it says; the next is taken to be as long.
    """

    last_wait_ns = 0

    def __init__(self, arena: Arena, lane: Lane, layout: Layout, takers: int) -> None:
        self._arena, self._lane, self._layout, self.takers = arena, lane, layout, takers
        self._own = sorted(os.sched_getaffinity(0))
        self._count = self.spins = 0
        arena.set_cores(lane.index, self._own[0], len(self._own))
        self.look()

    @property
    def yields(self) -> bool:
        """Whether the next wait lets others have the core before it sleeps: they are more than the cores, and it may be short.

        To sleep and be woken costs more than some steps take. Where others compute for long, sleep leaves them alone.
        """
        return not self.spins and self.last_wait_ns < config.SHORT_WAIT_NS

    def share_among(self, takers: int) -> None:
        """Say that `takers` are now so many."""
        self.takers, self._count = takers, 0
        self.look()

    def look(self) -> None:
        """Count again, for others may have come or left."""
        # What others wrote is bounded: there are no fewer than one's own, and no more than the machine has.
        count = min(max(self._arena.cores(), len(self._own)), max(os.cpu_count() or 1, len(self._own)))
        if count == self._count:
            return
        self._count = count
        self.spins = spins(self.takers, count)
        if not self._layout.policy.overlap:
            others = helpers(self.takers, count)
            self._lane.share_folds(others, parts(self.takers, count, self._own))
            self._lane.stream_folds(config.streams(self._layout, others))


def spins(takers: int, cores: int) -> int:
    """How often a wait looks before it sleeps: not at all when those who wait outnumber the cores."""
    return config.SPINS if takers <= cores else 0


def helpers(takers: int, cores: int) -> int:
    """How many may be woken to help with a fold: as many as there are cores beside the folder's own."""
    return min(takers, cores) - 1


def parts(takers: int, cores: int, own: list[int]) -> bytes:
    """For each core by its number, which part of a shared fold a worker there begins with; empty: a part a lane.

    Workers that outnumber the cores and may run on all of them are moved from one to another, and what the last fold left in a
    cache is the core's.

    >>> parts(4, 2, [1, 3])
    b'\\x00\\x00\\x00\\x01'
    """
    if takers < cores or len(own) < cores:
        return b""
    table = bytearray(own[-1] + 1)
    for part, core in enumerate(own):
        table[core] = min(part, 255)
    return bytes(table)
