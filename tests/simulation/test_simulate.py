"""Simulations in virtual time: small cases by hand, the oracles' decisions, and what the papers say of staleness."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from fastps import parse_policy
from fastps.errors import PolicyError, UsageError
from fastps.kernels.simulation.compute_time import ComputeTimes
from fastps.kernels.simulation.network import Network
from fastps.kernels.simulation.simulator import Simulator
from fastps.lab.virtual.compute_texts import parse_compute
from fastps.lab.virtual.options import SimulationTexts, read_policies, read_simulation
from fastps.simulation.simulate import TRACE_KINDS, ComputeModel, Simulation, simulate
from tests.oracles.table import SIMULATED, Play, play
from tests.support import commands
from tests.support.processes import wait_until
from tests.support.virtual_runs import constant, lines_of, played, row_of, times

VARIED = parse_compute("lognormal:10ms,0.4")


# -- by hand ---------------------------------------------------------------------------------------


def test_bsp_goes_at_the_pace_of_the_slowest() -> None:
    outcome = played("bsp", workers=3, steps=5, compute=constant(10, 20, 30))
    assert times(outcome, "fold", 0) == [30, 60, 90, 120, 150]
    assert times(outcome, "begin", 2) == [0, 30, 60, 90, 120, 150]
    row = outcome.row
    assert row["seconds"] == 150e-9 and row["steps"] == 15 and row["updates"] == 5
    assert row["wait_share"] == pytest.approx(5 * (20 + 10) / (5 * 90))
    assert row["grant_wait_share"] == pytest.approx(row["wait_share"]), "there is nothing else to wait for"
    assert row["zero_gap_share"] == 10 / 14, "two of the three pushes of an update follow the first at once"


def test_ssp_lets_the_fast_worker_be_one_ahead() -> None:
    outcome = played("ssp:1", workers=2, steps=5, compute=constant(10, 30))
    # It pushes at 10 (one ahead: goes on) and 20 (two ahead: waits for the push at 30), then once in each step of the slow.
    assert times(outcome, "receive", 0) == [10, 20, 40, 70, 100, 130]
    assert times(outcome, "grant", 0) == [10, 30, 60, 90, 120]
    assert times(outcome, "receive", 1) == [30, 60, 90, 120]


def test_combined_pushes_of_one_instant_are_one_version_and_the_others_one_each() -> None:
    outcome = played("asp,combine=true", workers=3, steps=4, leave=True, compute=constant(10, 20, 20))
    assert times(outcome, "fold", 0) == [10, 20, 30, 40] and times(outcome, "fold", 2) == [20, 40, 60, 80]
    row = outcome.row
    assert row["steps"] == 12 and row["updates"] == 6, "at 10, 20 (of three), 30, 40 (of three), 60 and 80 (of two)"
    # The fast one reads every version; the others miss the one at 10, then the one at 30.
    assert row["staleness"] == [(0, 8), (1, 4)]
    assert row["sigma_mean"] == pytest.approx((2 / 3 + 2 / 3) / 6)
    assert row["zero_gap_share"] == 6 / 11
    plain = row_of("asp", workers=3, steps=4, leave=True, compute=constant(10, 20, 20))
    assert plain["updates"] == 12 and plain["staleness_max"] == 3


def test_a_busy_server_finds_the_pushes_that_waited_for_it_in_one_drain() -> None:
    """An update takes 100. The push at 10 is one; those at 20, 30 and 40 wait until 110, and are one more."""
    options: dict[str, Any] = {"workers": 4, "steps": 1, "compute": constant(10, 20, 30, 40), "update_ns": 100}
    outcome = played("asp,combine=true", **options)
    assert [times(outcome, "fold", worker) for worker in range(4)] == [[10], [110], [110], [110]]
    assert outcome.row["updates"] == 2 and outcome.row["staleness"] == [(0, 1), (1, 3)]
    assert played("asp", **options).row["updates"] == 4


def test_backup_drops_the_late_worker_and_gives_it_the_newest_weights() -> None:
    outcome = played("backup:1", workers=3, steps=5, compute=constant(10, 20, 50))
    assert times(outcome, "fold", 1) == [20, 40, 60, 80, 100, 120]
    assert times(outcome, "drop", 2) == times(outcome, "grant", 2) == [50, 100]
    begun = lines_of(outcome, "begin", 2)
    assert list(begun["version"]) == [0, 2, 4], "of two versions at 50; at 100 its push comes before the fifth's last"
    assert outcome.row["dropped"] == 2 and outcome.row["staleness_max"] == 0


def test_figure_2_of_dssp_gives_three_extra_iterations_or_four_as_listed() -> None:
    """The controller finds r* = 3 at 52, and would wait 1 from 82 on."""
    model = ComputeModel("replay", replay=[[12, *[10] * 20], [1, *[41] * 20]])
    outcome = played("dssp:2,6", workers=2, steps=7, compute=model)
    assert times(outcome, "receive", 1)[:3] == [1, 42, 83]
    granted = times(outcome, "grant", 0)
    assert granted[:4] == [12, 22, 32, 42], "within s_L"
    # Line 14 sends OK without line 4's decrement: r* + 1 = 4 iterations begin before the slow push.
    assert [time_ns for time_ns in granted if 42 < time_ns < 83] == [52, 62, 72, 82]
    prose = played("dssp:2,6,credit=prose", workers=2, steps=7, compute=model)
    assert [time_ns for time_ns in times(prose, "grant", 0) if 42 < time_ns < 84] == [52, 62, 72, 83]
    ssp = played("ssp:2", workers=2, steps=7, compute=model)
    assert [time_ns for time_ns in times(ssp, "grant", 0) if 42 < time_ns < 84] == [83], "SSP waits 31 here"


def test_transfers_share_a_port_and_directions_do_not_disturb_each_other() -> None:
    """1,000 bytes at 1 byte a ns. Pushes begin at 1000 and 1500, so the first ends at 2500 (500 alone, 500 at half the rate),

    the second at 3000 (500 at half the rate, 500 alone). Pulls begin at 2500 and 3000: the first ends at 4000, the second at
    4500, in the same way, and not disturbed by the pushes.
    """
    outcome = played("asp", workers=2, steps=1, compute=constant(1000, 1500), model_bytes=1000, bandwidth=1e9)
    assert (times(outcome, "receive", 0), times(outcome, "receive", 1)) == ([2500], [3000])
    longer = played("asp", workers=2, steps=2, compute=constant(1000, 1500), model_bytes=1000, bandwidth=1e9)
    assert (times(longer, "pull", 0)[0], times(longer, "pull", 1)[0]) == (4000, 4500)
    push, pull = outcome.row["links"]
    assert (push["bytes"], push["peak"], push["direction"]) == (2000.0, 2, "push")
    assert push["share"] == pytest.approx(2000 / 3000) == push["busy_share"]
    assert (pull["bytes"], pull["peak"], pull["direction"]) == (0.0, 2, "pull"), "both are on their way at the end"


def test_a_workers_own_port_bounds_its_transfers() -> None:
    links = {"model_bytes": 1000, "bandwidth": 1e9, "worker_bandwidth": 0.25e9}
    outcome = played("asp", workers=2, steps=1, compute=constant(1000, 1500), **links)
    assert (times(outcome, "receive", 0), times(outcome, "receive", 1)) == ([5000], [5500])


def test_latency_and_slow_servers() -> None:
    outcome = played("asp", workers=1, steps=3, compute=constant(10), latency_ns=5)
    assert times(outcome, "receive", 0) == [15, 35, 55]
    links = {"latency_ns": 5, "model_bytes": 200, "bandwidth": 1e9, "slow_servers": {1: 3}}
    slow = played("asp,shards=2", workers=1, steps=2, compute=constant(10), **links)
    received = lines_of(slow, "receive")
    assert [(int(line["time_ns"]), int(line["shard"])) for line in received[:2]] == [(10 + 100 + 5, 0), (10 + 300 + 15, 1)]


def test_a_pull_of_the_version_that_is_held_moves_no_weights() -> None:
    # softsync:1 of two workers folds both together: the first push makes no version, so its answer is a word.
    outcome = played("softsync:1", workers=2, steps=2, compute=constant(1000, 4000), model_bytes=100, bandwidth=1e9)
    assert times(outcome, "receive", 0)[:2] == [1100, 2200]
    assert times(outcome, "pull", 0)[0] == 1100


def test_late_answers_leave_partial_pulls_with_old_blocks() -> None:
    options: dict[str, Any] = {"workers": 4, "steps": 200, "compute": VARIED, "late_pulls": (0.05, 500_000_000)}
    partial, full = (row_of(spec, **options) for spec in ("psp:3,0.75", "psp:3,1"))
    assert partial["stale_blocks"] > 0 and full["stale_blocks"] == 0
    assert partial["steps_per_s"] > 2 * full["steps_per_s"]


def test_overlap_hides_transfers() -> None:
    options: dict[str, Any] = {"workers": 4, "steps": 200, "compute": constant(10_000), "model_bytes": 5000, "bandwidth": 1e9}
    plain, hidden = (row_of(spec, **options) for spec in ("softsync:1", "adv*:1"))
    assert hidden["wait_share"] < 0.01
    assert hidden["steps_per_s"] == pytest.approx(4 / 10e-6, rel=0.01)
    assert plain["steps_per_s"] < 0.55 * hidden["steps_per_s"], "four pushes and pulls of 5 us share one port"


def test_a_tree_halves_the_load_of_its_ports() -> None:
    options: dict[str, Any] = {"workers": 8, "steps": 100, "compute": constant(1000), "model_bytes": 5000, "bandwidth": 1e9}
    base, tree = (row_of(spec, **options) for spec in ("softsync:1", "adv:1"))
    assert len(base["links"]) == 2 and len(tree["links"]) == 4
    assert base["link_share_max"] == pytest.approx(0.5, abs=0.01), "all push together, then all pull together"
    assert tree["steps_per_s"] == pytest.approx(2 * base["steps_per_s"], rel=0.1)


def test_tuned_batches_make_workers_take_equally_long() -> None:
    model = replace(parse_compute("constant:10ms"), factors={0: 3.0})
    outcome = played("r2sp:0.8,tune=true", workers=4, steps=50, compute=model, batch=16)
    last = {int(line["worker"]): int(line["detail"]) for line in lines_of(outcome, "begin")}
    assert last == {0: 16, 1: 48, 2: 48, 3: 48}
    plain = row_of("r2sp:0.8", workers=4, steps=50, compute=model, batch=16)
    assert outcome.row["samples_per_s"] > 2 * plain["samples_per_s"]


def test_batches_of_one_sum_end_together() -> None:
    """Three workers as fast as 9 slow ones, and a slow one: 10 parts of 64 samples."""
    model = replace(parse_compute("constant:10ms"), factors={0: 3.0})
    outcome = played("bsp,tune=true", workers=4, steps=50, compute=model, batch=16)
    last = {int(line["worker"]): int(line["detail"]) for line in lines_of(outcome, "begin")}
    assert last.pop(0) == 6 and sorted(last.values()) == [19, 19, 20]
    plain = row_of("bsp", workers=4, steps=50, compute=model, batch=16)
    assert outcome.row["samples_per_s"] > 2.2 * plain["samples_per_s"], "2.4 but for the first two versions"


def test_workers_that_leave_have_done_their_own_steps() -> None:
    outcome = played("asp", workers=3, steps=7, leave=True, compute=constant(10, 20, 50))
    assert [len(times(outcome, "receive", worker)) for worker in range(3)] == [7, 7, 7]
    assert [times(outcome, "leave", worker) for worker in range(3)] == [[80], [160], [400]], "when the next push would come"


def test_what_a_killed_worker_computes_is_lost_and_one_in_its_place_begins_at_the_clock_of_the_slowest() -> None:
    changes = ((25, 1, False), (47, 1, True))
    outcome = played("ssp:1", workers=2, steps=6, leave=True, compute=constant(20, 10), changes=changes)
    assert [times(outcome, kind, 1) for kind in ("death", "join")] == [[25], [47]]
    assert times(outcome, "receive", 1) == [10, 20, 57, 67, 77, 90], "the third was lost; it begins at clock 2, worker 0's"
    assert times(outcome, "receive", 0) == [20, 40, 60, 80, 100, 120], "a dead worker holds nobody up"
    assert times(outcome, "leave", 1) == [110] and outcome.row["steps"] == 12


def test_a_worker_joins_once_all_that_was_sent_from_its_place_is_folded() -> None:
    changes = ((25 * MS, 1, False), (26 * MS, 1, True))
    outcome = played("bsp", workers=2, steps=4, compute=constant(40 * MS, 20 * MS), changes=changes)
    assert times(outcome, "death", 1) == [25 * MS]
    assert times(outcome, "join", 1) == [40 * MS], "its push of 20 ms waits for worker 0's"


@pytest.mark.parametrize(("spec", "changes", "message"), [
    ("asp", [(1, 4, False)], "--kill: expected workers of 0 to 3, found 4"),
    ("asp", [(1, 2, True)], "--join: expected a --kill and then a --join of worker 2, in turn, found a --join of one"),
    ("asp", [(1, 2, False), (2, 2, False)], "in turn, found two --kill"),
    ("adv*:1", [(1, 2, False)], "--kill: expected pulls that a step waits for"),
    ("ssp:1,shards=2", [(1, 2, False), (2, 2, True)], "--join: expected one shard, found 2"),
])  # fmt: skip
def test_changes_that_cannot_be_are_refused(spec: str, changes: list[tuple[int, int, bool]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        played(spec, workers=4, steps=5, changes=changes)


# -- the oracles -----------------------------------------------------------------------------------


EVENTS = ("receive", "timer", "leave", "death", "join")
MS = 1_000_000
KILLS = ((99 * MS, 2, False), (301 * MS, 5, False))
ENDS: dict[str, dict[str, Any]] = {
    "budget": {},
    "leave": {"leave": True},
    "killed": {"changes": (*KILLS, (307 * MS, 2, True), (308 * MS, 5, True), (350 * MS, 0, False))},
}
NETWORKS: dict[str, dict[str, Any]] = {
    "instant": {},
    "shared": {"model_bytes": 1e6, "bandwidth": 1e9, "latency_ns": 50_000, "late_pulls": (0.02, 60_000_000)},
}


def decisions(trace: Any, shard: int) -> Iterator[tuple[Any, list[int], list[int], int]]:
    """Each event of a shard's scheduler with what it decided: (line, folded, granted, dropped)."""
    event, folded, granted, dropped = None, [], [], 0
    for line in trace[trace["shard"] == shard]:
        kind = TRACE_KINDS[line["kind"]]
        if kind in EVENTS:
            if event is not None:
                yield event, sorted(folded), sorted(granted), dropped
            event, folded, granted, dropped = line, [], [], 0
        elif kind == "fold":
            folded.append(int(line["worker"]))
        elif kind == "grant":
            granted.append(int(line["worker"]))
        elif kind == "drop":
            dropped += 1
    yield event, sorted(folded), sorted(granted), dropped


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("judged", SIMULATED, ids=lambda judged: judged.name)
def test_decisions_are_the_oracles_at_the_same_times(judged: Play, end: str, network: str) -> None:
    workers, steps = 7, 40
    model = replace(VARIED, factors={0: 2.5})
    policy, options = parse_policy(judged.name), ENDS[end]
    if end == "killed" and policy.overlap:
        pytest.skip("not simulated")
    if end == "killed" and policy.shards > 1:
        options = {"changes": KILLS}
    outcome = played(judged.name, workers=workers, steps=steps, compute=model, seed=11, **options, **NETWORKS[network])
    for shard in range(outcome.row["shards"]):
        oracle, seen = judged.oracle(workers), 0
        for event, folded, granted, dropped in decisions(outcome.trace, shard):
            kind, worker, now_ns = TRACE_KINDS[event["kind"]], int(event["worker"]), int(event["time_ns"])
            dropped_before = sum(oracle.dropped.values())
            if kind == "timer":
                assert oracle.due_ns() == now_ns
                expected = oracle.fire()
            elif kind in ("leave", "death"):
                expected = oracle.leave(worker, now_ns)
            elif kind == "join":
                expected = oracle.join(worker, now_ns)
            elif judged.plays.timed:
                expected = oracle.push(worker, now_ns, int(event["version"]), int(event["detail"]))
            else:
                expected = oracle.push(worker, now_ns)
            assert (folded, granted) == (sorted(expected[0]), expected[1]), f"{judged.name}, shard {shard}: {kind} {event}"
            assert dropped == sum(oracle.dropped.values()) - dropped_before
            seen += kind == "receive"
        assert seen >= workers * steps * 0.9


