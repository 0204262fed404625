"""DSSP's rows with real gradients in virtual time: Table I's times to an accuracy, Figures 3a, 3b and 4."""

from collections.abc import Iterable
from functools import cache
from statistics import fmean

from fastps.lab.papers.dssp_speed import CARDS, RATIO, TABLE_1
from fastps.lab.papers.expectations import Between, InOrder, Near
from fastps.lab.papers.row import Effort, Row
from fastps.lab.papers.runs import MS, Found, error, learn, lognormal, time_to
from fastps.simulation.simulate import Simulation

# Table I, seconds to reach 0.68, over those of ASP; bsp and ssp:3 never do.
ASP_SECONDS = 3017.2
LAST_POINT = {sync: seconds / ASP_SECONDS for sync, seconds in {"ssp:6": 6908.2, "ssp:15": 7255.6, "dssp:3,15": 3046.3}.items()}
PERCEPTRON = " A perceptron on 8 x 8 digits, 5 seeds, in place of ResNet-110 on CIFAR-100 and 300 epochs."
SOME_SSP = ("ssp:3", "ssp:6", "ssp:15")


@cache  # three rows use the same runs
def _mixed_cluster(sync: str, effort: Effort) -> list[Found]:
    simulation = Simulation(workers=2, steps=700, batch=16, compute=lognormal(100 * MS, 0.05, factors={1: RATIO}))
    return learn(sync, simulation, "digits", range(effort.choose(5, 1)), learning_rate=0.05, momentum=0.5, looks=140)


def _times_to(target: float, syncs: Iterable[str], effort: Effort) -> dict[str, float]:
    asp = time_to(_mixed_cluster("asp", effort), target)
    return {sync: time_to(_mixed_cluster(sync, effort), target) / asp for sync in syncs}


def _average_ssp(effort: Effort) -> dict[str, float]:
    bounds = (3, 6, 9, 12, 15) if effort.quick else range(3, 16)
    runs = [_mixed_cluster(f"ssp:{s}", effort) for s in bounds]
    dssp = _mixed_cluster("dssp:3,15", effort)
    return {
        "time to 95 %, dssp / mean of ssp": time_to(dssp, 0.95) / fmean(time_to(run, 0.95) for run in runs),
        "final accuracy, mean of ssp": 1 - fmean(error(run) for run in runs),
        "final accuracy, dssp": 1 - error(dssp),
    }


@cache  # two rows use the same runs
def _equal_servers(sync: str, effort: Effort) -> list[Found]:
    simulation = Simulation(workers=4, steps=350, batch=16, compute=lognormal(50 * MS, 0.05))
    return learn(sync, simulation, "digits", range(effort.choose(5, 1)), learning_rate=0.05, momentum=0.5, looks=70)


def _four_paradigms(effort: Effort) -> dict[str, float]:
    """Return the final accuracies, and the times to 90 % over BSP's."""
    runs = {sync: _equal_servers(sync, effort) for sync in ("asp", *SOME_SSP, "dssp:3,15", "bsp")}
    found = {f"final accuracy, {sync}": 1 - error(runs[sync]) for sync in ("asp", "dssp:3,15", "bsp")}
    found["final accuracy, mean of ssp"] = 1 - fmean(error(runs[sync]) for sync in SOME_SSP)
    times = {sync: time_to(each, 0.9) for sync, each in runs.items()}
    return found | {f"time to 90 %, {sync} / bsp": times[sync] / times["bsp"] for sync in runs if sync != "bsp"}


def _single_thresholds(effort: Effort) -> dict[str, float]:
    """Return the final accuracies, and how many thresholds are at least as good as DSSP."""
    found = {sync: 1 - error(_equal_servers(sync, effort)) for sync in (*SOME_SSP, "dssp:3,15")}
    return {**found, "thresholds that end at least as high": float(sum(found[s] >= found["dssp:3,15"] for s in SOME_SSP))}


