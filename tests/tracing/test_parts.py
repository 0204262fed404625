"""The parts of a trace: those of an earlier job stay apart, the launcher's notes reach the right trace, and damage is told."""

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

import fastps
from fastps.job.nodes import Nodes
from fastps.tracing.endings import CUT_SHORT, ENDED, endings
from fastps.tracing.file import TraceError, read
from fastps.tracing.node_part import node_note
from fastps.tracing.parts import Part, end, folders_of, load
from tests.report.traces import header
from tests.support import processes

JOB = f"again-{os.getpid()}"  # other processes run other tests of this file at the same time
FAILED = {0: {"end": {"at_ns": 7, "exit_code": 3}}}


def _job(workers: int = 1, name: str = JOB) -> fastps.Store:
    return fastps.Store.create({"w": np.ones(4, np.float32)}, fastps.SGD(lr=0.1), sync="asp", workers=workers, job=name)


def _steps(store: fastps.Store, rank: int, steps: int, *, dies: bool = False) -> None:
    worker = store.attach(rank)
    for _ in range(steps):
        worker.step()
    if dies:
        os._exit(3)
    worker.close()


def _die(file: Path, workers: int, steps: int) -> None:
    """Let all workers of a job die."""
    with fastps.trace(file), _job(workers) as store:
        processes.finish(processes.start_each(lambda rank: _steps(store, rank, steps, dies=True), workers), 60)


def _end_well(file: Path, steps: int) -> None:
    with fastps.trace(file), _job() as store:
        _steps(store, 0, steps)


def test_what_a_crashed_job_left_is_no_part_of_the_next_one_of_its_name(tmp_path: Path) -> None:
    """The next one has fewer workers. The earlier records stay where they are, and can be read."""
    file = tmp_path / "run.trace"
    _die(file, workers=3, steps=5)
    _end_well(file, 2)
    found = load(file)
    assert (found.header["recorded"], found.header["unfinished"], len(found.steps)) == ([0], [], 2)
    (earlier,) = folders_of(file)
    assert load(earlier).header["unfinished"] == [0, 1, 2]
    end(file, JOB, {}, time.time_ns())  # as the launcher of the next one does
    assert len(read(file).steps) == 2 and folders_of(file) == [earlier]


@pytest.mark.parametrize(("name", "shown"), [("run", 5), ("run.1", 2)])
def test_what_a_newer_job_left_of_the_same_file_and_no_other_is_shown_instead_of_an_older_trace(
    name: str, shown: int, tmp_path: Path
) -> None:
    """The other file's name begins with that of the trace."""
    file, newer = tmp_path / "run", tmp_path / name
    _end_well(file, 2)
    time.sleep(0.02)  # file systems count in hundredths of a second
    _die(newer, workers=1, steps=5)
    assert (len(load(file).steps), len(load(newer).steps), len(read(file).steps)) == (shown, 5, 2)


def test_a_launch_that_fails_before_it_trains_changes_no_earlier_trace(tmp_path: Path) -> None:
    file, began_ns = tmp_path / "run.trace", time.time_ns()
    _end_well(file, 2)
    end(file, JOB, FAILED, time.time_ns())
    assert "end" not in read(file).header["of_worker"]["0"]
    end(file, JOB, FAILED, began_ns)
    assert read(file).header["of_worker"]["0"]["end"] == FAILED[0]["end"]


def test_what_became_of_a_worker_is_told_in_the_trace_of_its_last_job(tmp_path: Path) -> None:
    """Its jobs before have ended well, so their traces are written."""
    file = tmp_path / "run.trace"

    def work(rank: int) -> None:
        for name in (JOB, f"{JOB}.1"):
            with _job(name=name) as store:
                _steps(store, rank, 1)
        _steps(_job(name=f"{JOB}.2"), rank, 3, dies=True)

    with fastps.trace(file):
        processes.finish(processes.start_each(work, 1), 60)
    end(file, JOB, FAILED, 0)
    traces = [read(tmp_path / name) for name in ("run.trace", "run-1.trace", "run-2.trace")]
    assert [len(trace.steps) for trace in traces] == [1, 1, 3]
    assert ["end" in trace.header["of_worker"]["0"] for trace in traces] == [False, False, True]


def test_how_a_worker_ended_is_told_in_the_traces_of_all_its_jobs_that_were_open(tmp_path: Path) -> None:
    file, stop_ns = tmp_path / "run.trace", time.monotonic_ns()

    def work(rank: int) -> None:
        with _job(name=JOB) as store:
            _steps(store, rank, 1)
        first, second = (_job(name=f"{JOB}.{number}").attach(rank) for number in (1, 2))
        for worker in (first, second):
            worker.step()
        with _job(name=f"{JOB}.3") as store:
            _steps(store, rank, 1)
        os._exit(3)

    with fastps.trace(file):
        processes.finish(processes.start_each(work, 1), 60)
    stops = [(stop_ns, stop_ns + 1), (stop_ns, time.monotonic_ns()), (time.monotonic_ns(), time.monotonic_ns() + 1)]
    end(file, JOB, {0: {**FAILED[0], "stops": stops}}, 0)
    traces = [read(tmp_path / name) for name in ("run.trace", "run-1.trace", "run-2.trace", "run-3.trace")]
    notes = [trace.header["of_worker"]["0"] for trace in traces]
    assert ["end" in note for note in notes] == [False, True, True, False]
    assert [note["stops"] for note in notes] == [[list(stops[1])]] * 4


def test_a_worker_that_was_replaced_has_the_end_of_its_replacement(tmp_path: Path) -> None:
    folder = tmp_path / "run.trace.1.parts"
    note = {"job": header("bsp", 1)}
    Part(folder, 0, note).close()
    replacement = Part(folder, 0, note, generation=1)
    assert endings(load(folder))[0].kind == CUT_SHORT
    replacement.finish()
    assert endings(load(folder))[0].kind == ENDED
    assert load(folder).header["unfinished"] == [0], "its records have a gap"


def test_a_note_that_a_machine_left_empty_when_it_went_down_is_named(tmp_path: Path) -> None:
    file = tmp_path / "run.trace"
    _die(file, workers=1, steps=3)
    (note,) = folders_of(file)[0].glob("*.json")
    note.write_text("")
    with pytest.raises(TraceError, match=r"expected a note in .*0.json, found .*; remove it"):
        load(file)


def test_the_parts_of_a_node_are_read_and_the_note_of_something_else_in_their_place_is_named(tmp_path: Path) -> None:
    folder, note = tmp_path / "run.trace.1.parts", node_note(Nodes(2, 1, 0, 1, "localhost", 29400), "here")
    Part(folder, 0, {"job": header("bsp", 1)}).close()
    (folder / "agent.note").write_text(json.dumps(note))
    assert load(folder).header["node"] == note
    (folder / "agent.note").write_text(json.dumps({"rank": 0, "job": {}, "finished": True}))
    with pytest.raises(TraceError, match=r"expected the parts of a trace in .*, found agent.note of something else there"):
        load(folder)


@pytest.mark.parametrize("text", ["{}", "[1]", '{"rank": 0}'])
def test_a_folder_with_other_files_is_no_trace(tmp_path: Path, text: str) -> None:
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(TraceError, match=r"expected the parts of a trace in .*, found rows.json of something else there"):
        load(tmp_path)
