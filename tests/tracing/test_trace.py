"""Recorded runs: what is written, what a crash leaves, that doctored push logs are caught, and what is made of a trace."""

import errno
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps
from fastps.cli import trace_report
from fastps.kernels.shm.arena import OUTCOME_FOLDED
from fastps.system.clock import SYSTEM_CLOCK, Clock
from fastps.tracing import parts
from fastps.tracing import perfetto as trace_perfetto
from fastps.tracing import summary as trace_summary
from fastps.tracing.check import check, is_complete, push_log_row
from fastps.tracing.file import DROPPED, FOLDED, REJECTED, UNDECIDED, Trace, TraceError, read, write
from fastps.tracing.parts import CHUNK_LINES, Part, folder_of, folders_of, load, merge
from tests.support import commands, processes, store_job

SPECS = [
    "bsp", "asp", "asp,combine=true", "ssp:1", "dssp:1,4", "backup:1", "psp:2,0.5", "softsync:2", "adv:1", "adv*:1", "r2sp:0.8",
]  # fmt: skip


def _weights() -> dict[str, Any]:
    return {name: np.ones(100, np.float32) for name in "abcd"}


def _steps(store: fastps.Store, rank: int, steps: int, delay_s: float = 0.0) -> None:
    with store.attach(rank) as worker:
        worker.wait_for_start()
        for _ in range(steps):
            for gradient in worker.gradients.values():
                gradient[:] = 1e-3
            time.sleep(delay_s * (3 if rank == 0 else 1))
            worker.push(store.hypers, samples=4)
            worker.advance()
            worker.pull()


def recorded(file: Path, sync: str, workers: int = 3, steps: int = 40, delay_s: float = 0.001) -> Trace:
    """A run of real processes; worker 0 takes three times as long."""
    with fastps.trace(file), fastps.Store.create(_weights(), fastps.SGD(lr=0.1), sync=sync, workers=workers) as store:
        processes.results(processes.start_each(lambda rank: _steps(store, rank, steps, delay_s), workers), 60)
    return read(file)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sync", SPECS)
def test_the_push_log_of_every_discipline_is_whole_and_right(sync: str, tmp_path: Path) -> None:
    trace = recorded(tmp_path / "run.trace", sync)
    assert check(trace) == []
    assert is_complete(trace)
    assert [len(trace.steps_of(worker)) for worker in range(3)] == [40] * 3
    assert len(trace.pushes) == 120 * trace.header["shards"]
    decided = trace.pushes[trace.pushes["fate"] != UNDECIDED]
    assert len(decided) >= len(trace.pushes) - 3 * 4, "only what was in an unfinished sum at the end is undecided"
    folded = decided[decided["fate"] == FOLDED]
    assert sum(trace.header["committed"]["folded"]) == len(folded)
    if sync == "bsp":
        assert folded["staleness"].max() == 0
    if sync in ("backup:1", "psp:2,0.5"):
        assert (decided["fate"] == DROPPED).any(), "the slow worker's pushes come too late"
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.trace"], "the parts are gone"


def test_times_of_a_step_follow_each_other_and_processor_time_is_apart_from_sleep(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "run.trace", "bsp", workers=2, steps=20, delay_s=0.005)
    whole = trace.steps[trace.steps["end_ns"] > 0]
    order = [whole[name] for name in ("begin_ns", "computed_ns", "posted_ns", "pushed_ns", "granted_ns", "end_ns")]
    assert all((earlier <= later).all() for earlier, later in itertools.pairwise(order))
    slow = trace.steps_of(0)[1:]
    assert np.median(trace_summary.blocked_ns(slow)) > 14e6, "it slept 15 ms"
    assert np.median(slow["cpu_ns"]) < 5e6
    assert set(slow["samples"]) == {4}


def test_a_core_that_is_lost_between_the_end_of_a_step_and_its_record_is_no_part_of_the_step(tmp_path: Path) -> None:
    class Losing(Clock):
        """A clock whose thread loses its core for a second before each reading of how long it had none."""

        seconds = 0

        def thread_queue_ns(self) -> int:
            self.seconds += 1
            return self.seconds * 1_000_000_000

    with (
        fastps.trace(tmp_path / "run.trace"),
        fastps.Store.create({"w": np.ones(3, np.float32)}, fastps.SGD(0.1), clock=Losing()) as store,
    ):
        with store.attach(0) as worker:
            for _ in range(5):
                worker.step({"w": np.ones(3)})
    steps = read(tmp_path / "run.trace").steps
    assert (steps["queue_ns"] >= 0).all() and (steps["queue_ns"] <= steps["computed_ns"] - steps["begin_ns"]).all()


