"""The cost of stragglers: how long a synchronous step waits for its last gradients, and how many backup workers that suggests.

It is section 3.1 of "Revisiting Distributed Synchronous SGD" (Chen et al.) as arithmetic: the time of the k-th arrival within a
version (its Figures 3 and 4), the iterations that N gradients a step need (Figure 5), and their product, the estimated time to
converge for each split of N + b workers (Figure 6). As in the paper, one shard represents all.

All functions are pure functions of a run's histograms. The estimate assumes that workers do not slow each other down: if they
share cores, the first gradients come early because the last workers still wait for a core.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fastps.errors import UsageError

Histogram = Sequence[tuple[int, int]]
"""(least time of the bucket in ns, count), least first; eight buckets an octave, as in the arena."""

Iterations = Callable[[int], float | None]
"""Iterations to converge when N gradients are aggregated; None if unknown."""

PAPER_EXPONENT = 0.85
"""Figure 5: 137.5e3 iterations with N = 50 and 76.2e3 with N = 100, so N^-0.85: ln(137.5 / 76.2) / ln 2 = 0.85."""


@dataclass(frozen=True)
class Arrival:
    """The time of a version's k-th gradient, from the version's beginning; k begins at 1."""

    k: int
    count: int
    mean_s: float
    median_s: float
    p80_s: float
    p95_s: float
    p99_s: float
    cdf: list[tuple[float, float]]


@dataclass(frozen=True)
class Split:
    """One way to use the workers: `waited_for` gradients are aggregated, those of the `backups` slowest are dropped.

    `time` is iteration_s x iterations: seconds if iterations are a count, otherwise only comparable with other splits.
    """

    waited_for: int
    backups: int
    iteration_s: float
    iterations: float
    time: float


def width_ns(least_ns: int) -> int:
    """Return the width in ns of the bucket that begins at `least_ns`.

    >>> [width_ns(least) for least in (0, 15, 16, 1_048_576)]
    [1, 1, 2, 131072]
    """
    return 1 << max(0, least_ns.bit_length() - 4)


def mean_s(histogram: Histogram) -> float:
    """Return the mean time in seconds, from the buckets' middles: the error is at most a sixteenth. 0 if empty.

    >>> mean_s([(10, 3), (14, 1)]) * 1e9
    11.0
    """
    count = sum(count for _, count in histogram)
    total = sum((least + (width_ns(least) - 1) / 2) * count for least, count in histogram)
    return total / count / 1e9 if count else 0.0


def quantile_s(histogram: Histogram, share: float) -> float:
    """Return the time in seconds by which `share` of all had come, with counts spread evenly in their bucket. 0 if empty.

    >>> quantile_s([(1_048_576, 10), (2_097_152, 10)], 0.75) * 1e9
    2228224.0
    """
    wanted = share * sum(count for _, count in histogram)
    before = 0
    for least, count in histogram:
        if count and before + count >= wanted:
            return (least + width_ns(least) * max(0.0, wanted - before) / count) / 1e9
        before += count
    return 0.0


def cdf(histogram: Histogram) -> list[tuple[float, float]]:
    """Return (seconds, share that had come by then) at the end of each bucket that is not empty.

    >>> cdf([(1_000_000_000, 3), (2_000_000_000, 1)])
    [(1.067108864, 0.75), (2.134217728, 1.0)]
    """
    total = sum(count for _, count in histogram)
    points, before = [], 0
    for least, count in histogram:
        before += count
        if count:
            points.append(((least + width_ns(least)) / 1e9, before / total))
    return points


def arrivals(arrivals_ns: Sequence[Histogram]) -> list[Arrival]:
    """Return a row for each k whose histogram is not empty.

    Raises UsageError if all are empty: the run was too short, or not synchronous.
    """
    rows = [
        Arrival(
            k=k,
            count=sum(count for _, count in histogram),
            mean_s=mean_s(histogram),
            median_s=quantile_s(histogram, 0.5),
            p80_s=quantile_s(histogram, 0.8),
            p95_s=quantile_s(histogram, 0.95),
            p99_s=quantile_s(histogram, 0.99),
            cdf=cdf(histogram),
        )
        for k, histogram in enumerate(arrivals_ns, 1)
        if any(count for _, count in histogram)
    ]
    if not rows:
        raise UsageError("expected the arrivals of a synchronous run, found none: train for longer, with bsp")
    return rows


def power_law(workers: int, exponent: float = PAPER_EXPONENT) -> Iterations:
    """Return iterations proportional to N^-exponent, relative to those of all `workers`; with 1, doubling N halves them.

    >>> round(power_law(100)(50), 2)
    1.8
    """
    return lambda waited_for: (waited_for / workers) ** -exponent


def interpolated(points: Sequence[tuple[int, float]]) -> Iterations:
    """Return measured iterations, interpolated linearly between some N as in the paper; None outside. Raises UsageError.

    >>> iterations = interpolated([(50, 137.5e3), (100, 76.2e3)])
    >>> iterations(75), iterations(49)
    (106850.0, None)
    """
    known = sorted(points)
    if not known or any(one[0] == next_[0] for one, next_ in pairwise(known)):
        raise UsageError(f"expected iterations for one or more different N, found {list(points)}")
    if any(waited_for < 1 or not 0 < iterations < float("inf") for waited_for, iterations in known):
        raise UsageError(f"expected every N from 1 and more than 0 iterations, found {list(points)}")

    def iterations(waited_for: int) -> float | None:
        for (left, at_left), (right, at_right) in pairwise(known):
            if left <= waited_for <= right:
                return at_left + (at_right - at_left) * (waited_for - left) / (right - left)
        return known[0][1] if waited_for == known[0][0] else None

    return iterations


def splits(rows: Sequence[Arrival], iterations: Iterations) -> list[Split]:
    """Return every split with known iterations, the best first; among equal ones, the one with fewer backups.

    >>> slow_last = arrivals([[(1_000, 9)], [(1_000, 9)], [(1_000, 9)], [(4_096, 9)]])
    >>> [(split.waited_for, split.backups) for split in splits(slow_last, power_law(4))]
    [(3, 1), (2, 2), (1, 3), (4, 0)]
    """
    workers = max(row.k for row in rows)
    found = [
        Split(row.k, workers - row.k, row.mean_s, needed, row.mean_s * needed)
        for row in rows
        if (needed := iterations(row.k)) is not None
    ]
    return sorted(found, key=lambda split: (split.time, split.backups))


def parse_points(text: str) -> list[tuple[int, float]]:
    """Read N:ITERATIONS,N:ITERATIONS. Raises UsageError.

    >>> parse_points("50:137.5e3,100:76200")
    [(50, 137500.0), (100, 76200.0)]
    """
    points = []
    for part in text.split(","):
        waited_for, _, iterations = part.partition(":")
        try:
            points.append((int(waited_for), float(iterations)))
        except ValueError:
            raise UsageError(f"--iterations: expected N:ITERATIONS,... such as 2:900,4:500, found {text!r}") from None
    return points