LEARNING_ROWS = (
    Row(
        id="dssp/table-1-accuracy",
        source="Table I",
        items=("Table I",),
        claim="Time to an accuracy near the best (0.67), over ASP's (real gradients).",
        measure=lambda effort: _times_to(0.95, TABLE_1, effort),
        learns=True,
        expect=(Near(TABLE_1, 0.15, relative=True),),
        assumed=CARDS + PERCEPTRON + " 95 % of the test images in place of 67 %.",
        tried=(
            "BSP with the sum in place of the mean of two gradients (twice the rate): 1.63 times ASP's time in place of 2.95,"
            " the paper 2.06",
            "BSP with the rate times sqrt(2), as hardsync: 2.33",
        ),
        why_not="SSP's and DSSP's times agree. BSP steps once, with the mean of two gradients, where the others step twice, at"
        " the same rate: it needs nearly three times ASP's time here. With a rate between once and twice as large it would take"
        " the paper's time; the paper does not say whether MXNet's server divides by the number of workers.",
    ),
    Row(
        id="dssp/table-1-last-point",
        source="Table I",
        items=("Table I",),
        claim="Time to one point more (0.68), over ASP's (real gradients).",
        measure=lambda effort: _times_to(0.96, LAST_POINT, effort),
        learns=True,
        expect=(Near(LAST_POINT, 0.15, relative=True),),
        assumed=CARDS
        + PERCEPTRON
        + " 96 % of the test images in place of 68 %. That bsp and ssp:3 never get there is not so here:"
        " all end at about 97.6 %.",
        why_not="DSSP and SSP with s = 6 agree. The paper's SSP with s = 15 takes 2.4 times ASP's time here and 1.9 times in"
        " the row before; ours takes 1.9 and 1.6. Single seeds give 1.8 to 2.1 for s = 6 and 1.6 to 2.2 for s = 15, so that"
        " their order is chance here.",
    ),
    Row(
        id="dssp/figure-4",
        source="Figure 4, section V.D",
        items=("Figure 4",),
        claim="Two unlike cards: DSSP [3, 15] reaches a high accuracy sooner than SSP does on the average of 3 to 15, and ends"
        " higher (real gradients).",
        measure=_average_ssp,
        learns=True,
        expect=(
            Between({"time to 95 %, dssp / mean of ssp": (0, 1)}),
            InOrder(("final accuracy, mean of ssp", "final accuracy, dssp"), margin=0.002),
        ),
        assumed=CARDS + PERCEPTRON + " Higher: by more than 0.2 %, less than which is chance between seeds.",
        why_not="DSSP is sooner, by 40 % of the time. The final accuracies are alike: digits that all schemes learn do not show"
        " what stale gradients cost.",
    ),
    Row(
        id="dssp/figure-3a",
        source="Figure 3a, section V.B.1",
        items=("Figure 3a",),
        claim="Four equal servers, fully connected layers: ASP, SSP and DSSP converge sooner than BSP; ASP ends lowest, DSSP"
        " between SSP and BSP (real gradients).",
        measure=_four_paradigms,
        learns=True,
        expect=(
            Between({f"time to 90 %, {sync} / bsp": (0, 1) for sync in ("asp", *SOME_SSP, "dssp:3,15")}),
            InOrder(tuple(f"final accuracy, {sync}" for sync in ("asp", "mean of ssp", "dssp:3,15", "bsp"))),
        ),
        assumed="a perceptron on 8 x 8 digits, rate 0.05 and momentum 0.5, in place of a downsized AlexNet on CIFAR-10; times"
        " vary by 5 %; the mean of ssp is that of s = 3, 6 and 15.",
        tried=(
            "momentum 0.9: asp, ssp and dssp end at 46 to 47 %, bsp at 97 %",
            "rate 0.1 and momentum 0.9: asp, ssp and dssp do not learn (14 %), bsp ends at 98 %",
            "one server 1.5 times as slow and rate 0.2: asp 77 %, dssp 86 %, ssp:3 86 %, ssp:15 97 %, bsp 98 %, and single"
            " seeds of asp from 10 to 98 %",
            "one server 3 times as slow and rate 0.2: asp 97 %, dssp 96 %, ssp:3 94 %, ssp:15 97 %, bsp 98 %",
        ),
        why_not="ASP, SSP and DSSP are sooner than BSP. Among four equal workers hardly any gets three steps ahead, so ASP, SSP"
        " and DSSP make nearly the same run and end alike: all well at a small rate, all badly at a large one, where only BSP"
        " learns. With one server half as slow again and a rate at which runs begin to diverge, ASP is the worst and BSP the"
        " best, as in the paper, but chance between seeds is larger than the differences.",
    ),
    Row(
        id="dssp/figure-3b",
        source="Figure 3b, section V.B",
        items=("Figure 3b",),
        claim="'DSSP converges [...] to a higher accuracy than almost all of the SSPs except for one' (real gradients).",
        measure=_single_thresholds,
        learns=True,
        expect=(Between({"thresholds that end at least as high": (0, 1)}),),
        assumed="as in the row above, with s = 3, 6 and 15 of the 13 thresholds: from about 6 on hardly any worker waits, and"
        " the runs are the same.",
        why_not="All end within a test image or two of each other, as in the row above.",
    ),
)
