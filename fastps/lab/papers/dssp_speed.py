"""DSSP's rows of throughput, waiting and staleness, in virtual time: Table I's speed, and sections V.B and V.D."""

from dataclasses import replace
from statistics import fmean

from fastps.lab.papers.dssp_theory import READINGS
from fastps.lab.papers.expectations import Between, InOrder, Near
from fastps.lab.papers.row import Cause, Effort, Row
from fastps.lab.papers.runs import MS, lognormal, play
from fastps.simulation.simulate import ComputeModel, Simulation

# Peak single-precision rates of the two cards of section V.A.1: 11.34 and 4.37 TFLOP/s.
RATIO = 11.34 / 4.37
CARDS = (
    f"the 1060 takes {RATIO:.2f} times as long as the 1080 Ti, the ratio of their peak rates, because the paper gives no times;"
    " times vary by 5 % (section III.B: 'very similar'); no transfers, for both cards are in one machine."
)
ANY_SPREAD = CARDS.replace(" times vary by 5 % (section III.B: 'very similar');", "")
FOUR = "50 ms of computing, 10 MB, and times that vary by 5 %, because the paper gives none; 100 Gbit/s is from section V.A.1."
# Table I, seconds to reach 0.67, over those of ASP.
ASP_SECONDS = 2993.1
TABLE_1 = {
    sync: seconds / ASP_SECONDS
    for sync, seconds in {"bsp": 6159.2, "ssp:3": 5678.2, "ssp:6": 5703.8, "ssp:15": 5564.9, "dssp:3,15": 3016.4}.items()
}
SPREADS = (0, 0.1, 1, 2, 5)  # percent
PROSE = "credit=prose, "
ALL_SSP = [f"ssp:{s}" for s in range(3, 16)]


def _two_cards(effort: Effort, spread: float = 0.05, seed: int = 0, ratio: float = RATIO) -> Simulation:
    """Two workers whose times vary by `spread`, the standard deviation of their logarithm."""
    factors = {1: ratio}
    compute = lognormal(100 * MS, spread, factors=factors) if spread else ComputeModel("constant", 100 * MS, factors=factors)
    return Simulation(workers=2, steps=effort.choose(4000, 1000), compute=compute, seed=seed)


def _relative_time(sync: str, simulation: Simulation) -> float:
    return float(play(sync, simulation)["seconds"] / play("asp", simulation)["seconds"])


def _relative_times(effort: Effort) -> dict[str, float]:
    simulation = _two_cards(effort)
    return {sync: _relative_time(sync, simulation) for sync in TABLE_1}


def _over_spreads(effort: Effort, spec: str) -> dict[str, float]:
    """Return the time of a spec over ASP's by how much times vary, and at a ratio of 2: mean and ends of 5 seeds."""
    found: dict[str, float] = {}
    cases = {_spread(percent): (percent, RATIO) for percent in SPREADS} | {f"ratio 2.0, {_spread(1)}": (1, 2.0)}
    for name, (percent, ratio) in cases.items():
        times = [_relative_time(spec, _two_cards(effort, percent / 100, seed, ratio)) for seed in range(5)]
        found[name] = fmean(times)
        found[f"{name}, smallest"] = min(times)
        found[f"{name}, largest"] = max(times)
    return found


def _both_credits(effort: Effort) -> dict[str, float]:
    prose = _over_spreads(effort, "dssp:3,15,credit=prose")
    return {**_over_spreads(effort, "dssp:3,15"), **{PROSE + name: time for name, time in prose.items()}}


def _near_table_1(relative_time: float, prefix: str = "") -> Near:
    """Expect a time at every spread, of the mean and the slowest seed."""
    names = [prefix + name for each in SPREADS for name in (_spread(each), f"{_spread(each)}, largest")]
    return Near(dict.fromkeys(names, relative_time), 0.15, relative=True)


def _spread(percent: float) -> str:
    return f"times vary by {percent:g} %"


