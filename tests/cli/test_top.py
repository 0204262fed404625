"""Looking at running jobs: what is found, what is shown, and that looking leaves nothing and disturbs nobody."""

import contextlib
import io
import json
import mmap
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from rich.console import Console

import fastps
from fastps.cli import top
from fastps.membership import discovery, rendezvous
from fastps.store.observer import Look, Observer
from fastps.system import unix_sockets
from fastps.system.clock import Clock
from tests.support import commands, processes
from tests.support.scripts import program
from tests.telemetry.jobs import look_at


@dataclass
class Job:
    """A store whose forked workers have done their steps and wait to be let go."""

    store: fastps.Store
    children: list[processes.Child]
    gate: int
    _done: bool = field(default=False)

    def let_go(self) -> None:
        """Let the workers leave, and wait until they have."""
        if not self._done:
            self._done = True
            os.close(self.gate)
            processes.finish(self.children, 20)


@contextmanager
def _job(name: str, *, workers: int = 2, steps: int = 5, sync: str = "asp", loss: float = 0.5) -> Iterator[Job]:
    weights = {name: np.ones(64, np.float32) for name in "abcdefghijkl"}
    with fastps.Store.create(weights, fastps.SGD(lr=0.1), sync=sync, workers=workers, job=name) as store:
        gate_reader, gate = os.pipe()
        ready = mmap.mmap(-1, workers)

        def work(rank: int) -> None:
            os.close(gate)
            with store.attach(rank) as worker:
                worker.loss = loss
                for _ in range(steps):
                    for gradient in worker.gradients.values():
                        gradient[:] = 1.0
                    worker.step()
                ready[rank] = 1
                os.read(gate_reader, 1)  # until the test closes its end

        job = Job(store, processes.start_each(work, workers), gate)
        try:
            processes.wait_until(lambda: 0 not in ready[:], 60, "the workers have not made their steps")
            yield job
        finally:
            job.let_go()
            os.close(gate_reader)


@contextmanager
def _observed() -> Iterator[tuple[Observer, fastps.Worker]]:
    """An observer of a job, and the job's only worker."""
    with fastps.Store.create({"w": np.ones(4, np.float32)}, fastps.SGD(lr=1.0)) as store, store.attach(0) as worker:
        with contextlib.closing(fastps.observe(store.job)) as observer:
            yield observer, worker


def _name(request: pytest.FixtureRequest) -> str:
    return f"top-{os.getpid()}-{request.node.name}"[:80]


class Scripted(Clock):
    """A clock that does something while others would sleep, once per entry."""

    def __init__(self, *events: Callable[[], None]) -> None:
        self._events = list(events)

    def sleep_ns(self, duration_ns: int) -> None:
        if self._events:
            self._events.pop(0)()
        else:
            super().sleep_ns(duration_ns)


def _console(**options: Any) -> tuple[Console, io.StringIO]:
    """A console, and what it writes to."""
    file = io.StringIO()
    return Console(file=file, width=120, **options), file


@contextmanager
def _only(monkeypatch: pytest.MonkeyPatch, *jobs: str) -> Iterator[None]:
    """Hide the jobs of others from discovery, that may run on this machine at the same time."""
    everything = discovery.listening
    with monkeypatch.context() as patch:
        patch.setattr(discovery, "listening", lambda: {job: places for job, places in everything().items() if job in jobs})
        yield


# -- looking ---------------------------------------------------------------------------------------


def test_a_look_has_all_workers_and_shards(request: pytest.FixtureRequest) -> None:
    with _job(_name(request), sync="asp,shards=3") as job:
        look = look_at(job.store.job)
    assert look.settled and not look.over and look.failures == {}
    assert [(row.rank, row.state, row.steps, row.loss) for row in look.workers] == [(0, "live", 5, 0.5), (1, "live", 5, 0.5)]
    assert [(shard.shard, shard.version, shard.updates) for shard in look.shards] == [(index, 10, 10) for index in range(3)]
    assert all(sum(count for _, count in shard.staleness) == 10 for shard in look.shards)


