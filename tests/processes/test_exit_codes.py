"""An exit code of 0 means: every rank ended with 0, was replaced by one that did, or is said to have been lost on the way."""

import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fastps.errors import UsageError
from fastps.processes.launcher import Launcher
from fastps.processes.options import JobOptions
from fastps.processes.outcome import Outcome, failure_panel
from fastps.processes.spawn import spawn
from tests.support.scripts import program

CONTINUE = JobOptions(on_worker_loss="continue")
BEGIN = """
import os, signal, sys, time
rank, fresh = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

def stay_last(folder, others=(1, 2)):
    # On rank 0 return when the launcher has seen the others end; on these at once.
    if rank:
        os.symlink(str(os.getpid()), f"{folder}/{rank}")
        return
    while not all(os.path.islink(f"{folder}/{each}") for each in others):
        time.sleep(0.01)
    while any(os.path.exists("/proc/" + os.readlink(f"{folder}/{each}")) for each in others):
        time.sleep(0.01)
"""


def _run(script: str, options: JobOptions, workers: int = 3) -> Outcome:
    return Launcher([sys.executable, "-c", BEGIN + script], workers, options=options, env="torchrun").run()


def _said(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if "went on without it" in record.getMessage()]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("end", "code"), [("sys.exit('cannot save')", 1), ("os.kill(os.getpid(), 9)", -9), ("os._exit(5)", 5)])
@pytest.mark.parametrize("options", [CONTINUE, JobOptions(restarts=3)])
def test_worker_that_fails_after_all_others_have_ended_fails_the_job(
    end: str, code: int, options: JobOptions, tmp_path: Path
) -> None:
    outcome = _run(f"stay_last({str(tmp_path)!r})\nif rank == 0:\n    {end}", options)
    assert outcome.exit_code == 1
    assert outcome.first_failure is not None
    assert (outcome.first_failure.rank, outcome.first_failure.exit_code) == (0, code)


def test_workers_that_a_job_goes_on_without_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fastps.launch"):
        outcome = _run(f"stay_last({str(tmp_path)!r})\nif rank: sys.exit('a bug')", CONTINUE)
    assert outcome.exit_code == 0
    assert _said(caplog) == [f"worker {rank} (exit code 1) was not replaced; the job went on without it" for rank in (1, 2)]


OF_THE_SCRIPT = """
import os, time, torch, fastps
from fastps.kernels.shm.arena import LANE_LIVE
opt = fastps.DistributedOptimizer(torch.optim.SGD(torch.nn.Linear(4, 1).parameters(), lr=0.01), sync="asp", on_worker_loss=%s)
opt.wait_for_start()
if fastps.rank() == 1:
    os.kill(os.getpid(), 9)
while opt.worker.store.arena.lane_state(1) == LANE_LIVE:
    opt.worker.check_peers()
    time.sleep(0.01)
time.sleep(3)  # longer than the launcher lets others end by themselves
"""


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("says", ["script", "variable", "neither"])
def test_job_goes_on_after_a_loss_where_the_script_or_the_variable_says_so(
    says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if says == "variable":
        monkeypatch.setenv("FASTPS_ON_WORKER_LOSS", "continue")
    outcome = Launcher(program(tmp_path, OF_THE_SCRIPT % ("'continue'" if says == "script" else "None")), 2).run()
    assert outcome.exit_code == (says == "neither")
    assert [worker.exit_code for worker in outcome.workers] == [int(says == "neither"), -9]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("says", ["script", "argument"])
def test_spawn_goes_on_after_a_loss_as_a_launcher_does(says: str, tmp_path: Path) -> None:
    def work(rank: int) -> None:
        if rank == 1 and says == "argument":
            raise ValueError("before it attaches")  # the others would wait for it
        exec(OF_THE_SCRIPT % "'continue', timeout_s=20", {})
        (tmp_path / f"{rank}").touch()

    spawn(work, workers=2, start_method="fork", on_worker_loss="continue" if says == "argument" else None)
    assert (tmp_path / "0").exists()


@pytest.mark.parametrize(("env", "is_said"), [("auto", True), ("torchrun", False)])
def test_failure_over_a_process_group_names_the_cure_where_the_launcher_chose_the_variables(
    env: str, is_said: bool, tmp_path: Path
) -> None:
    text = "import os\nif os.environ.get('RANK'): raise RuntimeError('Distributed package has no NCCL built in')"
    outcome = Launcher(program(tmp_path, text), 1, env=env).run()
    assert outcome.exit_code == 1
    assert ("run it with --env fastps" in outcome.hint) == is_said
    assert ("--env fastps" in " ".join(str(failure_panel(outcome).renderable).split())) == is_said


@pytest.mark.slow
def test_worker_that_ends_early_does_not_prevent_replacements() -> None:
    script = "if rank == 1: sys.exit(0)\ntime.sleep(1)\nif rank == 2 and fresh: os.kill(os.getpid(), 9)\ntime.sleep(1)"
    outcome = _run(script, JobOptions(restarts=1))
    assert outcome.exit_code == 0
    assert [(worker.rank, worker.exit_code) for worker in outcome.workers] == [(0, 0), (1, 0), (2, -9), (2, 0)]


def test_replacement_that_fails_last_fails_the_job() -> None:
    script = "time.sleep((0.3 if fresh else 1) if rank == 2 else 0.8)\nif rank == 2: sys.exit(3)"
    outcome = _run(script, JobOptions(restarts=1))
    assert outcome.exit_code == 1
    assert outcome.first_failure is not None
    assert outcome.first_failure.restart == 1


@pytest.mark.slow
@pytest.mark.parametrize(("command", "code"), [
    (["-m", "fastps", "run", "-n", "1"], 1), (["-m", "fastps.processes.on_host", "40", sys.executable], 3),
])  # fmt: skip
def test_exit_codes_hold_where_the_caller_ignores_sigchld(command: list[str], code: int, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, *command, program(tmp_path, "import sys\nsys.exit(3)")[1]],
        stdin=subprocess.PIPE, preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
    ) as process:  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(b"{}\n")  # the variables that on_host reads; its end would end the command
        process.stdin.flush()
        assert process.wait(60) == code


def test_spawn_is_refused_where_children_have_no_exit_code() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(UsageError, match=r"expected SIGCHLD to have .* found it ignored; call signal.signal"):
            spawn(print, workers=1)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_worker_that_a_real_time_signal_ends_is_reported_by_its_number() -> None:
    outcome = _run("os.kill(os.getpid(), signal.SIGRTMIN + 6)", JobOptions(), 1)
    assert outcome.first_failure is not None
    assert outcome.first_failure.ending == f"ended by signal {signal.SIGRTMIN + 6}"
