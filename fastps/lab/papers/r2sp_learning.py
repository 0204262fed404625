"""Rows of the R2SP paper that need real gradients: iterations and time to converge, and batch tuning."""

from dataclasses import replace
from functools import cache
from statistics import fmean

from fastps.lab.papers.expectations import Between, InOrder, Near
from fastps.lab.papers.r2sp_cluster import CONTENTION, MODELS, SPREAD, cluster_a, iteration_s
from fastps.lab.papers.row import Effort, Row
from fastps.lab.papers.runs import SECOND, Found, learn, lognormal, time_to
from fastps.simulation.simulate import Simulation

# Table II: samples a second; two, two and four workers of cluster-B.
SPEEDS = {"g2.2x": 429.0, "p2.x": 628.0, "g3.4x": 917.0}
CLUSTER_B = ("g2.2x", "g2.2x", "p2.x", "p2.x", "g3.4x", "g3.4x", "g3.4x", "g3.4x")


def _tuned_training(effort: Effort) -> dict[str, float]:
    """Compare tuned with untuned batches: the time to convergence, and to an accuracy of 90 % of the test images."""
    slowest = SPEEDS["g2.2x"]
    factors = {worker: slowest / SPEEDS[kind] for worker, kind in enumerate(CLUSTER_B)}
    simulation = Simulation(workers=8, steps=300, batch=16, compute=lognormal(SECOND, SPREAD, factors=factors))
    seeds = range(effort.choose(4, 1))
    tuned, plain = (
        learn(sync, simulation, "digits", seeds, learning_rate=0.01, momentum=0.0, looks=100, goal=0.25)
        for sync in ("r2sp:0.8,tune=true", "r2sp:0.8")
    )
    return {
        "tuned / not tuned, converged": _goal_s(tuned) / _goal_s(plain),
        "tuned / not tuned, to 90%": time_to(tuned, 0.9) / time_to(plain, 0.9),
    }


def _goal_s(rows: list[Found]) -> float:
    """Return the mean seconds until the goal; NaN if a run did not reach it."""
    return fmean(float("nan") if row["goal_s"] is None else row["goal_s"] for row in rows)


@cache  # two rows use the same runs
def _converging(effort: Effort) -> dict[str, tuple[float, float]]:
    """Return each scheme's iterations and seconds to 90 % of the test images, 16 workers with VGG16's times."""
    cluster = replace(cluster_a(MODELS["vgg16"], 60), batch=16)
    rate = 0.01  # section VI.A
    found = {}
    for sync in ("bsp", "asp", "ssp:5", "r2sp:0.8"):
        scaled = rate * (16 if sync == "bsp" else 1)
        rows = learn(sync, cluster, "digits", range(effort.choose(8, 2)), learning_rate=scaled, momentum=0.0, looks=60)
        seconds = time_to(rows, 0.9)
        found[sync] = seconds / fmean(iteration_s(row) for row in rows), seconds
    return found


def _relative(effort: Effort, which: int) -> dict[str, float]:
    found = _converging(effort)
    return {sync: each[which] / found["bsp"][which] for sync, each in found.items()}


TASK = (
    "a perceptron on 8 x 8 digits to 90 % of the test images, in place of VGG16 on CIFAR-10 to a loss of 2.3, with VGG16's"
    " times; the rate of 0.01 for each push (section VI.A) and 16 times as much for the mean of BSP's 16, the linear scaling"
    " rule of the paper's reference [12]. "
)

LEARNING = (
    Row(
        id="r2sp/figure-7b",
        source="Figure 7b",
        items=("Figure 7b",),
        claim="Relaxed schemes need more iterations than BSP to converge, and R2SP the fewest of them (real gradients).",
        measure=lambda effort: _relative(effort, 0),
        learns=True,
        expect=(InOrder(("bsp", "r2sp:0.8", "asp"), margin=0.03), InOrder(("r2sp:0.8", "ssp:5"), margin=0.03)),
        assumed=TASK + "More: by more than 3 %, less than which is chance between seeds. " + CONTENTION,
        tried=(
            "BSP with the rate of 0.01, too: it has not reached 90 % when R2SP has for long (72 % after 120 iterations)",
            "half of both rates: asp 8 % and R2SP 3 % more iterations than BSP (two seeds)",
        ),
        why_not="All schemes need the same iterations within the seeds' spread: 15 missed updates of 16 samples each do not"
        " slow the digits down at this rate. The paper's order, R2SP the best of the relaxed schemes, is there but within the"
        " noise.",
    ),
    Row(
        id="r2sp/figure-7c",
        source="Figure 7c, the abstract",
        items=("Figure 7c",),
        claim="R2SP converges up to 25 % sooner than BSP (VGG16), and BSP sooner than ASP and SSP (real gradients).",
        measure=lambda effort: _relative(effort, 1),
        learns=True,
        expect=(Near({"r2sp:0.8": 0.75}, 0.1), Between({sync: (1, float("inf")) for sync in ("asp", "ssp:5")})),
        assumed=TASK + CONTENTION,
        why_not="R2SP's 25 % hold. ASP and SSP are 10 % sooner than BSP here, because their iterations are a fifth shorter"
        " and they need a tenth more of them. In the paper staleness costs more iterations than that: digits bear it better"
        " than CIFAR-10.",
    ),
    Row(
        id="r2sp/figure-10",
        source="Figure 10",
        items=("Figure 10",),
        claim="Batch size tuning makes R2SP converge around 40 % sooner in cluster-B (real gradients).",
        measure=_tuned_training,
        learns=True,
        expect=(Near({"tuned / not tuned, converged": 0.6}, 0.15),),
        assumed="the speeds of Table II, no transfers, a perceptron on 8 x 8 digits, and batches of 16 at first in place of"
        " 512, because there are 1,437 images; section VI.A's learning rate of 0.01, and converged as it says: a loss below"
        " 0.25 in 10 consecutive iterations, of any worker; momentum is not in the text: none.",
        tried=(
            "a rate of 0.02: about the same; time to 90 % of the test images at that rate 0.78",
            "momentum 0.5: 0.73 to 95 %",
            "a rate of 0.05: the tuned run, whose rate rises with its batches, does not learn",
        ),
    ),
)