COMBINED = ["asp,combine=true", "ssp:2,combine=true", "dssp:1,6,combine=true"]
BUSY: dict[str, Any] = {"service_ns": 200_000, "update_ns": 3_000_000}


@pytest.mark.parametrize("surroundings", [{}, NETWORKS["shared"], BUSY, {**NETWORKS["shared"], **BUSY}], ids=str)
@pytest.mark.parametrize("leave", [False, True], ids=["budget", "leave"])
@pytest.mark.parametrize("spec", COMBINED)
def test_combined_decisions_are_the_oracles_drain_by_drain(spec: str, leave: bool, surroundings: dict[str, Any]) -> None:
    workers, steps = 7, 40
    model = replace(parse_compute("normal:10ms,2ms"), factors={0: 2.5})
    outcome = played(spec, workers=workers, steps=steps, leave=leave, compute=model, seed=11, **surroundings)
    assert outcome.row["steps"] == workers * steps
    oracle, granted_since = play(spec).oracle(workers), list[int]()
    for event, folded, granted, _ in decisions(outcome.trace, 0):
        kind, worker, now_ns = TRACE_KINDS[event["kind"]], int(event["worker"]), int(event["time_ns"])
        decided = getattr(oracle, "leave" if kind == "leave" else "push")(worker, now_ns)
        granted_since += decided[1]
        assert decided[0] == []
        if kind == "leave":
            assert (folded, granted) == ([], sorted(granted_since))
        elif folded:
            assert (folded, granted) == (oracle.close()[0], sorted(granted_since)), f"{spec}: drain at {event}"
        else:
            assert granted == [], "grants are those of the whole drain"
            continue
        granted_since = []
    assert outcome.row["updates"] == oracle.version
    if "update_ns" in surroundings:
        assert oracle.version < 0.8 * workers * steps, "pushes meet at a busy server"


