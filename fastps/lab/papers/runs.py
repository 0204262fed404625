"""Helpers shared by the papers' rows: simulations by spec, and training with real gradients in virtual time over a few seeds.

torch and the images are loaded only when a row needs them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fastps.job.policy import Policy
from fastps.job.specs import parse_policy
from fastps.simulation.simulate import ComputeModel, Simulation, simulate

if TYPE_CHECKING:
    from fastps.lab.demo.data import Dataset

Found = dict[str, Any]

MS = 1_000_000
SECOND = 1_000_000_000


def lognormal(median_ns: float, sigma: float, **options: Any) -> ComputeModel:
    """Return lognormal compute times of this median; sigma is the standard deviation of their logarithm."""
    return ComputeModel("lognormal", median_ns, sigma, **options)


def play(sync: str | Policy, simulation: Simulation) -> Found:
    """Return the row of one simulation."""
    return simulate(sync if isinstance(sync, Policy) else parse_policy(sync), simulation).row


@cache
def images(name: str) -> "Dataset":
    """Load a data set once: one of fastps train's, or the "harder" task."""
    from fastps.lab.demo.data import load
    from fastps.lab.papers.harder import harder

    return harder() if name == "harder" else load(name)


def learn(sync: str, simulation: Simulation, data: str, seeds: Sequence[int], **training: Any) -> list[Found]:
    """Train in virtual time, a row for each seed, on one thread: these models are too small for two."""
    import torch

    from fastps.lab.virtual.training import VirtualTraining, train_virtually

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [
            train_virtually(
                parse_policy(sync), replace(simulation, seed=seed), VirtualTraining(data=images(data), **training)
            ).row
            for seed in seeds
        ]
    finally:
        torch.set_num_threads(threads)


def error(rows: Sequence[Found]) -> float:
    """Return the mean share of wrongly classified test images at the end."""
    return 1 - fmean(row["test_accuracy"] for row in rows)


def spread(found: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return each name's mean over the seeds, and its least and its most.

    >>> spread({"error": (0.1, 0.3)})
    {'error': 0.2, 'error, least': 0.1, 'error, most': 0.3}
    """
    return {
        name + which: of(values)
        for name, values in found.items()
        for which, of in (("", fmean), (", least", min), (", most", max))
    }


def time_to(rows: Sequence[Found], accuracy: float) -> float:
    """Return the mean virtual seconds to a test accuracy, interpolated linearly between evaluations; NaN if not reached."""
    return fmean(_time_to(row["accuracy_over_time"], accuracy) for row in rows)


def _time_to(curve: Sequence[tuple[float, float]], accuracy: float) -> float:
    """
    >>> _time_to([(1.0, 0.5), (2.0, 0.7)], 0.6)
    1.5
    """
    before = (0.0, 0.0)
    for seconds, found in curve:
        if found >= accuracy:
            share = (accuracy - before[1]) / (found - before[1])
            return before[0] + share * (seconds - before[0])
        before = (seconds, found)
    return float("nan")