@pytest.mark.parametrize("sync", ["asp", "bsp", "asp,shards=2"])
def test_a_rejected_push_is_rejected_in_the_push_log(sync: str, tmp_path: Path) -> None:
    first = {name: np.ones(3, np.float32) for name in "ab"}
    with fastps.trace(tmp_path / "run.trace"), fastps.Store.create(first, fastps.SGD(lr=0.1), sync=sync, workers=2) as store:
        with store.attach(0) as good, store.attach(1) as bad:
            for step in range(6):
                good.push(store.hypers)
                bad.gradients["a"][:] = np.nan if step == 3 else 1.0
                bad.push(store.hypers)
                for worker in (good, bad):
                    worker.advance()
                    worker.pull()
    trace = read(tmp_path / "run.trace")
    rejected = trace.pushes[trace.pushes["fate"] == REJECTED]
    assert [(push["worker"], push["shard"], push["step"]) for push in rejected] == [(1, 0, 3)]
    assert check(trace) == [] and push_log_row(trace)["rejected"] == 1
    assert push_log_row(trace)["folded"] + 1 == len(trace.pushes)


# -- doctored push logs ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    folder = tmp_path_factory.mktemp("honest")
    return {sync: recorded(folder / "run.trace", sync) for sync in ("asp", "bsp")}


def _doctored(trace: Trace, change: Callable[[Any, Any], None]) -> set[str]:
    steps, pushes = trace.steps.copy(), trace.pushes.copy()
    change(steps, pushes)
    return {violation.rule for violation in check(replace(trace, steps=steps, pushes=pushes))}


def _line(pushes: Any, worker: int, step: int) -> int:
    return int(np.flatnonzero((pushes["worker"] == worker) & (pushes["step"] == step))[0])


@pytest.mark.parametrize("sync", ["asp", "bsp"])
def test_a_push_that_is_folded_twice_is_found(honest: dict[str, Trace], sync: str) -> None:
    trace = honest[sync]
    again = trace.pushes[_line(trace.pushes, 1, 7)].copy()
    later = again.copy()
    later["version"] += 1
    for line in (again, later):
        doctored = replace(trace, pushes=np.append(trace.pushes, line))
        assert "once" in {violation.rule for violation in check(doctored)}


def test_a_version_that_goes_back_is_found(honest: dict[str, Trace]) -> None:
    def swap(_: Any, pushes: Any) -> None:
        one, other = _line(pushes, 1, 7), _line(pushes, 1, 9)
        for name in ("version", "staleness", "read_version"):
            pushes[name][[one, other]] = pushes[name][[other, one]]

    assert {"order", "monotone"} <= _doctored(honest["asp"], swap)


def test_other_lies_are_found(honest: dict[str, Trace]) -> None:
    asp = honest["asp"]

    def change(table: str, name: str, by: int, worker: int = 1, step: int = 7) -> Callable[[Any, Any], None]:
        def doctor(steps: Any, pushes: Any) -> None:
            lines = pushes if table == "pushes" else steps
            lines[name][_line(lines, worker, step)] += by

        return doctor

    assert "staleness" in _doctored(asp, change("pushes", "staleness", 1))
    assert "once" in _doctored(asp, change("pushes", "version", -1)), "two pushes cannot be one version under asp"
    assert "times" in _doctored(asp, change("pushes", "decided_ns", -(10**9)))
    assert "read" in _doctored(asp, change("steps", "read_version", -1000))
    assert "steps" in _doctored(asp, change("steps", "step", 5))
    assert _doctored(asp, lambda _, pushes: pushes["fate"].__setitem__(_line(pushes, 2, 30), DROPPED)) & {"counts", "lost"}
    missing = replace(asp, pushes=np.delete(asp.pushes, _line(asp.pushes, 1, 7)))
    assert "lost" in {violation.rule for violation in check(missing)}


# -- crashes and odd ends --------------------------------------------------------------------------


