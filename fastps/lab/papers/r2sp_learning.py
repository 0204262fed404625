"""Rows of the R2SP paper that need real gradients: iterations and time to converge, and batch tuning."""

from dataclasses import replace
from functools import cache
from math import log
from statistics import fmean

from fastps.lab.papers.expectations import Between, InOrder, Near
from fastps.lab.papers.harder import SEEDS
from fastps.lab.papers.r2sp_cluster import CONTENTION, MODELS, SPREAD, cluster_a, iteration_s
from fastps.lab.papers.row import Cause, Effort, Row
from fastps.lab.papers.runs import SECOND, Found, learn, lognormal, spread, time_to
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


RATES = (0.01, 0.02, 0.05)  # section VI.A's, and two on which stale gradients cost more
GOAL = 0.7 * log(10)  # section VI.A, VGG16: "loss reduced by around 30%"


@cache  # two rows use the same runs
def _converging(effort: Effort) -> dict[tuple[str, float], tuple[list[float], list[float]]]:
    """Return the iterations and the seconds to the goal, by scheme and rate, each by seed: 16 workers with VGG16's times."""
    found = {}
    for rate in RATES[: effort.choose(3, 1)]:
        cluster = replace(cluster_a(MODELS["vgg16"], round(1 / rate) + 20), batch=16)
        for sync in ("bsp", "asp", "ssp:5", "r2sp:0.8"):
            scaled = rate * (16 if sync == "bsp" else 1)
            seeds = SEEDS[: effort.choose(3, 1)]
            rows = learn(sync, cluster, "harder", seeds, learning_rate=scaled, momentum=0.0, looks=1, goal=GOAL)
            seconds = [_goal_s([row]) for row in rows]
            found[sync, rate] = [each / iteration_s(row) for each, row in zip(seconds, rows, strict=True)], seconds
    return found


def _relative(effort: Effort, which: int) -> dict[str, float]:
    """Return each scheme's iterations (0) or seconds (1) over BSP's, by rate."""
    found = _converging(effort)
    return spread(
        {
            f"{sync}, rate {rate:g}": [mine / bsp for mine, bsp in zip(each[which], found["bsp", rate][which], strict=True)]
            for (sync, rate), each in found.items()
        }
    )


TASK = (
    "the harder task, batches of 16, in place of VGG16 on CIFAR-10, with VGG16's times and its measure of convergence: a loss"
    " that is 30 % lower than at first, in 10 consecutive iterations of any worker (section VI.A). The rate of 0.01 for each"
    " push (section VI.A) decides; it is 16 times as large for the mean of BSP's 16, the linear scaling rule of the paper's"
    " reference [12]. "
)
DIGITS_TRIED = "before, 8 x 8 digits to 90 % of the test images, the rate of 0.01: "

LEARNING = (
    Row(
        id="r2sp/figure-7b",
        source="Figure 7b",
        items=("Figure 7b",),
        claim="Relaxed schemes need more iterations than BSP to converge, and R2SP the fewest of them (real gradients).",
        measure=lambda effort: _relative(effort, 0),
        learns=True,
        expect=(
            InOrder(tuple(f"{sync}, rate 0.01" for sync in ("bsp", "r2sp:0.8", "asp")), margin=0.03),
            InOrder(tuple(f"{sync}, rate 0.01" for sync in ("r2sp:0.8", "ssp:5")), margin=0.03),
        ),
        assumed=TASK + "More: by more than 3 %. " + CONTENTION,
        tried=(
            DIGITS_TRIED + "all within 5 % of BSP's",
            "the same, BSP with the rate of 0.01, too: it has not reached 90 % when R2SP has for long (72 % after 120"
            " iterations)",
            "the same, half of both rates: asp 8 % and R2SP 3 % more iterations than BSP (two seeds)",
        ),
        cause=Cause.TASK,
        why_not="All relaxed schemes need more iterations than BSP with each seed at each rate, as the paper says, 2 to 3 % at"
        " the rate of 0.01 and 18 to 31 % at the larger ones. R2SP does not need the fewest of them: 2, 31 and 18 %, where ASP"
        " and SSP need 3, 23 and 18 %. Its pushes miss 15 updates each; ASP's miss 15 on average.",
    ),
    Row(
        id="r2sp/figure-7c",
        source="Figure 7c, the abstract",
        items=("Figure 7c",),
        claim="R2SP converges up to 25 % sooner than BSP (VGG16), and BSP sooner than ASP and SSP (real gradients).",
        measure=lambda effort: _relative(effort, 1),
        learns=True,
        expect=(
            Near({"r2sp:0.8, rate 0.01": 0.75}, 0.1),
            Between({f"{sync}, rate 0.01": (1, float("inf")) for sync in ("asp", "ssp:5")}),
        ),
        assumed=TASK + CONTENTION,
        tried=(DIGITS_TRIED + "r2sp:0.8 0.66, asp and ssp:5 0.89",),
        cause=Cause.ASSUMPTION,
        why_not="R2SP's 25 % hold. ASP and SSP are 14 % sooner than BSP at the rate of 0.01, at which stale gradients cost"
        " hardly any iterations. At the rates of 0.02 and 0.05 all claims hold on average (R2SP 0.85 and 0.80, ASP and SSP 1.05"
        " and 1.03), and not with each seed. The paper gives the initial rate, but neither momentum nor a rate for BSP.",
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
