"""What DSSP's Theorems 1 and 2 need and say: the lead of a worker after each push, and the regret of SGD on a convex loss.

The paper's regret is R = sum of f_t(w_t) - sum of f_t(w*), where w_t are the stale weights that push t was computed with. Times
are virtual; the weights are replayed in NumPy from the simulation's trace.
"""

from math import sqrt

import numpy as np
import numpy.typing as npt

from fastps.job.specs import parse_policy
from fastps.reproduce.row import Effort
from fastps.reproduce.runs import MS, lognormal
from fastps.simulation.compute_models import ComputeModel
from fastps.simulation.simulate import TRACE_KINDS, Simulation, simulate

LOW, HIGH = 3, 15  # s_L and s_U of the paper's experiments
READINGS = {
    "next-push": "dssp:3,15",
    "printed": "dssp:3,15,release=printed",
    "hard-bound": "dssp:3,15,hard_bound=true",
    "bound=push": "dssp:3,15,bound=push",
}
DIMENSIONS = 20
RADIUS = 1.0  # of the ball that the weights stay in; its diameter is 2, so D <= 2 and F = sqrt(2)
F = sqrt(2) * RADIUS
LIPSCHITZ = 1.0


def two_workers(steps: int, fast_ms: float, slow_ms: float) -> Simulation:
    """Two workers whose steps take a fixed time each."""
    intervals = [[round(fast_ms * MS)] * steps, [round(slow_ms * MS)] * steps]
    return Simulation(workers=2, steps=steps, compute=ComputeModel("replay", replay=intervals))


def largest_leads(effort: Effort) -> dict[str, float]:
    """Return each reading's largest lead over the slowest worker after a push; steps take 10 and 26 ms."""
    simulation = two_workers(effort.choose(2000, 500), 10, 26)
    return {name: float(_largest_lead(spec, simulation)) for name, spec in READINGS.items()}


def leads_with_bounds(effort: Effort) -> dict[str, float]:
    """Return the largest lead after a push of ten seeds, with the two bounds; times vary by a factor of e."""
    compute = lognormal(10 * MS, 1.0)
    simulations = [Simulation(workers=2, steps=effort.choose(2000, 1000), compute=compute, seed=seed) for seed in range(10)]
    specs = {"bound=push": READINGS["bound=push"], "hard_bound=true": READINGS["hard-bound"]}
    return {name: float(max(_largest_lead(spec, each) for each in simulations)) for name, spec in specs.items()}


def _largest_lead(spec: str, simulation: Simulation) -> int:
    trace = simulate(parse_policy(spec), simulation, trace=True).trace
    assert trace is not None
    received, largest = [0] * simulation.workers, 0
    for worker in trace["worker"][trace["kind"] == TRACE_KINDS.index("receive")].tolist():
        received[worker] += 1
        largest = max(largest, received[worker] - min(received))
    return largest


def regrets(effort: Effort) -> dict[str, float]:
    """Return the regret over its bound, for SSP and each reading, and its growth when T is four times as long."""
    updates = effort.choose(16_000, 4_000)
    found: dict[str, float] = {}
    for name, spec in {"ssp:3": "ssp:3", **READINGS}.items():
        staleness = LOW if name == "ssp:3" else HIGH
        regret = _regret(spec, staleness, updates)
        bound = 4 * F * LIPSCHITZ * sqrt(2 * (staleness + 1) * 2 * updates)  # Equations (1) and (2), with P = 2
        found[f"{name}, regret / bound"] = float(regret[-1] / bound)
        found[f"{name}, regret of T / regret of T / 4"] = float(regret[-1] / regret[updates // 4 - 1])
    return found


def _regret(spec: str, staleness: int, updates: int) -> npt.NDArray[np.float64]:
    """Return the regret after each of so many updates, with the step size of Theorem 1: sigma / sqrt(t).

    f_t(w) = |a_t w - a_t w*|, convex and 1-Lipschitz: a_t is a unit vector, and each worker draws its own kind of them. w* is
    on the border of the ball, and every f_t is 0 there.
    """
    simulation = two_workers(updates // 2, 10, 26)
    trace = simulate(parse_policy(spec), simulation, trace=True).trace
    assert trace is not None
    folds = trace[trace["kind"] == TRACE_KINDS.index("fold")][:updates]
    rng = np.random.default_rng(0)
    directions = rng.standard_normal((updates, DIMENSIONS))
    directions[folds["worker"] == 1, : DIMENSIONS // 2] *= 0.2  # the slow worker's samples tell more of the other half
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    best = rng.standard_normal(DIMENSIONS)
    best *= RADIUS / np.linalg.norm(best)
    sigma = F / (LIPSCHITZ * sqrt(2 * (staleness + 1) * simulation.workers))
    weights = np.zeros((updates + 1, DIMENSIONS))
    losses = np.empty(updates)
    for index, version in enumerate(folds["version"].tolist()):
        error = directions[index] @ (weights[version] - best)
        losses[index] = abs(error)
        stepped = weights[index] - sigma / sqrt(index + 1) * np.sign(error) * directions[index]
        weights[index + 1] = stepped * min(1.0, RADIUS / np.linalg.norm(stepped))
    return np.cumsum(losses)