def test_lines_of_a_killed_worker_are_there_and_say_the_truth(tmp_path: Path) -> None:
    file = tmp_path / "run.trace"

    with fastps.trace(file), fastps.Store.create(_weights(), fastps.SGD(lr=0.1), sync="asp", workers=3) as store:
        children = processes.start_each(lambda rank: _steps(store, rank, 10**9, 0.0005), 3)
        while store.version < 300:
            time.sleep(0.005)
        os.kill(children[1].process_id, signal.SIGKILL)
        processes.finish(children, 60)
        assert [child.outcome[0] for child in children if child.outcome] == ["WorkerDiedError"] * 2
    assert not file.exists(), "not all workers have ended in good order"
    trace = load(file)
    assert trace.header["unfinished"] == [1]
    assert check(trace) == []
    assert not is_complete(trace)
    assert len(trace.steps_of(1)) > 20
    assert sum(len(trace.steps_of(worker)) for worker in range(3)) > 290
    for folder in folders_of(file):
        for part in folder.iterdir():
            part.unlink()


def test_workers_that_end_at_the_same_time_write_one_trace(tmp_path: Path, honest: dict[str, Trace]) -> None:
    workers, rounds, file = 4, 25, tmp_path / "run.trace"
    begun = multiprocessing.get_context("fork").Barrier(workers)

    def end(rank: int) -> int:
        written = 0
        for job in range(rounds):
            folder = tmp_path / f"run.trace.{job}.parts"
            part = Part(folder, rank, {"job": honest["asp"].header, "began_ns": 0})
            begun.wait(30)
            part.finish()
            written += merge(folder, file, lambda notes: [note["finished"] for note in notes] == [True] * workers)
        return written

    assert sum(processes.results(processes.start_each(end, workers), 60)) == rounds
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.trace"]


def test_a_recording_that_ends_before_the_worker_is_written_then(tmp_path: Path) -> None:
    file = tmp_path / "run.trace"
    with fastps.Store.create(_weights(), fastps.SGD(lr=0.1)) as store:
        with fastps.trace(file), store.attach(0) as worker:
            worker.step(_weights())
            fastps.trace(tmp_path / "other.trace").close()
        with fastps.Store.create(_weights(), fastps.SGD(lr=0.1)) as later, later.attach(0) as unrecorded:
            unrecorded.step(_weights())
    assert [int(version) for version in read(file).pushes["version"]] == [1]
    with fastps.Store.create(_weights(), fastps.SGD(lr=0.1)) as store:
        with fastps.trace(tmp_path / "begun.trace"):
            worker = store.attach(0)
            worker.step(_weights())
        worker.step(_weights())
        worker.close()
    assert len(read(tmp_path / "begun.trace").steps) == 1
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["begun.trace", "run.trace"]


def test_a_process_with_two_jobs_writes_two_traces(tmp_path: Path) -> None:
    with fastps.trace(tmp_path / "run.trace"):
        for _ in range(2):
            with fastps.Store.create(_weights(), fastps.SGD(lr=0.1)) as store, store.attach(0) as worker:
                worker.step(_weights())
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run-1.trace", "run.trace"]


def test_more_lines_than_a_chunk_and_more_than_the_ring_holds(tmp_path: Path) -> None:
    file, count = tmp_path / "run.trace", CHUNK_LINES + 5
    with fastps.trace(file), fastps.Store.create({"w": np.ones(1, np.float32)}, fastps.SGD(lr=0.1)) as store:
        with store.attach(0) as worker:
            for _ in range(count):
                worker.step()
    trace = read(file)
    assert len(trace.steps) == len(trace.pushes) == count
    assert check(trace) == []


def test_nothing_is_written_down_unless_somebody_records() -> None:
    with fastps.Store.create(_weights(), fastps.SGD(lr=0.1)) as store, store.attach(0) as worker:
        worker.step(_weights())
        assert worker.recorder is None
        assert store.arena.push_outcomes(0, 0, 0, 1) == [None]
        store.arena.record()
        worker.step(_weights())
        folded = OUTCOME_FOLDED, 2, pytest.approx(SYSTEM_CLOCK.now_ns(), abs=10**11), 0
        assert store.arena.push_outcomes(0, 0, 0, 9) == [None, folded]


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with fastps.trace(tmp_path / "none" / "run.trace"), fastps.Store.create(_weights(), fastps.SGD(lr=0.1)) as store:
        with pytest.raises(TraceError, match="cannot be written"):
            store.attach(0)


