"""Nanoseconds of one decision of the scheduler: the input is a push, the output its folds and the workers that may continue.

A decision answers one event: a push, or under r2sp and stagger a timer, which makes about two decisions a push. Compiled code
plays pushes in random order, so that no Python call is timed; choosing the next worker is part of the time. Among 100,000
workers most of it is waiting for main memory. Folds are not measured.
"""

from collections.abc import Callable

from fastps.bench.measure import BenchOptions, Row, Spread, check, interleaved, repeated
from fastps.job.specs import parse_policy
from fastps.kernels.baseline.scheduler_load import SchedulerLoad
from fastps.kernels.scheduling.scheduler import Scheduler

SIZES = (16, 1_000, 100_000)
# Bound of a decision in ns, for up to so many workers.
BOUNDS_NS = {16: 100, 100_000: 300}
# Every discipline in each of its variants, and combinations of them.
SPECS = (
    "bsp",
    "asp",
    "ssp:3",
    "dssp:3,15",
    "dssp:3,15,release=printed",
    "dssp:3,15,hard_bound=true",
    "backup:1",
    "psp:3,0.75",
    "hardsync:128",
    "softsync:1",
    "adv:1",
    "adv*:1",
    "r2sp:0.8",
    "r2sp:0.8,tune=true",
    "backup:1,pull=0.75",
    "dssp:3,15,scale=1/sigma",
    "softsync:1,stagger=0.8",
)


class Play:
    """One scheduler under load."""

    def __init__(self, spec: str, workers: int) -> None:
        self.policy = parse_policy(spec)
        self.workers = workers
        self.scheduler = Scheduler(workers, **self.policy.values(workers))
        self.load = SchedulerLoad(self.scheduler)
        self.pushes = 0

    def run(self, times: int) -> None:
        """Play pushes."""
        self.load.play(times)
        self.pushes += times

    def check(self) -> None:
        """Check that every push counts for a worker, and that the number of folds fits the kind of fold."""
        clocks = sum(self.scheduler.clock(worker) for worker in range(self.workers))
        check(clocks == self.pushes, f"{self.pushes} pushes", clocks)
        needed = {"all": self.workers, "each": 1, "in-order": 1, "count": max(1, self.workers // max(1, self.policy.divisor))}
        fold = self.policy.fold
        if fold in needed:
            expected = self.pushes // needed[fold]
            slack = self.workers if self.policy.groups or fold == "in-order" else 0  # pushes that wait for other pushes
            check(abs(self.scheduler.version - expected) <= slack, f"{expected} folds under {fold}", self.scheduler.version)


def bound_ns(workers: int) -> int:
    """Return the bound of a decision with this many workers, in ns.

    >>> bound_ns(16), bound_ns(17)
    (100, 300)
    """
    return next(bound for most, bound in BOUNDS_NS.items() if workers <= most)


def measure(options: BenchOptions) -> list[Row]:
    """Return a row for each discipline and number of workers."""
    sizes = (16,) if options.smoke else SIZES
    return [row for size in sizes for row in _size_rows(size, options)]


def _size_rows(workers: int, options: BenchOptions) -> list[Row]:
    plays = {spec: Play(spec, workers) for spec in SPECS}
    for play in plays.values():
        play.run(3 * workers)
    spreads = interleaved({spec: _side(play, options.repeat_s) for spec, play in plays.items()}, options.repeats)
    for play in plays.values():
        play.check()
    return [_row(plays[spec], spec, spread) for spec, spread in spreads.items()]


def _side(play: Play, repeat_s: float) -> Callable[[], float]:
    """Return a function for the seconds of a decision, from the seconds of a push and the number of decisions."""
    seconds_per_push = repeated(play.run, repeat_s)

    def measure() -> float:
        pushes, decisions = play.pushes, play.load.decisions
        seconds = seconds_per_push()
        return seconds * (play.pushes - pushes) / (play.load.decisions - decisions)

    return measure


def _row(play: Play, spec: str, spread: Spread) -> Row:
    return {
        "bench": "scheduler",
        "name": spec,
        "size": play.workers,
        "backend": f"{play.policy.fold}/{play.policy.grant}",
        **spread.row(),
        "ns_per_op": spread.median * 1e9,
        "decisions_per_push": play.load.decisions / play.pushes,
        "bound_ns": bound_ns(play.workers),
        "checked": True,
    }
