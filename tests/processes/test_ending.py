"""Signals to the launcher: what reaches the workers, how long they may save, and what ends them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from fastps.errors import UsageError
from fastps.processes.options import JobOptions
from fastps.processes.outcome import LaunchedWorker
from tests.support.processes import await_stop, is_stopped
from tests.support.scripts import output, program

BEGIN = """
import os, pathlib, signal, sys, time
folder, rank = pathlib.Path({folder!r}), os.environ["FASTPS_RANK"]
def note(number, frame):
    with open(folder / f"signals{{rank}}", "a") as file:
        print(signal.Signals(number).name, file=file)
def wait_for(name):
    while not (folder / name).exists(): time.sleep(0.02)
def ready():
    (folder / f"ready{{rank}}").write_text(str(os.getpid()))
"""


def _inherit(ignored: signal.Signals | None) -> None:
    """Begin the child with this signal ignored, and SIGHUP not, which the tests' own shell may ignore (nohup)."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if ignored is not None:
        signal.signal(ignored, signal.SIG_IGN)


class Job:
    """A launched job of two workers, in a folder where the workers leave files."""

    def __init__(self, folder: Path, script: str, *options: str, ignored: signal.Signals | None = None) -> None:
        self.folder = folder
        file = program(folder, BEGIN.format(folder=str(folder)) + script)[1]
        command = [sys.executable, "-m", "fastps.cli", "run", "-n", "2", *options, file]
        with (folder / "log").open("w") as log:
            how: Any = {"stdout": log, "stderr": log, "start_new_session": True, "preexec_fn": partial(_inherit, ignored)}
            self.process = subprocess.Popen(command, **how)

    def await_it(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline and self.process.poll() is None, self.log
            time.sleep(0.02)

    def await_workers(self) -> list[int]:
        """Wait until both workers are ready; return their process ids."""
        files = [self.folder / f"ready{rank}" for rank in range(2)]
        self.await_it(lambda: all(file.exists() and file.read_text() for file in files))
        return [int(file.read_text()) for file in files]

    def signals(self, rank: int) -> list[str]:
        file = self.folder / f"signals{rank}"
        return file.read_text().split() if file.exists() else []

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()


Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    jobs: list[Job] = []

    def begin(script: str, *options: str, ignored: signal.Signals | None = None) -> Job:
        jobs.append(Job(tmp_path, script, *options, ignored=ignored))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.process.kill()
        job.process.wait()


@pytest.mark.parametrize(("number", "to_all", "saves_s", "code"), [
    # The save takes longer than the four seconds that workers once had.
    pytest.param(signal.SIGINT, False, 5.0, 130, id="Ctrl-C and a long save", marks=pytest.mark.slow),
    pytest.param(signal.SIGTERM, True, 0.0, 143, id="SIGTERM to every process"),
])  # fmt: skip
def test_a_signal_reaches_the_workers_once_and_they_save_until_they_are_done(
    start: Start, number: signal.Signals, to_all: bool, saves_s: float, code: int
) -> None:
    """A handler that is called again within its save would save twice at once."""
    job = start(f"signal.signal({int(number)}, note)\nready()\nwait_for('saved')")
    job.await_workers()
    launcher = psutil.Process(job.process.pid)
    for process in [launcher, *(launcher.children(recursive=True) if to_all else ())]:
        process.send_signal(number)
    job.await_it(lambda: "waiting up to 29 s for worker 0, worker 1 to save and end; Ctrl-C kills at once" in job.log)
    assert [job.signals(rank) for rank in range(2)] == [[number.name]] * 2
    time.sleep(saves_s)
    assert job.process.poll() is None
    (job.folder / "saved").touch()
    assert job.process.wait(60) == code, job.log


@pytest.mark.slow
def test_warnings_reach_the_workers_and_end_nothing(start: Start) -> None:
    numbers = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP]
    job = start(f"for number in {[int(number) for number in numbers]}: signal.signal(number, note)\nready()\nwait_for('end')")
    job.await_workers()
    for count, number in enumerate(numbers, 1):
        job.process.send_signal(number)
        job.await_it(lambda count=count: all(len(job.signals(rank)) == count for rank in range(2)))
    (job.folder / "end").touch()
    assert job.process.wait(60) == 0, job.log
    assert [job.signals(rank) for rank in range(2)] == [[number.name for number in numbers]] * 2


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_ctrl_c_that_was_ignored_at_the_start_stays_ignored(start: Start, method: str) -> None:
    script = "assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN\nready()\nwait_for('end')"
    job = start(script, "--start-method", method, ignored=signal.SIGINT)
    job.await_workers()
    job.process.send_signal(signal.SIGINT)
    (job.folder / "end").touch()
    assert job.process.wait(60) == 0, job.log


