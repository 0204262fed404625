"""Advice from recorded runs: cores by hand, the same decisions live and simulated, the same bytes twice, and the choice."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps
from fastps.advice import advise as advice
from fastps.advice import replay
from fastps.errors import UsageError
from fastps.lab.virtual.compute_texts import parse_compute
from fastps.simulation.simulate import TRACE_KINDS, ComputeModel, Outcome, Simulation
from fastps.system.clock import Clock
from fastps.tracing import summary as trace_summary
from fastps.tracing.check import check
from fastps.tracing.file import DROPPED, FOLDED, PUSH_DTYPE, STEP_DTYPE, Trace, read, write
from tests.report import traces
from tests.support import commands
from tests.support.virtual_runs import lines_of, played, times

MS = 1_000_000


def _steps(*needs: tuple[int, int]) -> ComputeModel:
    """Each worker always needs as much of a core, and then waits as long without one."""
    return ComputeModel("replay", replay=[[cpu] for cpu, _ in needs], blocked=[[blocked] for _, blocked in needs])


# -- cores, by hand --------------------------------------------------------------------------------


def test_two_workers_on_one_core_take_twice_as_long() -> None:
    """In slices of 50: 0 to 50 and 100 to 150 are worker 0's. Who comes back goes to the end of the line."""
    shared = played("asp", workers=2, steps=2, compute=_steps((100, 0), (100, 0)), cores=1, slice_ns=50)
    assert (times(shared, "computed", 0), times(shared, "computed", 1)) == ([150, 350], [200, 400])
    whole = played("asp", workers=2, steps=2, compute=_steps((100, 0), (100, 0)), cores=1)
    assert (times(whole, "computed", 0), times(whole, "computed", 1)) == ([100, 300], [200, 400])
    own = played("asp", workers=2, steps=2, compute=_steps((100, 0), (100, 0)))
    assert times(own, "computed", 1) == [100, 200]


def test_whoever_waits_without_a_core_leaves_it_to_others() -> None:
    """In turns of 20 until 120, when worker 1 has had its 60; then worker 0 has the core for its last 40 and sleeps 100."""
    outcome = played("bsp", workers=2, steps=1, compute=_steps((100, 100), (60, 0)), cores=1, slice_ns=20)
    assert times(outcome, "computed", 1) == [120]
    assert times(outcome, "computed", 0) == [160 + 100]


def test_three_equal_steps_on_two_cores_take_two_times_one_or_in_small_slices_one_and_a_half() -> None:
    for slice_ns, ends in ((1000, [600, 600, 1200]), (10, [890, 900, 900])):
        outcome = played("bsp", workers=3, steps=1, compute=_steps(*[(600, 0)] * 3), cores=2, slice_ns=slice_ns)
        assert sorted(times(outcome, "computed", worker)[0] for worker in range(3)) == ends


def test_a_fraction_of_a_core_makes_both_slower_and_none_is_faster_than_one() -> None:
    for cores, end in ((1.5, 800), (2.0, 600), (2.5, 720)):  # 2.5 are three, of which each has five sixths
        outcome = played("bsp", workers=4, steps=1, compute=_steps((600, 0), *[(1, 0)] * 3), cores=cores)
        assert times(outcome, "computed", 0) == [end]


def test_of_those_who_go_on_together_who_waited_longest_has_a_core_first() -> None:
    """Worker 0 is done last, and wakes the others: it waits for the core until both have had it."""
    outcome = played("bsp", workers=3, steps=2, compute=_steps((100, 500), (100, 0), (100, 0)), cores=1)
    assert [times(outcome, "computed", worker) for worker in range(3)] == [[600, 1400], [200, 700], [300, 800]]


def test_a_straggler_that_sleeps_slows_nobody_down() -> None:
    rows = {
        name: played("asp", workers=4, steps=50, compute=_steps(first, *[(10 * MS, 0)] * 3), cores=2).row["steps_per_s"]
        for name, first in (("busy", (30 * MS, 0)), ("asleep", (10 * MS, 20 * MS)))
    }
    assert rows["busy"] < 0.9 * rows["asleep"]


def test_pushes_and_pulls_of_a_half_duplex_link_share_it() -> None:
    """1,000 bytes at 1 byte a ns. Worker 0 pushes from 10; from 510 on it shares with worker 1, so that it ends at 1510. Full
    duplex leaves the other's last 500 bytes alone then (2010); half duplex shares with worker 0's pull (2510)."""
    options: dict[str, Any] = {"compute": _steps((10, 0), (510, 0)), "model_bytes": 1000, "bandwidth": 1e9}
    for half, then in ((False, 2010), (True, 2510)):
        outcome = played("asp", workers=2, steps=1, **options, half_duplex=half)
        assert (times(outcome, "receive", 0)[0], times(outcome, "receive", 1)[0]) == (1510, then)


