"""Findings: what a trace of known facts is said to show, in which order, and in which words."""

import signal
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastps.advice.advise import advise
from fastps.report.findings import BAD, GOOD, NOTE, WARNING, Finding, facts_of, findings_of, lead_bound, straggler_of
from fastps.tracing.check import check
from fastps.tracing.file import DROPPED, EVENT_DEATH, EVENT_DTYPE, EVENT_JOIN, Trace
from tests.report.traces import BEGIN, MS, asp, bsp, with_end


def _findings(trace: Trace, advice: Any = ()) -> dict[str, Finding]:
    return {each.kind: each for each in findings_of(facts_of(trace, advice))}


def _killed() -> Trace:
    """Worker 1 is slow, and worker 2 makes 30 of 100 steps."""
    trace = bsp([10, 30, 10, 10], 100, {2: 30})
    return with_end(trace, 2, -signal.SIGKILL, BEGIN + 1000 * MS)


def test_the_traces_of_these_tests_are_right() -> None:
    for trace in (bsp([5, 5, 9], 20), bsp([5, 9, 5], 20, {2: 7}), asp([5, 5, 15], 20)):
        assert check(trace) == []


def test_a_straggler_and_a_killed_worker_are_the_first_that_a_reader_sees() -> None:
    found = findings_of(facts_of(_killed()))
    assert [each.kind for each in found[:3]] == ["killed", "straggler", "waits"]
    killed, straggler, waits = found[:3]
    assert (killed.level, killed.worker, killed.at_s) == (BAD, 2, 1.0)
    assert killed.title == "Worker 2 was killed by SIGKILL, 1 s into the run."
    assert "It had made 30 steps; workers 0, 1 and 3 went on without it for 2.0" in killed.detail
    assert (straggler.level, straggler.worker) == (WARNING, 1)
    assert straggler.title.startswith("Worker 1 is the straggler: its steps computed 3.0 times as long as the others', 30")
    assert (waits.level, waits.worker) == (WARNING, 1)
    assert "100% of that for worker 1" in waits.title or "99% of that for worker 1" in waits.title


def test_a_worker_whose_records_end_without_a_launchers_note_was_lost_at_about_that_time() -> None:
    trace = _killed()
    notes = {rank: {**note, "end": None} for rank, note in trace.header["of_worker"].items()}
    lost = _findings(replace(trace, header={**trace.header, "of_worker": notes}))["cut-short"]
    assert lost.level == BAD and lost.worker == 2
    assert lost.title.startswith("Worker 2 was lost, 90") and "or soon after: it was killed, or it crashed." in lost.title


def test_a_failure_has_its_own_words() -> None:
    trace = with_end(bsp([5, 5], 60, {1: 10}), 1, 1, BEGIN + 100 * MS)
    notes = dict(trace.header["of_worker"])
    notes["1"] = {**notes["1"], "failure": "ValueError: no more data"}
    failed = _findings(replace(trace, header={**trace.header, "of_worker": notes, "unfinished": []}))["failed"]
    assert failed.title == "Worker 1 failed, 100 ms into the run."
    assert failed.detail.startswith("ValueError: no more data. It had made 10 steps; worker 0 went on")


def test_a_worker_that_was_lost_and_replaced_is_told_of() -> None:
    trace = asp([5, 5], 40)
    events = np.zeros(3, EVENT_DTYPE)
    events["kind"], events["worker"] = (EVENT_DEATH, EVENT_JOIN, EVENT_DEATH), (1, 1, 0)  # another for worker 0 never came
    events["at_ns"] = BEGIN + np.array((50, 80, 150)) * MS
    found = [each for each in findings_of(facts_of(replace(trace, events=events))) if each.level != NOTE]
    assert [(each.kind, each.level, each.worker, each.at_s) for each in found] == [("replaced", WARNING, 1, 0.05)]
    assert found[0].title == "Worker 1 was lost, 50 ms into the run, and replaced 30 ms later."
    without = replace(trace, header={**trace.header, "unfinished": [1]})  # the last process in its place did finish
    without.header["of_worker"]["1"]["finished"] = True
    assert _findings(without)["replaced"].title == "Worker 1 was lost, and replaced."


def test_an_absent_worker_is_named() -> None:
    trace = bsp([5, 5], 20)
    header = {**trace.header, "workers": 3, "recorded": [0, 1]}
    found = _findings(replace(trace, header=header))["absent"]
    assert found.title == "Worker 2 recorded no step."