@pytest.mark.parametrize("spec", [*COMBINED, "ssp:1,shards=3,combine=true"])
def test_every_combined_push_is_folded_once_and_as_stale_as_versions_say(spec: str) -> None:
    outcome = played(spec, workers=7, steps=40, leave=True, compute=VARIED, **NETWORKS["shared"], **BUSY)
    folds = lines_of(outcome, "fold")
    for shard in range(outcome.row["shards"]):
        lines = folds[folds["shard"] == shard]
        assert len(lines) == 280
        before = (lines["version"] + lines["detail"]).tolist()
        assert before == sorted(before) and set(before) == set(range(before[-1] + 1)), "versions follow each other"
        assert lines["detail"].min() >= 0


@pytest.mark.parametrize("judged", SIMULATED, ids=lambda judged: judged.name)
def test_every_push_is_folded_or_dropped_once_or_still_waits(judged: Play) -> None:
    row = row_of(judged.name, workers=7, steps=40, leave=True, compute=VARIED, **NETWORKS["shared"])
    assert row["steps"] == 280
    folded = sum(count for _, count in row["staleness"])
    assert folded + row["dropped"] == 280 * row["shards"], "all have left, so nothing waits"


# -- what the papers say of staleness -----------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 4, 15, 30])
def test_softsyncs_mean_staleness_is_n(n: int) -> None:
    """Rudra, Figure 4: with lambda = 30, <sigma> is n for n-softsync, and sigma hardly ever above 2 n."""
    row = row_of(f"softsync:{n}", workers=30, steps=400, compute=parse_compute("normal:10ms,1ms"))
    assert row["sigma_mean"] == pytest.approx(n, rel=0.1)
    above = sum(count for versions, count in row["staleness"] if versions > 2 * n)
    assert above / 12_000 < 0.001


