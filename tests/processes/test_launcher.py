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

from fastps.processes.launcher import Launcher
from fastps.processes.options import JobOptions
from tests.support import store_job
from tests.support.processes import wait_until
from tests.support.scripts import program, started


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


@pytest.mark.slow
def test_workers_that_ignore_everything_are_killed(tmp_path: Path) -> None:
    text = (
        "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.environ['RANK'] == '1':\n    time.sleep(0.5)\n    sys.exit(3)\ntime.sleep(60)"
    )
    outcome = Launcher(program(tmp_path, text), 2, options=JobOptions(grace_s=0.5)).run()
    assert [worker.exit_code for worker in outcome.workers] == [-signal.SIGKILL, 3]


def _start_two(*words: str) -> tuple["subprocess.Popen[str]", list[psutil.Process]]:
    """`fastps run` of two workers with these words, and the processes that it has started."""
    job = started([sys.executable, "-m", "fastps.cli", "run", "-n", "2", *words], process_group=0)
    launcher = psutil.Process(job.pid)
    wait_until(lambda: len(launcher.children(recursive=True)) >= 2, 60, "expected 2 workers to start")
    return job, launcher.children(recursive=True)


@pytest.mark.timing
@pytest.mark.sampled(2)
@pytest.mark.parametrize("stubborn", [True, False])
def test_ctrl_c_ends_everything_within_five_seconds(tmp_path: Path, stubborn: bool) -> None:
    ready = tmp_path / "ready"
    ignore = "signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)" if stubborn else ""
    text = (
        f"import os, pathlib, signal, time\n{ignore}\npathlib.Path({str(ready)!r} + os.environ['RANK']).touch()\ntime.sleep(60)"
    )
    job, children = _start_two("--grace", "2", program(tmp_path, text)[1])
    while not all(Path(f"{ready}{rank}").exists() for rank in range(2)):
        time.sleep(0.02)
    began = time.monotonic()
    os.kill(job.pid, signal.SIGINT)
    job.communicate(timeout=60)
    assert time.monotonic() - began < 5
    assert job.returncode == 130
    assert not any(child.is_running() for child in children)


@pytest.mark.slow
def test_killing_the_launcher_kills_its_workers(tmp_path: Path) -> None:
    job, children = _start_two(program(tmp_path, "import time; time.sleep(60)")[1])
    job.kill()
    job.communicate(timeout=60)
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive


@pytest.mark.parametrize(("sync", "mishap", "ending"), [
    ("bsp", "raise RuntimeError('boom')", 1),
    pytest.param("asp", "os.kill(os.getpid(), 9)", -9, marks=pytest.mark.slow),
    pytest.param("bsp", "os._exit(7)", 7, marks=pytest.mark.slow),
])  # fmt: skip
def test_survivors_of_a_real_job_end_by_themselves_naming_the_first(sync: str, mishap: str, ending: int) -> None:
    script = store_job.command(sync, 10**9, mishap)
    outcome = Launcher(script, 3, sync=sync, start_method="spawn").run()  # a fork server would import torch
    assert outcome.first_failure is not None
    assert (outcome.first_failure.rank, outcome.first_failure.exit_code) == (2, ending)
    failed_ns = outcome.first_failure.ended_ns
    for worker in outcome.workers[:2]:
        assert worker.exit_code == 1, "ended by itself, with an error"
        assert worker.ended_ns - failed_ns < 2_000_000_000
        assert "WorkerDiedError: worker 2" in worker.errors.tail[-1] or "worker 2" in worker.errors.tail[-1]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_0_reads_what_is_piped_into_the_launcher_and_no_other_does(tmp_path: Path, method: str) -> None:
    (tmp_path / "script.py").write_text(
        "import os, sys; print(os.environ['FASTPS_RANK'], sys.stdin.read().split(), flush=True)\n"
    )
    command = [sys.executable, "-m", "fastps", "run", "-n", "2", "--start-method", method, "--", sys.executable, "script.py"]
    done = subprocess.run(command, input="one two", capture_output=True, text=True, cwd=tmp_path, timeout=60, check=True)
    assert sorted(done.stdout.splitlines()) == ["[0] 0 ['one', 'two']", "[1] 1 []"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=True
    )
    assert sorted(done.stdout.splitlines()) == ["[0] 0 []", "[1] 1 []"]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "said"), [
    (("-n", "2", "--trace", "t", "--sync", "asp"), "the script for itself, and --sync, --trace had no effect"),
    pytest.param(("-n", "1", "--checkpoint", "c"), "itself, and --checkpoint had no effect", marks=pytest.mark.slow),
    pytest.param(("-n", "2"), "the 2 has run the script for itself; wrap the script's optimizer", marks=pytest.mark.slow),
    (("-n", "2", "script.py", "--trace", "t"), "; behind the script --trace is its own option: put fastps' before it"),
    pytest.param(("-n", "1"), "", marks=pytest.mark.slow),
    pytest.param(("-n", "2", "--env", "torchrun"), "", marks=pytest.mark.slow),  # it has a process group of its own
])  # fmt: skip
def test_a_launch_whose_options_no_worker_has_read_says_so(options: tuple[str, ...], said: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('done')")
    command = [sys.executable, "-m", "fastps", "run", "--quiet", *options, "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=True)
    assert said in done.stderr if said else not done.stderr, done.stderr


@pytest.mark.slow
def test_a_worker_that_is_lost_at_the_end_and_not_replaced_is_a_failure_unless_continue_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, signal, time\n"
        "if os.environ['FASTPS_RANK'] == '0':\n"
        "    os.kill(os.getpid(), signal.SIGKILL) if os.path.exists('gone') else open('gone', 'w').close()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(3)\n"
    )
    for options, is_well in ((["--restarts", "1"], False), (["--restarts", "1", "--on-worker-loss", "continue"], True)):
        (tmp_path / "gone").unlink(missing_ok=True)
        command = [sys.executable, "-m", "fastps", "run", "-n", "2", *options, "--", sys.executable, "script.py"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
        assert (done.returncode == 0) == is_well, done.stderr
