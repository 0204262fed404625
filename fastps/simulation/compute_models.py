"""Compute-time models: how long a step's computing takes, as values. The compiled models draw from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fastps.errors import UsageError
from fastps.kernels.simulation.compute_time import ComputeTimes


@dataclass(frozen=True)
class ComputeModel:
    """How long each worker computes.

    Attributes:
        kind: "constant"; "normal"; "lognormal", whose sigma is the standard deviation of the logarithm; "pareto"; "replay".
        location_ns: the time, mean, median or least time, in ns.
        spread: of "normal" the standard deviation in ns, of "lognormal" sigma, of "pareto" the shape.
        factors: worker to the factor of its times; default 1.
        bursts: (mean ns from one burst to the next, mean ns of a burst, factor during a burst), or None.
        replay: for "replay" the times in ns: one list for all workers, or one for each; lists repeat.
        blocked: ns that each replayed step waits without a core; `replay` then has the step's time on a core. Empty: none.
    """

    kind: str = "constant"
    location_ns: float = 10e6
    spread: float = 0.0
    factors: Mapping[int, float] = field(default_factory=dict)
    bursts: tuple[float, float, float] | None = None
    replay: Sequence[Sequence[int]] = ()
    blocked: Sequence[Sequence[int]] = ()

    def build(self, workers: int, seed: int) -> ComputeTimes:
        """Build the compiled model for a number of workers. Raises UsageError for invalid values."""
        beyond = next((worker for worker in self.factors if not 0 <= worker < workers), None)
        if beyond is not None:
            raise UsageError(f"expected factors for workers 0 to {workers - 1}, found one for worker {beyond}")
        factors = np.ones(workers)
        for worker, factor in self.factors.items():
            factors[worker] = factor
        replay = self._lists(self.replay, workers) if self.kind == "replay" else None
        blocked = self._lists(self.blocked, workers)[0] if self.blocked else None
        try:
            return ComputeTimes(
                self.kind, self.location_ns, self.spread, factors, seed, bursts=self.bursts, replay=replay, blocked=blocked
            )
        except ValueError as error:
            raise UsageError(f"compute times: {error}") from None

    def _lists(self, given: Sequence[Sequence[int]], workers: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        lists = [np.asarray(times, np.int64) for times in given]
        if len(lists) == 1:
            lists *= workers
        if len(lists) != workers:
            raise UsageError(f"times to replay: expected one list for all workers or {workers}, found {len(lists)}")
        bounds = np.cumsum([0, *(len(times) for times in lists)], dtype=np.int64)
        return np.concatenate(lists), bounds