@pytest.mark.parametrize("workers", [2, 5, 16])
def test_r2sps_staleness_is_at_most_n_minus_1_and_reaches_it(workers: int) -> None:
    """R2SP, section III-C, and figure 4b: equal workers always miss so many; figure 8: they push one by one."""
    equal = constant(*[4_800_000] * workers)
    for spec, compute in (("r2sp:1", VARIED), ("r2sp:0.8", VARIED), ("r2sp:1", equal), ("r2sp:0.8", equal)):
        row = row_of(spec, workers=workers, steps=100, compute=compute)
        assert row["staleness_max"] == workers - 1
        if compute is equal:
            assert dict(row["staleness"])[workers - 1] >= row["steps"] - 10 * workers, "once they have settled"
            assert row["zero_gap_share"] == 2 * (workers - 1) / (row["steps"] - 1), "those of the first two rounds"


def test_disciplines_are_compared_on_the_same_computing_times() -> None:
    bsp, asp = (played(spec, workers=3, steps=30, leave=True, compute=VARIED) for spec in ("bsp", "asp"))
    assert list(lines_of(bsp, "computed", 1)["detail"]) == list(lines_of(asp, "computed", 1)["detail"])


# -- usage -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("texts", "numbers", "message"), [
    ({"compute": "weibull:1ms"}, {}, "--compute: expected one of constant:TIME"),
    ({"compute": "constant:10"}, {}, "expected a time such as 10ms"),
    ({"compute": "lognormal:10ms"}, {}, r"expected lognormal:MEDIAN,SIGMA, found 'lognormal:10ms'"),
    ({"compute": "pareto:10ms,0"}, {}, "a Pareto shape of more than 0"),
    ({"compute": "replay:/no/such/file"}, {}, "expected a text file of times"),
    ({"speed": ["0"]}, {}, "--speed: expected NUMBER:FACTOR"),
    ({"straggler": ["a:3"]}, {}, "--straggler: expected NUMBER:FACTOR"),
    ({"burst": "1s:2s"}, {}, "--burst: expected EVERY:LENGTH:FACTOR"),
    ({"bandwidth": "10Gbit"}, {}, "--bandwidth needs --model-bytes"),
    ({"bandwidth": "10furlongs", "model_bytes": "1MB"}, {}, "--bandwidth: expected a rate per second"),
    ({"service_rate": "1GB"}, {}, "--service-rate needs --model-bytes"),
    ({"service_time": "5"}, {}, "--service-time: expected a time such as 10ms"),
    ({"late_pull": "2:1s"}, {}, "--late-pull: expected a number of 0 to 1"),
    ({}, {"workers": 0}, "--workers: expected 1 to"),
    ({}, {"steps": 0}, "--steps: expected 1 to"),
    ({}, {"seed": -1}, "--seed: expected 0 to"),
])  # fmt: skip
def test_wrong_options_are_refused_in_one_sentence(texts: dict[str, Any], numbers: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_simulation(SimulationTexts(**{"compute": "constant:10ms", **texts}), **numbers)


def test_what_does_not_fit_the_workers_or_shards_is_refused() -> None:
    with pytest.raises(UsageError, match="found one for worker 9"):
        simulate(parse_policy("asp"), Simulation(workers=4, compute=ComputeModel(factors={9: 2.0})))
    with pytest.raises(UsageError, match="--slow-server: expected a shard of 0 to 3, found 4"):
        simulate(parse_policy("psp:3,0.75"), Simulation(slow_servers={4: 2.0}))
    with pytest.raises(PolicyError, match="expected c of 1 to 4"):
        simulate(parse_policy("psp:5,0.75"), Simulation(workers=4))
    with pytest.raises(PolicyError, match="expected shards of 1 to 64"):
        read_policies("asp", 65)


def test_options_are_read_as_written() -> None:
    texts = SimulationTexts(compute="normal:10ms,2ms", speed=["0:2"], straggler=["0-1:3"], latency="50us", late_push="0.01:1s")
    texts = replace(texts, service_time="5us", service_rate="4.8GB", update_time="1ms", model_bytes="1MB")
    simulation = read_simulation(texts, workers=4, seed=3)
    assert (simulation.service_ns, simulation.service_rate, simulation.update_ns) == (5000, 4.8e9, 1_000_000)
    assert simulation.compute == ComputeModel("normal", 10e6, 2e6, {0: 1.5, 1: 3.0})
    assert (simulation.latency_ns, simulation.late_pushes) == (50_000, (0.01, 1_000_000_000))


def test_times_are_replayed_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "times.txt"
    file.write_text("10ns 20ns\n\n30ns\n")
    outcome = played("asp", workers=2, steps=3, compute=parse_compute(f"replay:{file}"))
    assert times(outcome, "receive", 0) == [10, 30, 40, 60] and times(outcome, "receive", 1) == [30, 60]


def test_a_simulation_in_which_all_wait_for_ever_ends_with_an_error() -> None:
    compute = ComputeTimes("constant", 10.0, 0.0, np.ones(2), 0)
    network = Network(np.zeros(1), np.zeros(1, np.int64))
    simulator = Simulator({"fold": "each", "grant": "at-once"}, compute, network, np.zeros(2, np.int32), needed=2, steps=9)
    with pytest.raises(RuntimeError, match="after 2 pushes every worker waits"):
        simulator.run(1000)


def test_a_simulation_whose_workers_are_all_killed_before_they_push_has_a_row_of_zeros() -> None:
    outcome = commands.fastps("simulate", "-n", "1", "--sync", "asp,bsp", "--kill", "0@1ms", "--json", "-")
    assert outcome.returncode == 0, outcome.stderr
    assert [(row["steps"], row["steps_per_s"], row["samples_per_s"]) for row in json.loads(outcome.stdout)["rows"]] == [
        (0, 0, 0)
    ] * 2


def test_the_command_writes_rows_trace_and_table(tmp_path: Path) -> None:
    trace = tmp_path / "trace.npy"
    arguments = ["--sync", "ssp:3", "--steps", "50", "--straggler", "0:3", "--seed", "4", "--trace", str(trace), "--json", "-"]
    outcome = commands.fastps("simulate", *arguments)
    assert outcome.returncode == 0, outcome.stderr
    found = json.loads(outcome.stdout)
    assert found["command"] == "simulate" and found["rows"][0]["steps"] == 200
    design = {
        "sync", "workers", "seconds", "steps", "samples_per_s", "staleness_mean", "staleness_max", "wait_share", "dropped",
    }  # fmt: skip
    assert design <= set(found["rows"][0])
    assert "steps/s" in outcome.stderr
    texts = SimulationTexts(compute="lognormal:10ms,0.3", straggler=["0:3"])
    again = simulate(parse_policy("ssp:3"), read_simulation(texts, workers=4, steps=50, seed=4), trace=True)
    assert again.trace is not None and np.load(trace).tobytes() == again.trace.tobytes()


@pytest.mark.slow
def test_ctrl_c_ends_a_long_run_at_once_and_without_a_traceback() -> None:
    command = [sys.executable, "-m", "fastps.cli", "simulate", "--sync", "asp", "-n", "1000", "--steps", "10000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        # It plays, and no longer imports, when it has spent a while on a core.
        wait_until(lambda: sum(psutil.Process(process.pid).cpu_times()[:2]) > 3, 120)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        try:
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 130
    assert time.monotonic() - began < 5
    assert "Traceback" not in errors
