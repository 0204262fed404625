"""The cores that a job's workers run on, and the settings that follow: spins of a wait, helpers of a fold, and their parts.

Workers may share cores, or have cores of their own (pinned by taskset, numactl or a launcher). Every lane records its cores in
the arena. fastps does not pin workers to cores, and does not count the cores of other jobs.
"""

import os

from fastps.job import limits
from fastps.job.layout import Layout
from fastps.kernels.protocol.wait import SHORT_WAIT, Wait
from fastps.kernels.shm.arena import Arena


class Cores:
    """The cores of one attached lane: records the process's own cores in the arena, and configures the lane for those of all.

    `takers`: the number of processes that combine or wait.
    """

    def __init__(self, arena: Arena, wait: Wait, layout: Layout, takers: int) -> None:
        self._arena, self._wait, self._layout, self.takers = arena, wait, layout, takers
        self._own = sorted(os.sched_getaffinity(0))
        self._count = self.spins = 0
        arena.set_cores(wait.lane.index, self._own[0], len(self._own))
        self.check()

    def share_among(self, takers: int) -> None:
        """Set the number of processes that combine or wait."""
        self.takers, self._count = takers, 0
        self.check()

    def check(self) -> None:
        """Count the cores again, because workers may have joined or left."""
        # Bound the count from shared memory: at least this process's cores, at most the machine's.
        count = min(max(self._arena.cores(), len(self._own)), max(os.cpu_count() or 1, len(self._own)))
        if count == self._count:
            return
        self._count = count
        self.spins = self._wait.spins = spins(self.takers, count)
        self._wait.short_wait_ns = SHORT_WAIT * max(1, self.takers // count)
        if not self._layout.policy.overlap:
            others = helpers(self.takers, count)
            self._wait.lane.share_folds(others, parts(self.takers, count, self._own))
            self._wait.lane.stream_folds(limits.streams(self._layout, others))


def spins(takers: int, cores: int) -> int:
    """The polls of a wait before it sleeps: none if the processes outnumber the cores."""
    return limits.SPINS if takers <= cores else 0


def helpers(takers: int, cores: int) -> int:
    """The most helpers that a combiner may wake for a fold: one for each core other than its own."""
    return min(takers, cores) - 1


def parts(takers: int, cores: int, own: list[int]) -> bytes:
    """A table from a core's number to the part of a shared fold with which a worker there begins. Empty: one part per lane.

    The OS moves workers from core to core if they outnumber the cores and may run on all of them. The cache that holds a part
    from the last fold belongs to the core, so the core selects the part.

    >>> parts(4, 2, [1, 3])
    b'\\x00\\x00\\x00\\x01'
    """
    if takers < cores or len(own) < cores:
        return b""
    table = bytearray(own[-1] + 1)
    for part, core in enumerate(own):
        table[core] = min(part, 255)
    return bytes(table)
