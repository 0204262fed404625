"""Expected progress: how much a discipline's folded pushes move the training on, by their number and their staleness.

An update of c pushes takes the place of (c (1 + k s) + B) / (1 + B) updates of one fresh push in the number of samples that a
target needs: s is the mean staleness in versions, B the pushes whose noise is as large as their mean gradient, and k what
staleness costs more under momentum. The first two terms are those of the bounds for delayed gradients and for large batches;
B and k are fitted to a pilot (docs/experiments/advice-and-learning.md), and an interval says what other values would give.
"""

from collections.abc import Iterator
from typing import Any

Row = dict[str, Any]
NOISE_SAMPLES = 384.0  # B times the samples of a push
UNKNOWN_MOMENTUM, UNKNOWN_BATCH = 0.9, 16  # of a trace that does not say: of its optimizer, and the samples of a push
_NOISE_RANGE, _STALENESS_RANGE = 4.0, 2.0  # factors within which B and k are taken to lie


def staleness_cost(momentum: float, in_workers: bool) -> float:
    """k: staleness acts as momentum does, so the two together cost more; a worker's own momentum has no such part.

    >>> [round(staleness_cost(momentum, own), 2) for momentum, own in ((0, False), (0.9, False), (0.9, True))]
    [1.4, 3.02, 1.01]
    """
    return float(1.4 * (1.0 - min(momentum, 0.99)) ** (1 / 7 if in_workers else -1 / 3))


def progress(row: Row, batch: int, momentum: float, *, noise: float = 1.0, cost: float = 1.0) -> float:
    """The expected progress per second, in fresh pushes that are folded one by one. `noise` and `cost` multiply B and k.

    >>> fresh = {"sync": "asp", "useful_steps_per_s": 10.0, "updates_per_s": 10.0, "staleness_mean": 0.0}
    >>> progress(fresh, 32, 0.9), round(progress({**fresh, "staleness_mean": 13.0}, 32, 0.0), 1)
    (10.0, 4.2)
    """
    in_sum = row["useful_steps_per_s"] / max(row["updates_per_s"], 1e-9)
    ahead = 1 + cost * staleness_cost(momentum, ",momentum=worker" in row["sync"]) * row["staleness_mean"]
    pushes = noise * NOISE_SAMPLES / max(1, batch)
    return float(row["useful_steps_per_s"] * (1 + pushes) / (in_sum * ahead + pushes))


def gain_range(row: Row, own: Row, batch: int, momentum: float) -> tuple[float, float]:
    """The least and the most by which a row's progress exceeds another's, for the values of B and k that are plausible."""
    found = sorted(_gains(row, own, batch, momentum))
    return found[0], found[-1]


def _gains(row: Row, own: Row, batch: int, momentum: float) -> Iterator[float]:
    for noise in (1 / _NOISE_RANGE, 1.0, _NOISE_RANGE):
        for cost in (1 / _STALENESS_RANGE, 1.0, _STALENESS_RANGE):
            values = [progress(each, batch, momentum, noise=noise, cost=cost) for each in (row, own)]
            yield values[0] / max(values[1], 1e-9) - 1
