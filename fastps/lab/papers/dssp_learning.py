"""DSSP's rows with real gradients in virtual time: Table I's times to an accuracy, Figures 3a, 3b and 4."""

from collections.abc import Iterable
from functools import cache
from statistics import fmean

from fastps.lab.papers.dssp_speed import CARDS, RATIO, TABLE_1
from fastps.lab.papers.expectations import Between, InOrder, Near
from fastps.lab.papers.harder import SEEDS
from fastps.lab.papers.row import Cause, Effort, Row
from fastps.lab.papers.runs import MS, Found, error, learn, lognormal, spread, time_to
from fastps.simulation.simulate import Simulation

# Table I, seconds to reach 0.68, over those of ASP; bsp and ssp:3 never do.
ASP_SECONDS = 3017.2
LAST_POINT = {sync: seconds / ASP_SECONDS for sync, seconds in {"ssp:6": 6908.2, "ssp:15": 7255.6, "dssp:3,15": 3046.3}.items()}
TARGET = 0.84  # of the trials' runs all pass it, and BSP's do not pass one point more
FALLS = (200 / 300, 250 / 300)  # section V.B: "decay 0.1 twice at epoch 200 and 250 in 300 epochs"
HARDER = (
    f" The harder task in place of ResNet-110 on CIFAR-100, {100 * TARGET:.0f} % of its test images in place of 67 %; 2 x"
    " 2,000 steps of 16 samples, rate 0.05, momentum 0.5, and the paper's two falls at the same shares of the run."
)
SOME_SSP = ("ssp:3", "ssp:6", "ssp:15")


@cache  # three rows use the same runs
def _mixed_cluster(sync: str) -> list[Found]:
    simulation = Simulation(workers=2, steps=2000, batch=16, compute=lognormal(100 * MS, 0.05, factors={1: RATIO}))
    return learn(sync, simulation, "harder", SEEDS, learning_rate=0.05, momentum=0.5, falls_at=FALLS, looks=100)


def _times_to(target: float, syncs: Iterable[str]) -> dict[str, float]:
    """Return the times over ASP's."""
    asp = [time_to([row], target) for row in _mixed_cluster("asp")]
    runs = {sync: [time_to([row], target) for row in _mixed_cluster(sync)] for sync in syncs}
    return spread({sync: [mine / base for mine, base in zip(each, asp, strict=True)] for sync, each in runs.items()})


def _average_ssp(_: Effort) -> dict[str, float]:
    runs = [_mixed_cluster(f"ssp:{s}") for s in (3, 6, 9, 12, 15)]
    dssp = _mixed_cluster("dssp:3,15")
    seeds = range(len(dssp))
    return spread(
        {
            "time to the target, dssp / mean of ssp": [
                time_to([dssp[seed]], TARGET) / fmean(time_to([run[seed]], TARGET) for run in runs) for seed in seeds
            ],
            "final accuracy, mean of ssp": [1 - fmean(error([run[seed]]) for run in runs) for seed in seeds],
            "final accuracy, dssp": [1 - error([row]) for row in dssp],
        }
    )


@cache  # two rows use the same runs
def _equal_servers(sync: str) -> list[Found]:
    simulation = Simulation(workers=4, steps=350, batch=16, compute=lognormal(50 * MS, 0.05))
    return learn(sync, simulation, "digits", range(5), learning_rate=0.05, momentum=0.5, looks=70)


def _four_paradigms(_: Effort) -> dict[str, float]:
    """Return the final accuracies, and the times to 90 % over BSP's."""
    runs = {sync: _equal_servers(sync) for sync in ("asp", *SOME_SSP, "dssp:3,15", "bsp")}
    found = {f"final accuracy, {sync}": 1 - error(runs[sync]) for sync in ("asp", "dssp:3,15", "bsp")}
    found["final accuracy, mean of ssp"] = 1 - fmean(error(runs[sync]) for sync in SOME_SSP)
    times = {sync: time_to(each, 0.9) for sync, each in runs.items()}
    return found | {f"time to 90 %, {sync} / bsp": times[sync] / times["bsp"] for sync in runs if sync != "bsp"}