def test_a_full_disk_ends_the_trace_and_not_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file, fallocate = tmp_path / "run.trace", os.posix_fallocate

    def fill(descriptor: int, offset: int, length: int) -> None:
        if offset:
            raise OSError(errno.ENOSPC, "No space left on device")
        fallocate(descriptor, offset, length)

    monkeypatch.setattr(parts.os, "posix_fallocate", fill)
    steps = parts.CHUNK_LINES + 10
    with fastps.trace(file), fastps.Store.create(_weights(), fastps.SGD(lr=0.1)) as store, store.attach(0) as worker:
        for _ in range(steps):
            worker.step()
        assert (store.version, worker.recorder) == (steps, None)
    assert "No space left on device; make room, or choose another file; the trace of worker 0 ends" in caplog.text
    assert len(parts.load(file).steps) == parts.CHUNK_LINES


def test_a_trace_that_cannot_be_merged_keeps_its_records_and_ends_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "run.trace"

    def fill(trace: Trace, file: Path) -> None:
        raise TraceError("no room")

    monkeypatch.setattr(parts, "write", fill)
    with fastps.trace(file), fastps.Store.create(_weights(), fastps.SGD(lr=0.1)) as store, store.attach(0) as worker:
        worker.step()
        name, folder = store.job, folder_of(file, store)
    parts.end(file, name, {}, 0)  # as the launcher does
    assert f"no room; its records stay in {folder}" in caplog.text
    assert f"no room; the records of the trace stay beside {file}" in caplog.text
    assert len(parts.load(file).steps) == 1