def test_a_look_is_taken_again_while_versions_are_published(monkeypatch: pytest.MonkeyPatch) -> None:
    with _observed() as (observer, worker):
        versions = Observer._versions
        for busy_tries, settled, tries in ((0, True, 1), (2, True, 3), (99, False, 4)):
            calls = []

            def moving(self: Observer, busy: int = busy_tries, calls: list[int] = calls) -> list[int]:
                calls.append(len(calls))
                if len(calls) % 2 == 0 and len(calls) // 2 <= busy:
                    worker.step({"w": np.ones(4)})
                return versions(self)

            monkeypatch.setattr(Observer, "_versions", moving)
            assert observer.look().settled is settled
            assert len(calls) == 2 * tries


def test_looking_pins_nothing_and_takes_no_turn(request: pytest.FixtureRequest) -> None:
    with _job(_name(request), sync="bsp") as job:
        committed, pins = job.store.arena.committed(), job.store.arena.pins()
        with contextlib.closing(fastps.observe(job.store.job)) as observer:
            for _ in range(20):
                observer.look()
        assert (job.store.arena.committed(), job.store.arena.pins()) == (committed, pins)


def test_a_killed_worker_is_shown_as_died(request: pytest.FixtureRequest) -> None:
    with _job(_name(request)) as job:
        with contextlib.closing(fastps.observe(job.store.job)) as observer:
            os.kill(job.children[1].process_id, signal.SIGKILL)
            processes.finish([job.children[1]], 20)
            look = observer.look()
            assert [row.state for row in look.workers] == ["live", "died"]
            assert not look.over
            job.let_go()
            look = observer.look()
    assert look.over
    assert "1 died" in top.last_line("x", look)


def test_what_a_failed_worker_said_is_in_the_last_line() -> None:
    with fastps.Store.create({"w": np.ones(4, np.float32)}, fastps.SGD(lr=1.0)) as store:
        with contextlib.closing(fastps.observe(store.job)) as observer:
            store.attach(0).close(failure="ValueError: no [data]")
            look = observer.look()
    assert (look.over, look.failures) == (True, {0: "ValueError: no [data]"})
    expected = "job x has ended after version 0; its workers: 1 failed; worker 0 failed: ValueError: no [data]"
    assert top.last_line("x", look) == expected


# -- finding ---------------------------------------------------------------------------------------


def test_jobs_are_found_by_their_sockets_whatever_their_names(request: pytest.FixtureRequest) -> None:
    name = f"{_name(request)} with/slash é"
    with _job(name, workers=1) as job:
        assert discovery.listening()[name] == {"host", 0}
        assert name in discovery.running_jobs()
        job.let_go()
        assert discovery.listening()[name] == {"host"}
    assert name not in discovery.running_jobs()


def test_other_sockets_are_no_jobs() -> None:
    table = b"""Num       RefCount Protocol Flags    Type St Inode Path
0: 00000002 00000000 00010000 0001 01 1 /run/fastps/a/0
0: 00000002 00000000 00010000 0001 01 2 @fastps/a
0: 00000002 00000000 00010000 0001 01 3 @fastps/a/b
0: 00000003 00000000 00000000 0001 03 4 @fastps/connected/0
0: 00000003 00000000 00000000 0001 03 5
0: 00000002 00000000 00010000 0001 01 6 @fastps/b/17
"""
    names = [each.name for each in unix_sockets.in_table(table) if each.listens]
    assert discovery.places_in(names) == {"b": {17}}


def test_a_job_of_another_user_is_not_ours_and_a_silent_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "listening", lambda: {"here": {0}})
    for finding in (rendezvous.OtherUser(), rendezvous.Absent(), rendezvous.Silent(), rendezvous.AbiDiffers(1, 2)):
        monkeypatch.setattr(rendezvous, "connect", Mock(side_effect=finding))
        is_ours = isinstance(finding, rendezvous.Silent | rendezvous.AbiDiffers)
        assert discovery.running_jobs() == ["here"] * is_ours


