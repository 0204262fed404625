"""The launcher: environment, output, exit codes, first failure, Ctrl-C, and that nothing outlives it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fastps.errors import UsageError
from fastps.processes.launcher import Launcher
from fastps.processes.options import JobOptions
from tests.support.processes import wait_until
from tests.support.scripts import program


def test_workers_get_torchruns_variables(tmp_path: Path) -> None:
    of_torchrun = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    names = [*of_torchrun, "FASTPS_JOB", "FASTPS_SYNC", "OMP_NUM_THREADS"]
    names_text = f"[os.environ.get(name) for name in {names!r}]"
    text = f"import os, json; open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').write(json.dumps({names_text}))"
    launcher = Launcher(program(tmp_path, text), 2, sync="ssp:3")
    assert launcher.run().exit_code == 0
    seen = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // 2)))
    assert seen == [[str(r), str(r), "2", "2", "127.0.0.1", launcher.job, "ssp:3", threads] for r in range(2)]


def test_output_is_passed_on_with_its_workers_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Launcher(program(tmp_path, "import sys; print('out'); print('no newline', end='', file=sys.stderr)"), 2).run()
    captured = capsys.readouterr()
    assert sorted(captured.out.splitlines()) == ["[0] out", "[1] out"]
    assert sorted(captured.err.splitlines()) == ["[0] no newline", "[1] no newline"]


def test_progress_bars_move_and_what_fastps_says_comes_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "import sys, fastps\nprint('half', end='\\r')\nprint('whole')\nraise fastps.UsageError('too much')"
    for tracebacks in (False, True):
        Launcher(program(tmp_path, text), 1, tracebacks=tracebacks, start_method="spawn").run()
        captured = capsys.readouterr()
        assert captured.out == "[0] half\n[0] whole\n"
        assert captured.err.splitlines()[-1] == "[0] fastps.errors.UsageError: too much"
        assert ("Traceback" in captured.err) == tracebacks


def test_sigterm_ends_everything_as_ctrl_c_does(tmp_path: Path) -> None:
    text = "import os, signal, time\nos.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(60)"
    outcome = Launcher(program(tmp_path, text), 1).run()
    assert outcome.exit_code == 143
    assert outcome.workers[0].exit_code == -signal.SIGTERM
    assert outcome.seconds < 30


def test_the_first_failure_is_reported_and_the_others_are_ended(tmp_path: Path) -> None:
    text = "import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit('the disk is full')\ntime.sleep(60)"
    began = time.monotonic()
    outcome = Launcher(program(tmp_path, text), 3).run()
    assert time.monotonic() - began < 30
    assert outcome.exit_code == 1
    assert outcome.first_failure is not None
    assert (outcome.first_failure.rank, outcome.first_failure.exit_code) == (1, 1)
    assert list(outcome.first_failure.errors.tail) == ["the disk is full"]
    assert [worker.exit_code for worker in outcome.workers] == [-signal.SIGTERM, 1, -signal.SIGTERM]


def test_workers_that_ignore_everything_are_killed(tmp_path: Path) -> None:
    text = (
        "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.environ['RANK'] == '1':\n    time.sleep(0.5)\n    sys.exit(3)\ntime.sleep(60)"
    )
    outcome = Launcher(program(tmp_path, text), 2, options=JobOptions(grace_s=0.5)).run()
    assert [worker.exit_code for worker in outcome.workers] == [-signal.SIGKILL, 3]


def test_no_worker_is_wrong_usage() -> None:
    with pytest.raises(UsageError, match="at least 1 worker, found 0"):
        Launcher([sys.executable], 0)


def _start_cli(arguments: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "fastps.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def _wait_for_children(parent: int) -> list[psutil.Process]:
    wait_until(lambda: len(psutil.Process(parent).children(recursive=True)) >= 2, 60, "expected 2 workers to start")
    return psutil.Process(parent).children(recursive=True)


@pytest.mark.timing
@pytest.mark.sampled(2)
@pytest.mark.parametrize("stubborn", [True, False])
def test_ctrl_c_ends_everything_within_five_seconds(tmp_path: Path, stubborn: bool) -> None:
    ready = tmp_path / "ready"
    ignore = "signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)" if stubborn else ""
    text = (
        f"import os, pathlib, signal, time\n{ignore}\npathlib.Path({str(ready)!r} + os.environ['RANK']).touch()\ntime.sleep(60)"
    )
    job = _start_cli(["run", "-n", "2", "--grace", "2", program(tmp_path, text)[1]])
    children = _wait_for_children(job.pid)
    while not all(Path(f"{ready}{rank}").exists() for rank in range(2)):
        time.sleep(0.02)
    began = time.monotonic()
    os.kill(job.pid, signal.SIGINT)
    job.communicate(timeout=60)
    assert time.monotonic() - began < 5
    assert job.returncode == 130
    assert not any(child.is_running() for child in children)


def test_killing_the_launcher_kills_its_workers(tmp_path: Path) -> None:
    job = _start_cli(["run", "-n", "2", program(tmp_path, "import time; time.sleep(60)")[1]])
    children = _wait_for_children(job.pid)
    job.kill()
    job.communicate(timeout=60)
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive


TRAINING = """
import os, sys, time
import numpy as np
import fastps
update = fastps.SGD(lr=0.1)
weights = {"w": np.zeros(1000, np.float32)}
from fastps.job.layout import Layout, place
layout = Layout(place([("w", (1000,), (1,), 0)]), 1, update.rule, fastps.parse_policy(os.environ["FASTPS_SYNC"]), 3)
if fastps.rank() == 0:
    store = fastps.Store.create(weights, update, sync=os.environ["FASTPS_SYNC"], workers=3, job=os.environ["FASTPS_JOB"])
else:
    store = fastps.Store.connect(os.environ["FASTPS_JOB"], layout, [update.hyper])
with store, store.attach(fastps.rank()) as worker:
    worker.wait_for_start()
    for step in range(10**9):
        worker.step({"w": np.ones(1000)})
        if step == 20 and fastps.rank() == 2:
            MISHAP
"""


@pytest.mark.parametrize(("sync", "mishap", "ending"), [
    ("bsp", "raise RuntimeError('boom')", 1),
    pytest.param("asp", "os.kill(os.getpid(), 9)", -9, marks=pytest.mark.slow),
    pytest.param("bsp", "os._exit(7)", 7, marks=pytest.mark.slow),
])  # fmt: skip
def test_survivors_of_a_real_job_end_by_themselves_naming_the_first(
    tmp_path: Path, sync: str, mishap: str, ending: int
) -> None:
    script = program(tmp_path, TRAINING.replace("MISHAP", mishap))
    outcome = Launcher(script, 3, sync=sync, start_method="spawn").run()  # a fork server would import torch
    assert outcome.first_failure is not None
    assert (outcome.first_failure.rank, outcome.first_failure.exit_code) == (2, ending)
    failed_ns = outcome.first_failure.ended_ns
    for worker in outcome.workers[:2]:
        assert worker.exit_code == 1, "ended by itself, with an error"
        assert worker.ended_ns - failed_ns < 2_000_000_000
        assert "WorkerDiedError: worker 2" in worker.errors.tail[-1] or "worker 2" in worker.errors.tail[-1]
