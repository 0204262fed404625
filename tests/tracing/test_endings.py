"""How workers ended, and that a launcher writes into a trace what only it knows."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from fastps.tracing.endings import ABSENT, CUT_SHORT, ENDED, FAILED, KILLED, endings, pauses
from fastps.tracing.file import read, write
from fastps.tracing.merging import merge_nodes
from fastps.tracing.parts import annotate
from tests.report.traces import BEGIN, MS, bsp, with_end
from tests.support import commands
from tests.tracing.test_merging import Clocks, _pair


def test_each_kind_of_end_is_told() -> None:
    trace = bsp([5, 5], 20, {1: 10})
    assert [each.kind for each in endings(trace)] == [ENDED, ENDED]
    assert endings(with_end(trace, 1, -signal.SIGTERM, BEGIN))[1].how == "SIGTERM"
    killed = endings(with_end(trace, 1, -signal.SIGKILL, BEGIN + 70 * MS))[1]
    assert (killed.kind, killed.at_ns, killed.is_exact, killed.is_lost) == (KILLED, BEGIN + 70 * MS, True, True)
    failed = endings(with_end(trace, 1, 3, BEGIN))[1]
    assert (failed.kind, failed.how) == (FAILED, "exit code 3")
    cut = endings(replace(trace, header={**trace.header, "unfinished": [1]}))[1]
    assert cut.kind == CUT_SHORT and not cut.is_exact and cut.at_ns == trace.steps_of(1)["end_ns"].max()
    assert endings(replace(trace, header={**trace.header, "recorded": [0]}))[1].kind == ABSENT


def test_short_steps_are_no_pauses() -> None:
    assert pauses(bsp([5, 50], 30)) == []


def test_notes_are_added_to_a_trace_that_is_written(tmp_path: Path) -> None:
    file = tmp_path / "run.trace"
    write(bsp([5, 5], 20, {1: 10}), file)
    annotate([file], {1: {"end": {"at_ns": 7, "exit_code": -9}}, 5: {"stops": [(1, 2)]}})
    notes = read(file).header["of_worker"]
    assert notes["1"]["end"] == {"at_ns": 7, "exit_code": -9} and notes["1"]["posted"] == 0
    assert "5" not in notes and "end" not in notes["0"]
    assert [path.name for path in tmp_path.iterdir()] == ["run.trace"]


def test_a_worker_that_was_lost_before_its_first_step_has_the_time_at_which_it_began() -> None:
    trace = bsp([5, 5], 20)
    notes = {**trace.header["of_worker"], "1": {**trace.header["of_worker"]["1"], "began_ns": BEGIN + MS}}
    found = replace(
        trace,
        header={**trace.header, "of_worker": notes, "unfinished": [1]},
        steps=trace.steps[trace.steps["worker"] == 0],
        pushes=trace.pushes[trace.pushes["worker"] == 0],
    )
    assert (endings(found)[1].kind, endings(found)[1].at_ns) == (CUT_SHORT, BEGIN + MS)


def test_what_a_launcher_saw_moves_with_a_nodes_clock() -> None:
    parts = dict(_pair(Clocks(10**9, 0)))
    file = next(file for file, trace in parts.items() if trace.header["node"]["node"] == 1)
    at_ns = int(parts[file].steps["end_ns"].max())
    note = {"began_ns": at_ns - 9 * MS, "end": {"at_ns": at_ns, "exit_code": -9}, "stops": [[at_ns - 5 * MS, at_ns - MS]]}
    notes = {**parts[file].header["of_worker"], "2": note}
    parts[file] = replace(parts[file], header={**parts[file].header, "of_worker": notes})
    merged = merge_nodes(list(parts.items()))
    assert merged.header["of_worker"]["4"]["began_ns"] == pytest.approx(at_ns - 9 * MS - 10**9, abs=MS)
    ending = endings(merged)[4]  # node 0 has workers 0 and 1
    assert ending.kind == KILLED and ending.at_ns == pytest.approx(at_ns - 10**9, abs=MS)
    (pause,) = pauses(merged)
    assert pause.worker == 4 and pause.end_ns == pytest.approx(ending.at_ns - MS, abs=1)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_launcher_notes_who_was_killed_and_when(tmp_path: Path) -> None:
    file = tmp_path / "run.trace"
    commands.done(
        *("train", "--workers", "3", "--sync", "asp", "--epochs", "4", "--compute-ms", "5", "--seed", "4"),
        *("--on-worker-loss", "continue", "--inject-faults", "kill:1,stop:1,seconds:2", "--trace", str(file)),
    )
    trace = read(file)
    lost = [each for each in endings(trace) if each.is_lost]
    assert [(each.kind, each.how, each.is_exact) for each in lost] == [(KILLED, "SIGKILL", True)]
    last_ns = trace.steps_of(lost[0].worker)["pushed_ns"].max(initial=0)  # a busy machine may kill it before its first step
    assert last_ns <= lost[0].at_ns <= trace.steps["end_ns"].max()
    assert [pause.is_known for pause in pauses(trace) if pause.is_known] == [True]
    finite = [note["loss"] for note in trace.header["of_worker"].values() if note["loss"] is not None]
    assert len(finite) == 2, "the killed worker wrote no end"