# -- the same decisions live -----------------------------------------------------------------------


class Scripted(Clock):
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.time_ns = 0

    def now_ns(self) -> int:
        return self.time_ns


@pytest.mark.parametrize("spec", [
    "bsp", "asp", "ssp:3", "dssp:3,15", "dssp:1,4,release=printed", "backup:1", "softsync:2", "r2sp:0.8", "r2sp:0.8,tune=true",
])  # fmt: skip
def test_a_live_store_decides_as_the_simulator_when_events_come_at_the_same_times(spec: str, tmp_path: Path) -> None:
    """Four workers of one process push, begin and fire timers when the simulation says; all fates must be the simulation's."""
    model = replace(parse_compute("lognormal:10ms,0.4"), factors={0: 3.0})
    outcome = played(spec, workers=4, steps=60, compute=model, batch=8, seed=3)
    clock, file, origin_ns = Scripted(), tmp_path / "run.trace", 1_000_000_000
    weights = {"w": np.ones(8, np.float32)}
    clock.time_ns = origin_ns
    with fastps.trace(file), fastps.Store.create(weights, fastps.SGD(lr=0.1), sync=spec, workers=4, clock=clock) as store:
        workers = [store.attach(rank) for rank in range(4)]
        reads = _drive(outcome, workers, clock, origin_ns)
        assert reads == [(int(line["worker"]), int(line["version"])) for line in lines_of(outcome, "begin")]
        for worker in workers:
            worker.close()
    trace = read(file)
    assert check(trace) == []
    _compare_fates(outcome, trace, origin_ns)


def _drive(outcome: Outcome, workers: list[fastps.Worker], clock: Scripted, origin_ns: int) -> list[tuple[int, int]]:
    """Play the simulation's lines with live workers; returns (worker, version) of each step that begins."""
    assert outcome.trace is not None
    reads = []
    for line in outcome.trace:
        clock.time_ns = origin_ns + int(line["time_ns"])
        kind, rank = TRACE_KINDS[line["kind"]], int(line["worker"])
        if kind == "receive":
            workers[rank].push(workers[rank].store.hypers, samples=int(line["detail"]))
        elif kind == "timer":
            workers[0].lane.try_combine(clock.time_ns)
        elif kind == "begin":
            worker = workers[rank]
            if worker.steps:
                policy = worker.store.layout.policy
                assert policy.at_once or worker.lane.granted() > worker.steps, "live it may not begin yet"
                worker.advance()
                worker.pull()
            reads.append((rank, worker.version))
    return reads


def _compare_fates(outcome: Outcome, trace: Trace, origin_ns: int) -> None:
    """Who is folded when and how stale, and who is dropped, in the order of the decisions."""
    assert outcome.trace is not None
    until_ns = int(outcome.trace["time_ns"].max())
    for kind, fate in (("fold", FOLDED), ("drop", DROPPED)):
        simulated = lines_of(outcome, kind)
        expected = sorted((int(x["time_ns"]), int(x["worker"]), int(x["detail"]) if kind == "fold" else 0) for x in simulated)
        lines = trace.pushes[(trace.pushes["fate"] == fate) & (trace.pushes["decided_ns"] <= origin_ns + until_ns)]
        found = sorted((int(x["decided_ns"]) - origin_ns, int(x["worker"]), int(x["staleness"])) for x in lines)
        assert found[: len(expected)] == expected
        assert len(found) - len(expected) <= 4, "only what leaving workers complete comes after"
        assert expected or kind == "drop"


# -- replay and advice -----------------------------------------------------------------------------


def made(cpu_ms: list[float], blocked_ms: list[float], *, steps: int = 50, queue: bool = True, cores: int = 2) -> Trace:
    """A trace of workers that never wait for each other, as asp's; on `cores` cores each waits half of a step for one."""
    lines, pushes, version = [], [], 0
    for worker, (cpu, blocked) in enumerate(zip(cpu_ms, blocked_ms, strict=True)):
        now_ns = 10**9
        for step in range(steps):
            wall_ns = int((2 * cpu + blocked) * MS)
            computed_ns, cpu_ns = now_ns + wall_ns, int(cpu * MS)
            times = (now_ns, computed_ns, computed_ns, computed_ns, computed_ns, computed_ns, cpu_ns)
            lines.append((*times, cpu_ns if queue else -1, 0, 0, 0, 0, step, 16, worker, 0, 1))
            version += 1
            pushes.append((step, step, 0, version, computed_ns, 0, worker, 0, FOLDED, 1))
            now_ns = computed_ns
    header = traces.header("asp", len(cpu_ms), machine={"cores": cores})
    return Trace(header, np.array(lines, STEP_DTYPE), np.array(pushes, PUSH_DTYPE))