def test_a_known_stop_and_a_pause_are_told_apart() -> None:
    trace = bsp([5, 5, 5], 200)
    steps = trace.steps.copy()
    at = np.flatnonzero((steps["worker"] == 0) & (steps["step"] == 50))[0]
    later = steps["begin_ns"] > steps["begin_ns"][at]
    for name in ("begin_ns", "computed_ns", "posted_ns", "pushed_ns", "granted_ns", "end_ns"):
        steps[name][later] += 2000 * MS
    steps["computed_ns"][at] += 2000 * MS
    stopped_ns = int(trace.steps_of(1)["begin_ns"][100]) + 2000 * MS
    notes = dict(trace.header["of_worker"])
    notes["1"] = {**notes["1"], "stops": [[stopped_ns, stopped_ns + 1500 * MS]]}
    found = _findings(replace(trace, steps=steps, header={**trace.header, "of_worker": notes}))
    assert found["stopped"].level == BAD
    assert found["stopped"].title.startswith("Worker 1 was stopped (SIGSTOP) for 1.5 s, 2.5")
    assert found["paused"].level == WARNING
    assert found["paused"].title.startswith("Worker 0 stood still for 2.01 s, 26")


def test_a_run_without_trouble_says_so_first_and_what_would_speed_it_up() -> None:
    trace = bsp([5, 5, 5, 5], 50)
    found = findings_of(facts_of(trace, advise(trace)))
    assert (found[0].kind, found[0].level) == ("nothing", GOOD)
    assert found[0].title == "Nothing is wrong: no worker was lost, none is slower than the others, and no push was dropped."
    assert {each.level for each in found[1:]} == {NOTE}
    assert {"advice", "limit"} & {each.kind for each in found}


def test_one_worker_is_no_straggler_and_waits_for_nobody() -> None:
    facts = facts_of(asp([5], 30))
    assert straggler_of(facts) is None
    found = findings_of(facts)
    assert found[0].title == "Nothing is wrong: the worker ran to its end, and no push was dropped."
    assert "waits" not in {each.kind for each in found}


def test_evenly_slow_workers_are_no_stragglers() -> None:
    assert straggler_of(facts_of(bsp([5, 5.5, 5, 5.4], 50))) is None
    row = straggler_of(facts_of(bsp([5, 5, 5, 7], 50)))
    assert row is not None and (row["worker"], row["factor"]) == (3, pytest.approx(1.4, rel=0.05))


def test_a_worker_is_compared_with_the_others_while_it_was_there() -> None:
    """All are slow for 20 steps, in which worker 2 is lost; later worker 1 is the slow one."""
    trace = bsp([10, 20, 10], 200, {2: 20})
    steps = trace.steps.copy()
    begin = steps["step"] < 20
    steps["begin_ns"][begin] -= 40 * MS
    row = straggler_of(facts_of(replace(trace, steps=steps)))
    assert row is not None and row["worker"] == 1, "worker 2's 50 ms are not compared with the others' later 10 ms"


def test_drops_name_the_worker_that_lost_most() -> None:
    trace = bsp([5, 5, 5], 50)
    pushes = trace.pushes.copy()
    pushes["fate"][(pushes["worker"] == 2) & (pushes["step"] < 10)] = DROPPED
    drops = _findings(replace(trace, pushes=pushes))["drops"]
    assert drops.title == "10 pushes were dropped, 7% of all."
    assert drops.detail.startswith("100% of them were worker 2's") and drops.worker == 2


def test_a_wrong_push_log_is_a_problem() -> None:
    trace = bsp([5, 5], 20)
    wrong = replace(trace, pushes=np.append(trace.pushes, trace.pushes[3]))
    found = _findings(wrong)["push-log"]
    assert found.level == BAD and "is in the push log twice" in found.detail


def test_another_discipline_is_recommended_with_its_gain_and_its_staleness() -> None:
    trace = bsp([10, 30, 10, 10], 60)
    assert "advice" not in _findings(trace, advise(trace, ["bsp"])), "the run is as it is recommended"
    found = _findings(trace, advise(trace))["advice"]
    assert found.title.startswith("--sync bsp,tune=true is expected to get ") and "% further in the same time" in found.title
    assert "the learning rate stays" in found.detail and "A replay of this run's own steps is off by +0%." in found.detail


def test_a_replay_that_is_off_is_said_and_nothing_is_recommended() -> None:
    trace = bsp([10, 30, 10, 10], 60)
    rows = [{**row, "replay_error": 0.29} for row in advise(trace)]
    found = _findings(trace, rows)["advice"]
    assert found.title == "No other discipline is recommended: a replay of this run's steps is off by +29%."


@pytest.mark.parametrize(("policy", "bound"), [
    ({"grant": "at-once"}, None),
    ({"grant": "bounded", "low": 3, "high": 3}, 4),
    ({"grant": "bounded", "low": 3, "high": 15}, None),
    ({"grant": "bounded", "low": 3, "high": 15, "hard_bound": True}, 16),
    ({"grant": "bounded", "low": 3, "high": 15, "hard_bound": True, "bound": "push"}, 15),
])  # fmt: skip
def test_the_bound_of_a_lead_is_that_of_the_discipline(policy: dict[str, Any], bound: int | None) -> None:
    assert lead_bound(policy) == bound