@pytest.mark.parametrize("damage", [
    lambda data: bytes([data[0] ^ 1]) + data[1:],  # the magic
    lambda data: data[:16] + (2**40).to_bytes(8, "little") + data[24:],  # the header's length
    lambda data: data[:24] + b"x" + data[25:],
    lambda data: data[:-100],
    lambda data: data.replace(b'"begin_ns"', b'"begun_ns"'),
])  # fmt: skip
def test_a_damaged_file_is_refused(honest: dict[str, Trace], tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    file = tmp_path / "run.trace"
    write(honest["asp"], file)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(TraceError):
        read(file)


def test_a_trace_of_a_worker_that_its_header_has_not_is_refused(honest: dict[str, Trace], tmp_path: Path) -> None:
    write(replace(honest["asp"], header={**honest["asp"].header, "workers": 2}), tmp_path / "run.trace")
    with pytest.raises(TraceError):
        read(tmp_path / "run.trace")


# -- Perfetto --------------------------------------------------------------------------------------


def test_perfetto_events_follow_the_format(honest: dict[str, Trace], tmp_path: Path) -> None:
    trace, file = honest["asp"], tmp_path / "out.json"
    trace_perfetto.save(trace, file)
    document = json.loads(file.read_text())
    events = document["traceEvents"]
    required = {
        "M": {"name", "pid", "tid", "args"},
        "X": {"name", "pid", "tid", "ts", "dur"},
        "i": {"name", "pid", "tid", "ts", "s"},
        "s": {"name", "cat", "pid", "tid", "ts", "id"},
        "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
        "C": {"name", "pid", "ts", "args"},
    }
    for event in events:
        assert required[event["ph"]] <= set(event)
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
    of = {kind: [event for event in events if event["ph"] == kind] for kind in required}
    assert sum(event["name"] == "compute" for event in of["X"]) == len(trace.steps)
    assert sum(event["name"].startswith("version") for event in of["X"]) == 120
    assert sorted(event["id"] for event in of["s"]) == sorted(event["id"] for event in of["f"])
    assert len({event["id"] for event in of["s"]}) == 120
    ends = {event["id"]: event["ts"] for event in of["f"]}
    assert all(event["ts"] <= ends[event["id"]] for event in of["s"])
    for worker in range(3):
        spans = sorted((event["ts"], event["dur"]) for event in of["X"] if event["pid"] == 1 and event["tid"] == worker)
        assert all(begin + length <= after + 1e-3 for (begin, length), (after, _) in itertools.pairwise(spans))


# -- the command line ------------------------------------------------------------------------------


def _run(file: Path, mishap: str = "") -> "subprocess.CompletedProcess[str]":
    """Record 30 steps of two workers under ssp:2."""
    options = ("-n", "2", "--start-method", "spawn", "--trace", str(file))
    return commands.fastps("run", *options, *store_job.command("ssp:2", 30, mishap))


def _of(rows: list[Any], kind: str) -> list[Any]:
    return [row for row in rows if row["kind"] == kind]


@pytest.mark.parametrize(
    ("predicted", "told"), [(100.0, ["+8.7% is no more than that error: measure both, by fastps compare"]), (90.0, [])]
)
def test_advice_within_the_error_of_the_replay_says_so(predicted: float, told: list[str]) -> None:
    row = {"sync": "asp", "gain": 108.7 / predicted - 1, "recommended": True, "reason": "the fastest"}
    test = {"sync": "bsp", "measured": 113.7 if told else 92.0, "predicted": predicted}
    lines = trace_report.advice_lines([row], {**test, "error": predicted / test["measured"] - 1})  # type: ignore[operator]
    assert [line.partition(" --runs")[0] for line in lines if "measure both" in line] == told


@pytest.mark.slow
def test_run_records_and_trace_and_advise_read_it(tmp_path: Path) -> None:
    file = tmp_path / "run.trace"
    recorded_run = _run(file)
    assert recorded_run.returncode == 0, recorded_run.stderr
    checked = commands.rows("trace", str(file), "--check", "--summary", "--perfetto", str(tmp_path / "out.json"))
    (verdict,) = _of(checked, "check")
    assert (verdict["ok"], verdict["pushes"], verdict["folded"], verdict["complete"]) == (True, 60, 60, True)
    assert _of(checked, "run")[0]["sync"] == "ssp:2"
    assert [row["steps"] for row in _of(checked, "worker")] == [30, 30]
    assert json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    advised = commands.done("advise", str(file), "--json", "-")
    rows = _of(json.loads(advised.stdout)["rows"], "prediction")
    assert [row["rank"] for row in rows] == list(range(1, len(rows) + 1))
    assert {"bsp", "asp", "ssp:2", "ssp:3", "dssp:3,15", "softsync:2", "r2sp:0.8"} <= {row["sync"] for row in rows}
    (chosen,) = [row for row in rows if row["recommended"]]
    assert chosen["reason"] and (chosen["expected"] >= 0.95 or chosen["sync"] == "ssp:2")
    assert f"recommended: --sync {chosen['sync']}" in advised.stderr

    trace = read(file)
    write(replace(trace, pushes=np.append(trace.pushes, trace.pushes[5])), file)
    wrong = commands.fastps("trace", str(file), "--check")
    assert wrong.returncode == 1
    assert "is in the push log twice" in wrong.stdout


@pytest.mark.slow
def test_a_run_whose_worker_is_killed_leaves_a_trace(tmp_path: Path) -> None:
    file = tmp_path / "run.trace"
    assert _run(file, "os.kill(os.getpid(), signal.SIGKILL)").returncode == 1
    trace = read(file)
    assert trace.header["unfinished"] == [1]
    assert check(trace) == []
    assert len(trace.steps_of(1)) >= 19
    assert not folders_of(file)


@pytest.mark.slow
def test_a_name_that_the_outputs_encoding_lacks_ends_no_command(honest: dict[str, Trace], tmp_path: Path) -> None:
    write(next(iter(honest.values())), file := tmp_path / "run.trace")
    command = [sys.executable, "-m", "fastps", "trace", str(file), "--perfetto", str(tmp_path / "ü.json")]
    shown = subprocess.run(command, capture_output=True, check=False, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (shown.returncode, shown.stderr) == (0, b"")
    assert b"\\xfc.json" in shown.stdout.replace(b"\n", b"") and (tmp_path / "ü.json").exists()


@pytest.mark.parametrize("arguments", [
    ["trace", "--perfetto"], ["trace", "--output"], ["trace", "--json"], ["advise", "--json"], ["report", "-o"],
])  # fmt: skip
@pytest.mark.sampled(3)
def test_no_command_writes_over_the_trace_that_it_reads(arguments: list[str], honest: dict[str, Trace], tmp_path: Path) -> None:
    write(next(iter(honest.values())), file := tmp_path / "run.html")
    before = file.read_bytes()
    (tmp_path / "link.html").symlink_to(file)
    done = commands.fastps(arguments[0], str(file), arguments[1], str(tmp_path / "link.html"))
    assert done.returncode == 2 and "expected another file to write than the trace" in done.stderr, done.stderr
    assert file.read_bytes() == before


@pytest.mark.parametrize("command", ["trace", "advise"])
def test_what_is_no_trace_is_one_sentence(command: str, tmp_path: Path) -> None:
    (tmp_path / "none").write_text("nothing")
    assert "expected a trace that --trace wrote" in commands.refused(command, str(tmp_path / "none"))


def test_what_is_no_regular_file_is_refused_without_reading_it(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    for file in (Path("/dev/zero"), pipe):
        with pytest.raises(TraceError, match=f"found no regular file: {file}"):
            read(file)