def test_one_job_is_chosen_and_none_or_several_are_an_error(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = f"{_name(request)}-a", f"{_name(request)}-b"
    update, weights = fastps.SGD(lr=1.0), {"w": np.ones(4, np.float32)}
    with _only(monkeypatch, first, second):
        with pytest.raises(top.NoJobError, match="expected a running job of this user, found none"):
            top.choose_job(None)
        with fastps.Store.create(weights, update, job=first):
            assert top.choose_job(None) == top.choose_job(first) == first
            with pytest.raises(top.NoJobError, match=f"expected a running job other of this user, found {first}"):
                top.choose_job("other")
            with fastps.Store.create(weights, update, job=second):
                assert top.choose_job(second) == second
                with pytest.raises(fastps.UsageError) as refused:
                    top.choose_job(None)
                said = str(refused.value).splitlines()
                assert said[0].startswith("expected one running job, found 2: name one of them, as in fastps top ")
                own = f"process {os.getpid()}, "
                assert [line.split(": ")[0].strip() for line in said[1:]] == [first, second]
                assert all(own in line and line.endswith(" old)") and "python" not in line.split()[1] for line in said[1:])


# -- showing ---------------------------------------------------------------------------------------


def test_rates_are_of_the_time_between_two_looks() -> None:
    with _observed() as (observer, worker):
        before = observer.look()
        for _ in range(6):
            worker.step({"w": np.ones(4)})
        now = observer.look()
    now = Look(before.seen_ns + 2_000_000_000, now.workers, now.shards, now.settled, now.failures, now.over)
    row, shard = top.rows_of(before, now)
    assert (row["kind"], row["worker"], row["steps"], row["steps_per_s"], row["loss"]) == ("worker", 0, 6, 3.0, None)
    assert (shard["kind"], shard["shard"], shard["version"], shard["folds_per_s"]) == ("shard", 0, 6, 3.0)
    assert shard["staleness"] == [(0, 6)]
    assert [row.get("steps_per_s", row.get("folds_per_s")) for row in top.rows_of(None, now)] == [None, None]
    json.dumps(top.rows_of(before, now), allow_nan=False)


def _node(node: int, seconds: float, **more: Any) -> fastps.NodeStatistics:
    """Figures that came after so many seconds; all of them grow with the time."""
    count = int(seconds)
    return fastps.NodeStatistics(
        node, f"node{node}", "live", 4, 10 * count, 250_000_000 * count, 5_000_000 * count, 7_000_000 * count,
        heard_ns=int(seconds * 1e9), **more,
    )  # fmt: skip


def test_rates_of_nodes_are_of_the_time_between_their_figures() -> None:
    """Node 2 is silent since the first look, and node 3 has not come."""
    known = {"pushes": 40, "lag": 2, "round_trip_ns": 310_000, "clock_offset_ns": -1_250_000, "clock_error_ns": 161_000}
    before = Look(10_000_000_000, [], [], True, {}, False, [_node(0, 9.5), _node(1, 9.8, **known), _node(2, 9.7)])
    last = [_node(0, 13.5), _node(1, 13.8, **known), _node(2, 9.7), fastps.NodeStatistics(3)]
    rows = top.rows_of(before, Look(14_000_000_000, [], [], True, {}, False, last))
    assert [row["state"] for row in rows] == ["live", "live", "silent", "joining"]
    assert [row["steps_per_s"] for row in rows] == [10.0, 10.0, None, None]
    assert (rows[1]["sent_bytes_s"], rows[1]["received_bytes_s"], rows[1]["wait_share"]) == (5e6, 7e6, 0.25)
    assert (rows[0]["lag"], rows[1]["lag"], rows[0]["clock_offset_ns"]) == (None, 2, None)
    json.dumps(rows, allow_nan=False)
    [table, _, _] = top.tables("x", rows, Look(0, [], [], True, {}, False))
    assert list(table.cells[1]) == [
        "1", "node1", "live", "4", "130", "10.0", "2", "25%", "5.0", "7.0", "0.00", "0", "0.31", "-1.25 ± 0.17",
    ]  # fmt: skip
    assert list(table.cells[3])[5:] == ["-", "-", "-", "-", "-", "0.00", "0", "-", "-"]


def test_a_job_of_several_nodes_is_one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    arenas = ["b.node0", "b.node0.home0", "b.node0.home1", "b.node1"]
    monkeypatch.setattr(discovery, "running_jobs", lambda: arenas)
    assert top.choose_job(None) == top.choose_job("b") == "b.node0"
    assert top.choose_job("b.node1") == "b.node1" and top.choose_job("b.node0.home1") == "b.node0.home1"
    with pytest.raises(top.NoJobError, match="expected a running job c of this user, found b"):
        top.choose_job("c")


@pytest.mark.parametrize(("shards", "text"), [(1, "10"), (12, "all 12")])
def test_one_look_prints_workers_and_shards(request: pytest.FixtureRequest, shards: int, text: str) -> None:
    console, shown = _console()
    with _job(_name(request), sync=f"asp,shards={shards}") as job:
        rows = top.look_once(job.store.job, console, interval_s=0.01)
    assert [row["kind"] for row in rows] == ["worker"] * 2 + ["shard"] * shards
    text_shown = shown.getvalue()
    assert all(each in text_shown for each in (job.store.job, "live", "█", text))
    assert "has ended" not in text_shown


@pytest.mark.parametrize("is_terminal", [False, True], ids=["file", "terminal"])
def test_watching_ends_with_the_job(is_terminal: bool, request: pytest.FixtureRequest) -> None:
    """A terminal is shown every look."""
    console, file = _console(force_terminal=is_terminal)
    with _job(_name(request)) as job:
        rows = top.watch(job.store.job, console, clock=Scripted(lambda: None, job.let_go))
        assert {row["state"] for row in rows if row["kind"] == "worker"} == {"left"}
    shown = file.getvalue()
    if is_terminal:
        assert shown.count("pushes by staleness") >= 3  # two live and the last; the display may draw one of them again
        assert "live" in shown and "left" in shown and "has ended after version 10" in shown
    else:
        assert shown.splitlines()[-1] == f"job {job.store.job} has ended after version 10; its workers: 2 left"


def test_watching_ends_when_the_whole_job_is_killed(request: pytest.FixtureRequest) -> None:
    (console, shown), name = _console(), _name(request)

    def own() -> None:
        with _job(name):
            os.write(writer, b"x")
            time.sleep(60)

    reader, writer = os.pipe()
    owner = processes.start(own)
    os.close(writer)
    assert os.read(reader, 1) == b"x"

    def kill() -> None:
        os.kill(owner.process_id, signal.SIGKILL)
        processes.finish([owner], 20)  # its workers find their gate closed, and leave

    top.watch(name, console, interval_s=0.05, clock=Scripted(kill))
    os.close(reader)
    assert f"job {name} has ended after version 10" in shown.getvalue()


def test_ctrl_c_ends_the_look_and_not_the_job(request: pytest.FixtureRequest) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    console, shown = _console()
    with _job(_name(request)) as job:
        rows = top.watch(job.store.job, console, clock=Scripted(lambda: None, interrupt))
        assert rows[0]["state"] == "live"
        assert discovery.listening()[job.store.job] == {"host", 0, 1}
    assert "has ended" not in shown.getvalue()


def test_a_job_that_ended_before_the_look_is_named() -> None:
    with pytest.raises(top.NoJobError, match="job gone-already ended before it could be looked at"):
        top.watch("gone-already", _console()[0])


# -- the command -----------------------------------------------------------------------------------


def test_the_command_writes_one_object(request: pytest.FixtureRequest) -> None:
    with _job(_name(request), sync="ssp:3") as job:
        outcome = commands.done("top", job.store.job, "--once", "--interval", "0.05", "--json", "-")
    document = json.loads(outcome.stdout)
    assert document["command"] == "top"
    rows = [(row["kind"], row.get("steps"), row.get("version")) for row in document["rows"]]
    assert rows == [("worker", 5, None), ("worker", 5, None), ("shard", None, 10)]
    keys = {"state", "steps_per_s", "loss", "staleness_mean", "staleness_max", "wait_share", "folded", "dropped"}
    assert keys <= set(document["rows"][0])
    assert {"folds_per_s", "staleness"} <= set(document["rows"][-1])
    assert "Traceback" not in outcome.stderr


def test_a_job_that_does_not_run_is_one_sentence_and_exit_code_1() -> None:
    outcome = commands.fastps("top", "no-such-job", "--once")
    assert (outcome.returncode, outcome.stdout, outcome.stderr.count("\n")) == (1, "", 1)
    assert "expected a running job no-such-job of this user, found" in outcome.stderr


@pytest.mark.parametrize(("found", "code", "message"), [([], 1, "found none"), (["a", "b"], 2, "fastps top a")])
def test_without_a_name_none_and_several_jobs_have_exit_codes_of_their_own(found: list[str], code: int, message: str) -> None:
    program = (
        "from fastps.cli.main import main; from fastps.membership import discovery; "
        f"discovery.running_jobs = lambda: {found!r}; main()"
    )
    outcome = commands.fastps("top", code=program)
    assert (outcome.returncode, outcome.stdout) == (code, "")
    assert message in outcome.stderr


@pytest.mark.parametrize(("once", "code"), [([], 0), (["--once"], 130)])
@pytest.mark.sampled(2)
def test_ctrl_c_ends_a_look_with_its_rows_and_what_has_none_with_code_130(
    request: pytest.FixtureRequest, tmp_path: Path, once: list[str], code: int
) -> None:
    file = tmp_path / "rows.json"
    with _job(_name(request)) as job:
        # The long pause says that it has begun, so that the signal comes in the middle of it.
        program = (
            "from fastps.cli.main import main\nfrom fastps.system import clock\nwait = clock.Clock.sleep_ns\n"
            "clock.Clock.sleep_ns = lambda self, ns: (ns > 10**9 and print('pause', flush=True), wait(self, ns))\n"
            "main()"
        )
        command = [sys.executable, "-c", program, "top", job.store.job, *once, "--interval", "50", "--json", str(file)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stderr is not None
            for line in process.stdout:  # ends, too, where the command did
                if "pause" in line:
                    break
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == code
            assert process.stderr.read() == ""
    if once:
        assert not file.exists()
    else:
        assert json.loads(file.read_text())["rows"][0]["state"] == "live"


@pytest.mark.slow
def test_the_launcher_names_the_job_in_one_line_and_the_list_of_jobs_shows_its_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, ready = tmp_path / "gate", tmp_path / "ready"
    script = program(
        tmp_path,
        "import os, pathlib, time, numpy as np, fastps\n"
        "with fastps.Store.create({'w': np.ones(3, np.float32)}, fastps.SGD(lr=1.0), job=os.environ['FASTPS_JOB']):\n"
        f"    pathlib.Path({str(ready)!r}).touch()\n"
        f"    while not os.path.exists({str(gate)!r}): time.sleep(0.02)\n",
        "train it.py",
    )[1]
    command = [sys.executable, "-m", "fastps", "run", "--sync", "asp", script]
    environment = {name: value for name, value in os.environ.items() if name not in commands.OF_A_JOB}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as launched:
        assert launched.stderr is not None
        try:
            line = launched.stderr.readline()
            found = re.fullmatch(r"fastps: 1 worker, asp, job (train-it-[0-9a-f]{6}) \(fastps top \1\)\n", line)
            assert found, line
            processes.wait_until(ready.exists, 60, "the script has not begun")
            with (
                _only(monkeypatch, found[1]),
                fastps.Store.create({"w": np.ones(3, np.float32)}, fastps.SGD(lr=1.0), job=f"{found[1]}x"),
            ):
                monkeypatch.setattr(discovery, "running_jobs", lambda: [found[1], "other"])
                with pytest.raises(fastps.UsageError, match=rf"fastps run --sync asp .*train it.* \(process {launched.pid}, "):
                    top.choose_job(None)
        finally:
            gate.touch()
    assert launched.returncode == 0


def test_a_command_line_that_anybody_may_have_chosen_is_printable_and_short() -> None:
    assert top.command_text(["/usr/bin/python3.12", "-m", "fastps", "run", "/a/b/train.py"]) == "fastps run train.py"
    assert top.command_text(["python", "x\x1b[2J\n\udc80"]) == "'x?[2J??'"
    assert len(top.command_text(["a" * 5000])) == 83 and top.command_text([]) == ""


@pytest.mark.slow
def test_a_job_is_named_by_the_option_or_the_environment_and_quiet_leaves_the_line_out(tmp_path: Path) -> None:
    script = program(
        tmp_path, "import os; print(os.environ['FASTPS_JOB'], os.environ['FASTPS_RUN'] == os.environ['FASTPS_JOB'])"
    )[1]
    for words, variables, name in ((("--job", "a b"), {"FASTPS_JOB": "c"}, "a b"), ((), {"FASTPS_JOB": "c"}, "c")):
        ended = commands.fastps("run", *words, script, **variables)
        assert (ended.returncode, ended.stdout) == (0, f"[0] {name} False\n")
        assert f"job {name} (fastps top {shlex.quote(name)})\n" in ended.stderr
    quiet = commands.done("run", "--quiet", script, FASTPS_JOB="mine", FASTPS_RANK="0")  # inside a worker of the job "mine"
    assert quiet.stderr == "" and quiet.stdout.startswith("[0] script-")
    name = f"{os.getpid()}-taken"
    with fastps.Store.create({"w": np.ones(3, np.float32)}, fastps.SGD(lr=1.0), job=name):
        assert f"expected a name that no running job has, found {name}, which runs" in commands.refused(
            "run", "--job", name, script
        )