@pytest.mark.parametrize("queue", [True, False])
def test_blocked_time_is_told_from_waiting_for_a_core(queue: bool) -> None:
    trace = made([5, 5, 5, 5], [10, 0, 0, 0], queue=queue)
    blocked = trace_summary.blocked_ns(trace.steps)
    assert set(blocked[trace.steps["worker"] == 0]) == {10 * MS}
    assert set(blocked[trace.steps["worker"] > 0]) == {0}


def test_the_replay_predicts_a_run_on_its_cores() -> None:
    """Four workers that need a core for 5 ms a step on two cores: 400 steps/s if all want one always."""
    trace = made([5, 5, 5, 5], [0, 0, 0, 0])
    test = advice.self_test(trace)
    assert test["measured"] == pytest.approx(400, rel=0.05)
    assert test["error"] == pytest.approx(0, abs=0.05)
    assert advice.self_test(trace, cores=4)["predicted"] == pytest.approx(800, rel=0.02)


def test_cores_that_others_used_are_not_counted() -> None:
    trace = made([5, 5], [0, 0])
    notes = {str(rank): {"load": {"now_ns": 10**9, "machine_ns": 15 * 10**8, "thread_ns": 5 * 10**8}} for rank in range(2)}
    loaded = replace(trace, header={**trace.header, "of_worker": notes})
    assert replay.cores_left(trace) == 2.0
    assert replay.cores_left(loaded) == pytest.approx(1.5), "of 1.5 busy cores the two workers were 1"


@pytest.mark.slow
def test_workers_that_mostly_sleep_have_the_cores_that_others_give_up_for_them(tmp_path: Path) -> None:
    """Two busy programs use both cores, and a worker waits for a core as long as it uses one: it has half of one."""
    trace = made([1, 1], [40, 40])
    trace.steps["queue_ns"], trace.steps["cpu_ns"] = MS, MS
    notes = {str(rank): {"load": {"now_ns": 10**9, "machine_ns": 2 * 10**9, "thread_ns": 2 * 10**7}} for rank in range(2)}
    busy = replace(trace, header={**trace.header, "of_worker": notes})
    assert replay.cores_left(busy) == pytest.approx(0.5)
    write(busy, tmp_path / "busy.trace")
    shown = [commands.fastps("advise", str(tmp_path / "busy.trace"), *cores).stdout for cores in ((), ("--cores", "2"))]
    said = "on 0.50 cores, because other programs used the rest of 2; --cores 2 predicts a machine without them"
    assert said in " ".join(shown[0].split()) and "other programs" not in shown[1]


def test_a_straggler_gets_smaller_batches_and_all_else_stays() -> None:
    rows = advice.advise(traces.bsp([25, 5, 5, 5], 60))
    (chosen,) = [row for row in rows if row["recommended"]]
    assert chosen["sync"] == "bsp,tune=true" and chosen["dropped_share"] == chosen["staleness_max"] == 0
    assert chosen["gain"] == pytest.approx((3 + 1 / 5) / (4 / 5) - 1, rel=0.1), "their speeds, over four times the slowest"
    assert chosen["gain_low"] == pytest.approx(chosen["gain"]) == pytest.approx(chosen["gain_high"])
    stays = "the learning rate stays; draw with fastps.shard or fastps.BatchSampler, whose batches follow the grants"
    assert chosen["reason"].endswith(stays)


def test_a_straggler_whose_batch_stays_gets_a_discipline_that_does_not_wait_for_it() -> None:
    trace = traces.bsp([25, 5, 5, 5], 60)
    rows = advice.advise(trace, [spec for spec in advice.candidates(4, 16, backups=1) if "tune" not in spec])
    by_sync = {row["sync"]: row for row in rows}
    (chosen,) = [row for row in rows if row["recommended"]]
    assert [row["progress"] for row in rows] == sorted((row["progress"] for row in rows), reverse=True)
    assert by_sync["bsp"]["speed"] < 0.5, "five times as slow a worker holds everybody up"
    assert by_sync["asp"]["speed"] > 0.95 > by_sync["asp"]["expected"]
    assert chosen["sync"] == "backup:1" and chosen["dropped_share"] > 0
    low, high = chosen["gain_low"], chosen["gain_high"]
    assert 1 < low < chosen["gain"] < high
    assert (
        f"expected to get {chosen['gain']:.0%} further in the same time than bsp ({low:+.0%} to {high:+.0%}" in chosen["reason"]
    )
    assert chosen["reason"].endswith("begin with bsp's / 1.3; 6% of the pushes are dropped, those of the slowest")