def _with_bounds(effort: Effort) -> dict[str, float]:
    return {name: _relative_time(READINGS[name], _two_cards(effort)) for name in ("hard-bound", "bound=push")}


def _waits(effort: Effort) -> dict[str, float]:
    """Return the share of the workers' time in which they wait for others, the mean of 5 seeds."""
    clusters = {"two cards": _two_cards(effort), "four servers": _equal_servers(effort, 20)}
    found: dict[str, float] = {}
    for name, cluster in clusters.items():
        shares = {sync: _mean("grant_wait_share", sync, cluster) for sync in (*ALL_SSP, "dssp:3,15")}
        found |= {f"{name}, {sync}": shares[sync] for sync in ("dssp:3,15", "ssp:3", "ssp:15")}
        found[f"{name}, mean of ssp:3 to 15"] = fmean(shares[sync] for sync in ALL_SSP)
    return found


def _mean(what: str, sync: str, cluster: Simulation) -> float:
    """Return a figure of the simulation's row, the mean of 5 seeds."""
    return fmean(play(sync, replace(cluster, seed=seed))[what] for seed in range(5))


def _equal_servers(effort: Effort, percent: float) -> Simulation:
    """Four workers of the same speed, and no transfers."""
    return Simulation(workers=4, steps=effort.choose(3000, 1000), compute=lognormal(50 * MS, percent / 100))


def _staleness(effort: Effort) -> dict[str, float]:
    """Return the mean staleness, of 5 seeds."""
    syncs = ("bsp", "ssp:3", "ssp:15", "dssp:3,15", "asp")
    found = {f"two cards, {sync}": _mean("staleness_mean", sync, _two_cards(effort)) for sync in syncs}
    for percent in (5, 20):
        for sync in ("ssp:3", "ssp:6", "ssp:15"):
            servers = _equal_servers(effort, percent)
            found[f"four servers, {_spread(percent)}, {sync}"] = _mean("staleness_mean", sync, servers)
    return found


def _four_servers(effort: Effort, model_bytes: float, compute_ms: float, spread: float = 0.05) -> Simulation:
    return Simulation(
        workers=4,
        steps=effort.choose(3000, 1000),
        compute=lognormal(compute_ms * MS, spread),
        model_bytes=model_bytes,
        bandwidth=12.5e9,
    )


def _throughput(simulation: Simulation) -> dict[str, float]:
    speed: dict[str, float] = {sync: play(sync, simulation)["steps_per_s"] for sync in ("bsp", "dssp:3,15", "asp")}
    speed["mean of ssp:3 to 15"] = fmean(play(sync, simulation)["steps_per_s"] for sync in ALL_SSP)
    return speed


def _large_threshold(effort: Effort) -> dict[str, float]:
    """Return the throughput of SSP with s = 15 over DSSP's."""
    found: dict[str, float] = {}
    for percent in (5, 20, 50):
        simulation = _four_servers(effort, 10e6, 50, percent / 100)
        speed = {sync: play(sync, simulation)["steps_per_s"] for sync in ("ssp:15", "dssp:3,15")}
        found[f"ssp:15 / dssp:3,15, {_spread(percent)}"] = speed["ssp:15"] / speed["dssp:3,15"]
    return found


def _busy_servers(effort: Effort) -> dict[str, float]:
    """Simulate a model without fully connected layers, and asp over bsp with updates that take a share of a step's time."""
    found = _throughput(_four_servers(effort, 7e6, 500))
    simulation = Simulation(workers=4, steps=effort.choose(3000, 1000), compute=lognormal(500 * MS, 0.05))
    for share in (0.01, 0.1, 0.3, 0.4):
        busy = replace(simulation, update_ns=round(share * 500 * MS))
        speed = {sync: play(sync, busy)["steps_per_s"] for sync in ("asp", "bsp")}
        found[f"asp / bsp, an update of {share:.0%} of a step"] = speed["asp"] / speed["bsp"]
    return found


