"""Rows of "Revisiting Distributed Synchronous SGD" (Chen, Pan, Monga, Bengio and Jozefowicz): backup workers.

Numbers come from the paper's text, or are named as assumed.
"""

import heapq
from functools import cache
from statistics import fmean, median

import numpy as np
import numpy.typing as npt

from fastps.advice import stragglers
from fastps.job.disciplines import ASP
from fastps.job.specs import parse_policy
from fastps.kernels.scheduling.scheduler import Scheduler
from fastps.reproduce.expectations import Between, InOrder, Near
from fastps.reproduce.items import Item
from fastps.reproduce.row import Effort, Row
from fastps.reproduce.runs import MS, SECOND, error, learn
from fastps.simulation.compute_models import ComputeModel
from fastps.simulation.simulate import TRACE_KINDS, Simulation, simulate

MACHINES = 100
# The body: of 100 machines the first arrives after 1.4 s and the 97th after 1.8 s (section 3.1); of 100 normal draws the first
# is 2.51 deviations below the mean and the 97th 1.88 above it.
SIGMA = float(np.log(1.8 / 1.4) / (2.51 + 1.88))
MEDIAN_S = float(1.4 * np.exp(2.51 * SIGMA))
# The tail: 30 % of the last of 100 come within 2 s, so 0.3^(1/100) of all do; the rest has a Pareto tail from 2 s.
LATE_SHARE = 1 - 0.3 ** (1 / MACHINES)
# Its shape: the largest of 76.2e3 iterations (Figure 5) was 310 s; of n Pareto draws the largest is near least x n^(1/shape).
SHAPE = float(np.log(76.2e3 * MACHINES * LATE_SHARE) / np.log(310 / 2))
RESPONSES = (
    f"response times that have section 3.1's figures: a lognormal body (median {MEDIAN_S:.2f} s, sigma {SIGMA:.3f}) from"
    f" 'most mean times fall between 1.4s and 1.8s', and a share of {LATE_SHARE:.4f} beyond 2 s from '30% of the final"
    f" gradient', with a Pareto tail of shape {SHAPE:.2f} from 'maximum observed time is 310s'; machines are alike, and draws"
    " independent."
)
MNIST = "fastps train's small CNN on 5,000 of MNIST's images in place of all 70,000"
LAYERS = 18


@cache
def _arrivals(iterations: int, seed: int = 0) -> npt.NDArray[np.float64]:
    """Return seconds from a version's beginning to its k-th push in a bsp run: float64[iterations, 100], each row sorted."""
    random = np.random.default_rng(seed)
    shape = (MACHINES, iterations)
    body = MEDIAN_S * np.exp(SIGMA * random.standard_normal(shape))
    tail = 2.0 * random.random(shape) ** (-1 / SHAPE)
    times_ns = (np.where(random.random(shape) < LATE_SHARE, tail, np.minimum(body, 2.0)) * SECOND).astype(np.int64)
    compute = ComputeModel("replay", replay=times_ns.tolist())
    trace = simulate(parse_policy("bsp"), Simulation(workers=MACHINES, steps=iterations, compute=compute), trace=True).trace
    assert trace is not None
    received = trace[trace["kind"] == TRACE_KINDS.index("receive")]["time_ns"].reshape(iterations, MACHINES)
    began = np.concatenate([[0], received[:-1, -1]])
    seconds: npt.NDArray[np.float64] = (received - began[:, None]) / SECOND
    return seconds


def _iterations(effort: Effort) -> npt.NDArray[np.float64]:
    return _arrivals(effort.choose(20_000, 2_000))


def _figure_3(effort: Effort) -> dict[str, float]:
    within = (_iterations(effort) < 2.0).mean(axis=0)
    return {f"k = {k}": float(within[k - 1]) for k in (1, 50, 90, 97, 98, 99, 100)}


def _figure_4(effort: Effort) -> dict[str, float]:
    seconds = _iterations(effort)
    found = {f"mean s, k = {k}": float(seconds[:, k - 1].mean()) for k in (1, 50, 90, 97, 98, 99, 100)}
    return {**found, "median s, k = 100": median(seconds[:, -1].tolist())}


def _figure_6(effort: Effort) -> dict[str, float]:
    """Multiply mean arrival times by iterations of Figure 5, a power law through the two numbers in the text."""
    seconds = _iterations(effort)
    rows = [
        stragglers.Arrival(k, len(seconds), float(seconds[:, k - 1].mean()), 0.0, 0.0, 0.0, 0.0, [])
        for k in range(1, MACHINES + 1)
    ]
    found = stragglers.splits(rows, stragglers.power_law(MACHINES))
    none = next(split.time for split in found if split.backups == 0)
    return {"best b": float(found[0].backups), "time with it / without backups": found[0].time / none}


def _figure_2(effort: Effort) -> dict[str, float]:
    """Train with asp and N = 1, 21, 51 equally fast workers that push in turn, so that each gradient is N - 1 versions old."""
    found: dict[str, float] = {}
    updates, batch, rate = effort.choose(2000, 800), 16, 0.005
    for staleness in (0, 20, 50):
        workers = staleness + 1
        steps = round(updates / workers)
        times = [[MS + worker, *[workers * MS] * steps] for worker in range(workers)]
        simulation = Simulation(workers=workers, steps=steps, batch=batch, compute=ComputeModel("replay", replay=times))
        runs = learn("asp", simulation, "mnist5k", range(effort.choose(2, 1)), learning_rate=rate, momentum=0.0, looks=1)
        found[f"error, staleness {staleness}"] = error(runs)
        found[f"mean staleness, {staleness} wanted"] = fmean(run["staleness_mean"] for run in runs)
    return found