def test_even_workers_are_told_to_wait_for_each_other() -> None:
    rows = advice.advise(made([5, 5, 5, 5], [0, 0, 0, 0]))
    (chosen,) = [row for row in rows if row["recommended"]]
    assert chosen["staleness_max"] == 0 and chosen["dropped_share"] == 0


def test_nothing_is_recommended_where_the_replay_is_off_or_no_other_gets_further() -> None:
    off = made([5, 5, 5, 5], [0, 0, 0, 0], cores=4)  # its workers waited for cores that were free
    (stays,) = [row for row in advice.advise(off) if row["recommended"]]
    assert stays["sync"] == "asp"
    assert "the replay is off by +100% from the recorded run, and more than 15% decides nothing" in stays["reason"]
    (stays,) = [row for row in advice.advise(traces.bsp([5, 5, 5, 5], 60)) if row["recommended"]]
    assert stays["sync"] == "bsp" and stays["reason"].startswith("nothing else is recommended: ")
    own = {"sync": "bsp", "progress": 100.0, "staleness_mean": 0.0, "dropped_share": 0.0}
    other = {**own, "sync": "backup:1", "progress": 108.0, "gain": 0.08, "gain_low": 0.02}
    measured_more = advice.Recorded(error=-0.12)
    assert advice.recommend([other, own], own, measured_more)[1].endswith("backup:1 is expected below what was measured")
    unsure = {**other, "gain_low": -0.04}
    assert advice.recommend([unsure, own], own, advice.Recorded())[1].endswith("8% ahead, but for some tasks -4%")


def test_high_momentum_of_sgd_brings_each_workers_own_among_the_candidates() -> None:
    sgd = advice.Recorded(momentum=0.9, is_sgd=True)
    assert "asp,momentum=worker" in advice.candidates(4, 16, sgd)
    for other in (None, replace(sgd, momentum=0.3), replace(sgd, is_sgd=False)):
        assert not [spec for spec in advice.candidates(4, 16, other) if "momentum" in spec]


@pytest.mark.parametrize(("pushes", "batch", "gain", "bears"), [
    (15, 16, 0.1, True), (8, 16, 0.1, True), (8, 8, 0.1, False), (8, 8, 3.5, True),
])  # fmt: skip
def test_auto_takes_smaller_versions_only_where_they_bear_the_rate(pushes: int, batch: int, gain: float, bears: bool) -> None:
    own = {"useful_steps_per_s": 16.0, "updates_per_s": 1.0}
    row = {"useful_steps_per_s": 2.0 * pushes, "updates_per_s": 2.0, "gain": gain}
    assert advice.bears_rate(row, own, batch) == bears
    of = {"sync": "backup:1", "staleness_mean": 0.0, "dropped_share": 0.0, **row}
    stays = advice.tuning(of, {"sync": "bsp", **own}) == "the learning rate stays"
    assert stays == (pushes == 15)


@pytest.mark.parametrize(("slow", "expected"), [(0, 0), (1, 1), (2, 2), (4, 4)])
def test_the_backups_follow_from_the_times(slow: int, expected: int) -> None:
    model = replace(parse_compute("lognormal:10ms,0.02"), factors=dict.fromkeys(range(slow), 5.0))
    assert advice.best_backups(Simulation(workers=8, compute=model), advice.Recorded(batch=16)) == expected


def test_injected_transfers_are_replayed_as_a_shared_link() -> None:
    trace = made([5, 5, 5, 5], [0, 0, 0, 0], cores=4)
    notes = {rank: {**note, "transfer_ns": 4 * MS} for rank, note in trace.header["of_worker"].items()}
    slow = replace(trace, header={**trace.header, "of_worker": notes})
    rows = {row["sync"]: row for row in advice.advise(slow, ["asp", "softsync:4", "adv:1"])}
    assert rows["asp"]["steps_per_s"] == pytest.approx(125, rel=0.05), "a push and a pull of 4 ms each, one after the other"
    assert rows["adv:1"]["steps_per_s"] > 1.5 * rows["asp"]["steps_per_s"], "a link for each leaf"


def test_the_trace_of_a_warm_up_and_of_a_policy_of_ones_own_are_replayed() -> None:
    trace = made([5, 5], [0, 0])
    for policy, expected in ((fastps.parse_policy("auto"), "bsp"), (fastps.Policy(fold="each", grant="at-once"), None)):
        rows = advice.advise(replace(trace, header={**trace.header, "policy": asdict(policy)}))
        assert (expected or policy.spec) in {row["sync"] for row in rows}


def test_a_trace_that_is_too_short_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 4 steps of every worker, found 3 of worker 0"):
        advice.advise(made([5, 5], [0, 0], steps=3))