def _single_thresholds(_: Effort) -> dict[str, float]:
    """Return the final accuracies, and how many thresholds are at least as good as DSSP."""
    found = {sync: 1 - error(_equal_servers(sync)) for sync in (*SOME_SSP, "dssp:3,15")}
    return {**found, "thresholds that end at least as high": float(sum(found[s] >= found["dssp:3,15"] for s in SOME_SSP))}


LEARNING_ROWS = (
    Row(
        id="dssp/table-1-accuracy",
        source="Table I",
        items=("Table I",),
        claim="Time to an accuracy near the best (0.67), over ASP's (real gradients).",
        measure=lambda _: _times_to(TARGET, TABLE_1),
        learns=True,
        full_only=True,
        expect=(Near(TABLE_1, 0.15, relative=True),),
        assumed=CARDS + HARDER,
        tried=(
            "before, 8 x 8 digits without falls, to 95 %: bsp 2.95, ssp 1.6 to 1.7, dssp 0.96",
            "the same, BSP with the sum in place of the mean of two gradients (twice the rate): 1.63",
            "the same, BSP with the rate times sqrt(2), as hardsync: 2.33",
        ),
    ),
    Row(
        id="dssp/table-1-last-point",
        source="Table I",
        items=("Table I",),
        claim="Time to one point more (0.68), over ASP's (real gradients).",
        measure=lambda _: _times_to(TARGET + 0.01, LAST_POINT),
        learns=True,
        full_only=True,
        expect=(Near(LAST_POINT, 0.15, relative=True),),
        assumed=CARDS + HARDER + " One point more of them.",
        tried=("before, 8 x 8 digits without falls, to 96 %: ssp:6 2.01, ssp:15 1.90, dssp 1.00",),
        cause=Cause.TASK,
        why_not="DSSP agrees. SSP takes 1.7 to 1.8 times ASP's time, as it does to one point less. In the paper SSP needs a"
        " fifth to a third more of its time for the last point, where ASP needs 24 s.",
    ),
    Row(
        id="dssp/figure-4",
        source="Figure 4, section V.D",
        items=("Figure 4",),
        claim="Two unlike cards: DSSP [3, 15] reaches a high accuracy sooner than SSP does on the average of 3 to 15, and ends"
        " higher (real gradients).",
        measure=_average_ssp,
        learns=True,
        full_only=True,
        expect=(
            Between({"time to the target, dssp / mean of ssp": (0, 1)}),
            InOrder(("final accuracy, mean of ssp", "final accuracy, dssp"), margin=0.002),
        ),
        assumed=CARDS + HARDER + " The mean of s = 3, 6, 9, 12 and 15. Higher: by more than 0.2 %.",
        tried=("before, 8 x 8 digits without falls: 0.58 of SSP's time to 95 %, final accuracies of 97.5 (dssp) and 97.7 %",),
        cause=Cause.TASK,
        why_not="DSSP is sooner, by a third of the time. It ends 0.4 points lower, not higher, which is 14 of 3,600 test images"
        " and less than single seeds differ by.",
    ),
    Row(
        id="dssp/figure-3a",
        source="Figure 3a, section V.B.1",
        items=("Figure 3a",),
        claim="Four equal servers, fully connected layers: ASP, SSP and DSSP converge sooner than BSP; ASP ends lowest, DSSP"
        " between SSP and BSP (real gradients).",
        measure=_four_paradigms,
        learns=True,
        full_only=True,
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
        cause=Cause.TASK,
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
        full_only=True,
        expect=(Between({"thresholds that end at least as high": (0, 1)}),),
        assumed="as in the row above, with s = 3, 6 and 15 of the 13 thresholds: from about 6 on hardly any worker waits, and"
        " the runs are the same.",
        cause=Cause.TASK,
        why_not="All end within a test image or two of each other, as in the row above.",
    ),
)