def _table_1(effort: Effort) -> dict[str, float]:
    """Simulate 40 workers whose layers are shards under asp, read in order by forward and pushed in reverse by backward.

    The simulator pulls all shards before a step and pushes them after it, so this function drives the scheduler itself.
    """
    workers, steps = 40, effort.choose(100, 30)
    random = np.random.default_rng(0)
    values = dict(ASP().values(workers))
    del values["groups"]
    layers = [Scheduler(workers, **values) for _ in range(LAYERS + 1)]
    read = np.zeros((workers, len(layers)), np.int64)
    staleness: list[list[int]] = [[] for _ in layers]
    forward, part = 1 / 3, 1 / (LAYERS + 1)
    moments = [(forward * part * layer, 0, layer) for layer in range(LAYERS + 1)]
    moments += [(forward + (1 - forward) * part * (LAYERS - layer + 1), 1, layer) for layer in range(LAYERS + 1)]
    moments.sort()
    began = random.random(workers)
    took = np.exp(0.1 * random.standard_normal((workers, steps)))
    events = [(float(began[worker]), worker, 0, 0) for worker in range(workers)]
    while events:
        now, worker, step, moment = heapq.heappop(events)
        _, is_push, layer = moments[moment]
        if is_push:
            layers[layer].push(worker, int(now * SECOND), int(read[worker, layer]))
            staleness[layer].append(layers[layer].version - 1 - int(read[worker, layer]))
        else:
            read[worker, layer] = layers[layer].version
        if moment + 1 < len(moments):
            wait = (moments[moment + 1][0] - moments[moment][0]) * took[worker, step]
            heapq.heappush(events, (now + wait, worker, step, moment + 1))
        elif step + 1 < steps:
            heapq.heappush(events, (now, worker, step + 1, 0))
    return {f"mean staleness, layer {layer}": fmean(staleness[layer][workers * 5 :]) for layer in (0, 11, 12, 18)}


PAPER = "backup-workers"
ITEMS = (
    Item(name="Figure 3", says=""),
    Item(name="Figure 4", says=""),
    Item(name="Figure 5", says=""),
    Item(name="Figure 6", says=""),
    Item(name="Figure 2", says=""),
    Item(name="Table 1", says=""),
)

ROWS = (
    Row(
        id="backup-workers/figure-3",
        source="Figure 3",
        items=("Figure 3",),
        claim="Of 100 gradients the 98th comes within 2 s in 80 % of the iterations, the last in 30 %.",
        measure=_figure_3,
        expect=(Near({"k = 98": 0.8, "k = 100": 0.3}, 0.1),),
        assumed=RESPONSES + " So the 30 % is put in, and the 80 % comes out.",
    ),
    Row(
        id="backup-workers/figure-4",
        source="Figure 4",
        items=("Figure 4",),
        claim="Mean times to collect k gradients are 1.4 to 1.8 s but for the final few, where they grow exponentially.",
        measure=_figure_4,
        expect=(
            Between({f"mean s, k = {k}": (1.35, 1.85) for k in (1, 50, 90, 97)}),
            InOrder(("mean s, k = 97", "mean s, k = 98", "mean s, k = 99", "mean s, k = 100")),
            InOrder(("median s, k = 100", "mean s, k = 100")),
        ),
        assumed=RESPONSES,
    ),
    Row(
        id="backup-workers/figure-6",
        source="Figures 5 and 6",
        items=("Figure 5", "Figure 6"),
        claim="With N + b = 100 machines b = 4 is estimated to converge fastest.",
        measure=_figure_6,
        expect=(Between({"best b": (2, 6), "time with it / without backups": (0, 1)}),),
        assumed=RESPONSES + " Iterations as N^-0.85, which Figure 5's two numbers in the text make (137.5e3 with 50, 76.2e3"
        " with 100).",
    ),
    Row(
        id="backup-workers/figure-2",
        source="Figure 2",
        items=("Figure 2",),
        claim="MNIST: the error is 0.36 % without staleness, 0.47 % with 20 and 0.79 % with 50 steps of it (real gradients).",
        measure=_figure_2,
        learns=True,
        expect=(
            InOrder(("error, staleness 0", "error, staleness 20", "error, staleness 50")),
            Near({"mean staleness, 20 wanted": 20, "mean staleness, 50 wanted": 50}, 0.1, relative=True),
        ),
        assumed=f"{MNIST}; 2,000 updates of 16 at a rate of 0.005 for all three. Also tried: with appendix A.1's 0.1 neither"
        " 20 nor 50 learns, with 0.04 and 0.02 50 does not, which the paper met with lower rates and a slow beginning of the"
        " staleness; on 8 x 8 digits at 0.02 staleness of 20 costs nothing and of 50 two points.",
    ),
    Row(
        id="backup-workers/table-1",
        source="Table 1",
        items=("Table 1",),
        claim="40 workers, asynchronously: mean staleness 39.0 in the bottom layer (0), 19.8 in 11, 11.4 in 12 and 14.5 in 18.",
        measure=_table_1,
        expect=(
            Near({"mean staleness, layer 0": 38.97}, 1.0),
            InOrder(("mean staleness, layer 12", "mean staleness, layer 11", "mean staleness, layer 0")),
            InOrder(("mean staleness, layer 18", "mean staleness, layer 11")),
        ),
        assumed="all layers compute equally long, backward takes twice as long as forward, and times vary by 10 %, for the"
        " paper gives none of these; no transfers, so that the top layers are less stale than in the paper: their order with"
        " the bottom only.",
    ),
)
