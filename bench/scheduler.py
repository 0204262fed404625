"""Nanoseconds of one decision of the scheduler: a push comes in, what is folded and who may go on comes out.

A decision is the answer to one event: a push, or under r2sp and stagger a timer, which gives about two a push. Pushes arrive
in random order and are played by compiled code, so that no Python call is timed; choosing the next worker is in the time.
The scheduler is told of a push a few decisions before, as whoever has a queue of them can; among 100,000 workers a push that
nobody expected takes about three reads of main memory longer. Refuses to measure folds and to be a pass or a failure.
"""

from collections.abc import Callable

from fastps.bench.measure import BenchOptions, Row, Spread, check, interleaved, repeated
from fastps.job.specs import parse_policy
from fastps.kernels.baseline.scheduler_load import Arrivals
from fastps.kernels.scheduling.scheduler import Scheduler

SIZES = (16, 1_000, 100_000)
# What a decision may take, in ns, at so many workers and fewer.
BOUNDS_NS = {16: 100, 100_000: 300}
# Every discipline in each of its readings, and combinations of them.
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
    "ssp:3,pull=0.75",
    "dssp:3,15,scale=1/sigma",
    "softsync:1,stagger=0.8",
)


class Play:
    """One scheduler that is played."""

    def __init__(self, spec: str, workers: int) -> None:
        self.policy = parse_policy(spec)
        self.workers = workers
        self.scheduler = Scheduler(workers, **self.policy.values(workers))
        self.arrivals = Arrivals(self.scheduler)
        self.pushes = 0

    def run(self, times: int) -> None:
        """Play so many pushes."""
        self.arrivals.play(times)
        self.pushes += times

    def check(self) -> None:
        """Every push was some worker's, and folds are as many as the fold's kind makes of them."""
        clocks = sum(self.scheduler.clock(worker) for worker in range(self.workers))
        check(clocks == self.pushes, f"{self.pushes} pushes", clocks)
        needed = {"all": self.workers, "each": 1, "in-order": 1, "count": max(1, self.workers // max(1, self.policy.divisor))}
        fold = self.policy.fold
        if fold in needed:
            expected = self.pushes // needed[fold]
            slack = self.workers if self.policy.groups or fold == "in-order" else 0  # pushes that wait for others'
            check(abs(self.scheduler.version - expected) <= slack, f"{expected} folds under {fold}", self.scheduler.version)


def bound_ns(workers: int) -> int:
    """What a decision may take with so many workers, in ns.

    >>> bound_ns(16), bound_ns(17)
    (100, 300)
    """
    return next(bound for most, bound in BOUNDS_NS.items() if workers <= most)


def measure(options: BenchOptions) -> list[Row]:
    """A row a discipline and number of workers."""
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
    """Seconds of a decision, from seconds of a push and how many decisions there were."""
    seconds_per_push = repeated(play.run, repeat_s)

    def measure() -> float:
        pushes, decisions = play.pushes, play.arrivals.decisions
        seconds = seconds_per_push()
        return seconds * (play.pushes - pushes) / (play.arrivals.decisions - decisions)

    return measure


def _row(play: Play, spec: str, spread: Spread) -> Row:
    return {
        "bench": "scheduler",
        "name": spec,
        "size": play.workers,
        "backend": f"{play.policy.fold}/{play.policy.grant}",
        **spread.row(),
        "ns_per_op": spread.median * 1e9,
        "decisions_per_push": play.arrivals.decisions / play.pushes,
        "bound_ns": bound_ns(play.workers),
        "checked": True,
    }