SPEED_ROWS = (
    Row(
        id="dssp/table-1-speed",
        source="Table I, Figure 4",
        items=("Table I", "Figure 4"),
        claim="Two cards of different speed: SSP is about as slow as BSP, DSSP as fast as ASP (seconds over ASP's).",
        measure=_relative_times,
        expect=(Near(TABLE_1, 0.15, relative=True),),
        assumed=CARDS + " The table's times are to an accuracy, ours for as many steps.",
    ),
    Row(
        id="dssp/table-1-as-printed",
        source="Table I, Algorithm 1, line 17",
        items=("Algorithms 1 and 2",),
        claim="DSSP takes 1.008 times ASP's time, with line 17 read to the letter (release=printed); mean and largest of 5"
        " seeds.",
        measure=lambda effort: _over_spreads(effort, "dssp:3,15,release=printed"),
        expect=(_near_table_1(TABLE_1["dssp:3,15"]),),
        assumed=ANY_SPREAD,
        tried=("a ratio of 2.0 in place of 2.59, times that vary by 1 % (measured above): slower than Table I, too",),
        cause=Cause.ASSUMPTION,
        why_not="As printed a worker without credit waits until it is within s_L of the slowest again. While the controller"
        " grants credit anew each time, there is no wait, and DSSP has Table I's speed: so it is at this ratio of the cards"
        " with times that vary by 1 % or less. One answer of 0 costs a wait of several of the slowest's steps. With 2 % such"
        " answers come in some runs, and with 5 % in all. The paper says that times are 'very similar', not how similar, so"
        " Table I does not decide between the readings. Released at the slowest's next push, DSSP has Table I's speed at every"
        " spread (table-1-next-push), which is why that reading is the default.",
    ),
    Row(
        id="dssp/table-1-as-printed-prose",
        source="Table I, Algorithm 1, line 17, section III.C",
        items=("Algorithms 1 and 2",),
        claim="The same with r* further iterations, as the text says, in place of the listing's r* + 1"
        " (release=printed,credit=prose).",
        measure=lambda effort: _over_spreads(effort, "dssp:3,15,release=printed,credit=prose"),
        expect=(_near_table_1(TABLE_1["dssp:3,15"]),),
        assumed=ANY_SPREAD,
        cause=Cause.CONTRADICTION,
        why_not="A worker that stops where r* says finds that now is the best time to wait, waits until it is within s_L again,"
        " and so goes at the slowest's pace, even where times are exactly steady. The listing's worker has gone one iteration"
        " too far to stop, and asks for more. So with line 17 to the letter Table I rests on this one iteration.",
    ),
    Row(
        id="dssp/table-1-next-push",
        source="Table I, Algorithm 1, line 17",
        items=("Table I",),
        claim="The same with the default reading: a waiting worker goes on at the slowest's next push; also with the text's r*"
        " iterations (credit=prose).",
        measure=_both_credits,
        expect=(_near_table_1(TABLE_1["dssp:3,15"]), _near_table_1(TABLE_1["dssp:3,15"], PROSE)),
        assumed=ANY_SPREAD,
    ),
    Row(
        id="dssp/table-1-bounded",
        source="section VI, Table I, Theorem 2",
        items=("Section VI",),
        claim="'DSSP ensures the convergence of DNNs by limiting the stalled delays' and takes 1.008 times ASP's time: the"
        " readings that limit the lead to s_U or s_U + 1, as Theorem 2 needs.",
        measure=_with_bounds,
        expect=(Near(dict.fromkeys(("hard-bound", "bound=push"), TABLE_1["dssp:3,15"]), 0.15, relative=True),),
        assumed=CARDS,
        cause=Cause.CONTRADICTION,
        why_not="Whatever the controller answers, a worker that may not be more than 15 pushes ahead of one that stays 2.6"
        " times as slow soon goes at its pace. So DSSP either keeps Theorem 2's premise or has Table I's speed; no reading has"
        " both.",
    ),
    Row(
        id="dssp/waiting",
        source="Abstract",
        items=("Abstract",),
        claim="DSSP 'adaptively adjusts the threshold [...] to reduce the waiting time of faster workers': it waits less than"
        " SSP with s = s_L, and on two unlike cards less than SSP with s = 3 to 15 on the average.",
        measure=_waits,
        expect=(
            InOrder(("two cards, dssp:3,15", "two cards, mean of ssp:3 to 15")),
            InOrder(("two cards, dssp:3,15", "two cards, ssp:3")),
            InOrder(("four servers, dssp:3,15", "four servers, ssp:3")),
        ),
        assumed=CARDS + " Four equal servers: times that vary by 20 %; with 5 % hardly any worker waits.",
    ),
    Row(
        id="dssp/staleness",
        source="sections V.B and V.D",
        items=("Section V.D",),
        claim="'ASP also introduces the most staled updates among all'; 'a larger threshold of SSP incurs more staler"
        " gradients'.",
        measure=_staleness,
        expect=(
            InOrder(tuple(f"two cards, {sync}" for sync in ("bsp", "ssp:3", "ssp:15", "dssp:3,15", "asp"))),
            InOrder(tuple(f"four servers, times vary by 20 %, ssp:{s}" for s in (3, 6, 15))),
        ),
        assumed=CARDS + " Four servers: times that vary by 20 %; with 5 % hardly any worker gets six steps ahead.",
    ),
    Row(
        id="dssp/figure-3-with-fully-connected",
        source="section V.B.1",
        items=("Section V.B.1",),
        claim="Downsized AlexNet, 4 equal servers: ASP has the largest throughput, DSSP and SSP nearly the same, BSP the"
        " least.",
        measure=lambda effort: _throughput(_four_servers(effort, 10e6, 50)),
        expect=(InOrder(("bsp", "mean of ssp:3 to 15")), InOrder(("mean of ssp:3 to 15", "dssp:3,15", "asp"), slack=0.01)),
        assumed=FOUR,
        tried=("1 and 100 MB: the same order",),
    ),
    Row(
        id="dssp/large-threshold",
        source="section V.B",
        items=("Section V.B.1",),
        claim="4 equal servers: SSP with a large threshold is 'very fast, much faster than DSSP with a threshold range of"
        " [3,15]' (much: by 5 % or more).",
        measure=_large_threshold,
        expect=(Between({"ssp:15 / dssp:3,15, times vary by 5 %": (1.05, float("inf"))}),),
        assumed=FOUR,
        tried=("times that vary by 20 and 50 % (measured above): faster, by less than 5 %",),
        cause=Cause.ASSUMPTION,
        why_not="SSP with s = 15 is the faster one, but equal servers whose times vary by 5 % hardly ever part by more than"
        " three steps, so there is next to no wait to save. It takes times that vary by more than a half for a difference of"
        " 5 %. The claim means that the authors' DSSP waited where SSP with s = 15 did not, while in Table I it"
        " hardly waited at all.",
    ),
    Row(
        id="dssp/figure-3-without-fully-connected",
        source="section V.B.2",
        items=("Section V.B.2",),
        claim="ResNets on 4 equal servers: BSP has the largest throughput, then SSP, DSSP and ASP.",
        measure=_busy_servers,
        expect=(InOrder(("asp", "dssp:3,15", "mean of ssp:3 to 15", "bsp")),),
        assumed="7 MB (ResNet-110) and 500 ms of computing, because the paper gives no times; 100 Gbit/s.",
        tried=(
            "the hypothesis that the server is busy, because BSP makes one update a step and ASP four (measured above): BSP is"
            " quicker where an update takes 40 % of a step's computing, and not where it takes 30 %",
        ),
        cause=Cause.ASSUMPTION,
        why_not="Waiting for the slowest in each step cannot be quicker than not waiting while a server has time to spare. A"
        " busy server would explain the order, but an update of 7 MB would have to take more than 150 ms. The paper's section"
        " V.C explains the order by how much communication can be hidden, and has no times.",
    ),
)
