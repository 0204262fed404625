"""Nanoseconds of one decision of the scheduler: a push comes in, what is folded and who may go on comes out.

Events are played by compiled code, so that no Python call is timed; the time that read versions take is in it. Refuses to
measure folds, shared memory or commits.
"""

from collections.abc import Callable

import numpy as np

from fastps.bench.measure import BenchOptions, Row, Spread, check, interleaved, repeated
from fastps.kernels.scheduler import Scheduler
from fastps.specs import parse_policy

SIZES = (16, 1_000, 100_000)
# Every kind of fold and of grant, by the disciplines that have them.
SPECS = ("bsp", "asp", "ssp:3", "dssp:3,15", "backup:1", "psp:3,0.75", "softsync:1", "adv:1", "r2sp:0.8")


class Play:
    """One scheduler that is played."""

    def __init__(self, spec: str, workers: int) -> None:
        self.policy = parse_policy(spec)
        self.workers = workers
        self.scheduler = Scheduler(workers, **self.policy.values(workers))
        self.read_versions = np.zeros(workers, np.int64)
        self.events = 0

    def run(self, times: int) -> None:
        """Play so many events."""
        self.scheduler.play(times, self.read_versions)
        self.events += times

    def check(self) -> None:
        """Every event is one push of some worker, and folds are as many as the fold's kind makes of them."""
        clocks = sum(self.scheduler.clock(worker) for worker in range(self.workers))
        check(clocks == self.events, f"{self.events} pushes", clocks)
        needed = {"all": self.workers, "each": 1, "in-order": 1, "count": max(1, self.workers // max(1, self.policy.divisor))}
        fold = self.policy.fold
        if fold in needed:
            expected = self.events // needed[fold]
            slack = self.workers if self.policy.groups or fold == "in-order" else 0  # pushes that wait for others'
            check(abs(self.scheduler.version - expected) <= slack, f"{expected} folds under {fold}", self.scheduler.version)


def measure(options: BenchOptions) -> list[Row]:
    """A row a discipline and number of workers."""
    sizes = (16,) if options.smoke else SIZES
    return [row for size in sizes for row in _size_rows(size, options)]


def _size_rows(workers: int, options: BenchOptions) -> list[Row]:
    plays = {spec: Play(spec, workers) for spec in SPECS}
    for play in plays.values():
        play.run(3 * workers)
    sides: dict[str, Callable[[], float]] = {
        spec: repeated(play.run, min(options.repeat_s, 0.03)) for spec, play in plays.items()
    }
    spreads = interleaved(sides, options.repeats)
    for play in plays.values():
        play.check()
    return [_row(plays[spec], spec, spread) for spec, spread in spreads.items()]


def _row(play: Play, spec: str, spread: Spread) -> Row:
    return {
        "bench": "scheduler",
        "name": spec,
        "size": play.workers,
        "backend": f"{play.policy.fold}/{play.policy.grant}",
        **spread.row(),
        "ns_per_op": spread.median * 1e9,
        "checked": True,
    }