@pytest.mark.slow
def test_a_worker_that_waits_for_its_gpu_deaf_to_signals_is_killed_by_name_within_seconds(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in cudaStreamSynchronize: the process is in C code, and Python's handler of SIGTERM does not run."""
    for name, value in (("GPUS", "0,1"), ("PLACEMENT", "device")):
        monkeypatch.setenv(f"FASTPS_{name}", value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # as many as are asked for; no worker uses one
    deaf = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\nready()\nwait_for('never')"
    job = start(f"if rank == '0': ready(); wait_for('ready1'); sys.exit(3)\n{deaf}")
    began = time.monotonic()
    assert job.process.wait(60) == 1, job.log
    assert "killed worker 1, deaf to SIGTERM: the GPU may wait" in job.log and "orker 0 " in job.log.replace("worker 1", "")
    assert time.monotonic() - began < 25, "not after the usual grace of 30 s"


@pytest.mark.slow
def test_ctrl_z_stops_the_workers_with_the_launcher_and_sigcont_wakes_them(start: Start) -> None:
    job = start("ready()\nwait_for('end')")
    workers = job.await_workers()
    job.process.send_signal(signal.SIGTSTP)
    for process in [*workers, job.process.pid]:
        await_stop(process)
    (job.folder / "end").touch()
    time.sleep(0.1)
    assert all(is_stopped(process) for process in workers)
    job.process.send_signal(signal.SIGCONT)
    assert job.process.wait(60) == 0, job.log


@pytest.mark.slow
def test_a_second_ctrl_c_kills_at_once(start: Start) -> None:
    job = start("signal.signal(signal.SIGINT, note)\nready()\nwait_for('never')")
    workers = job.await_workers()
    job.process.send_signal(signal.SIGINT)
    job.await_it(lambda: all(job.signals(rank) for rank in range(2)))
    began = time.monotonic()
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(25) == 130, job.log
    assert time.monotonic() - began < 25, "before the grace ends"
    assert not [worker for worker in workers if psutil.pid_exists(worker)]


@pytest.mark.parametrize("grace_s", [-1.0, float("nan"), float("inf"), 1e300])
def test_a_grace_out_of_range_is_wrong_usage(grace_s: float) -> None:
    with pytest.raises(UsageError, match="--grace: expected 0 to 86400 seconds, found"):
        JobOptions(grace_s=grace_s)


def test_the_handlers_of_before_are_back_after_a_run(tmp_path: Path) -> None:
    output([sys.executable, "-c", (
        "import signal, sys\nfrom fastps.processes.launcher import Launcher\n"
        "numbers = sorted(signal.valid_signals())\nbefore = [signal.getsignal(number) for number in numbers]\n"
        "assert Launcher([sys.executable, '-c', '0'], 1).run().exit_code == 0\n"
        "assert before == [signal.getsignal(number) for number in numbers]\n"
    )])  # fmt: skip


def test_a_signal_to_a_worker_that_has_ended_leaves_its_exit_to_the_launchers_wait() -> None:
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    LaunchedWorker(0, ended).send(signal.SIGKILL)
    assert os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT) is not None
    assert ended.wait() == 0


@pytest.mark.slow
def test_signal_that_comes_before_the_workers_have_begun_reaches_them(tmp_path: Path) -> None:
    job = Job(tmp_path, "import torch\ntime.sleep(60)")  # the fork server imports torch first
    job.await_it(lambda: len(psutil.Process(job.process.pid).children()) == 2)  # the probe and the fork server
    job.process.send_signal(signal.SIGHUP)
    assert job.process.wait(60) == 1
    assert "failed first: ended by SIGHUP" in job.log
