"""Restarts by the launcher: the fork server replaces a lost worker, the job goes on, and what was injected is measured."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps
from fastps.errors import UsageError
from fastps.lab.live_faults import FaultPlan
from fastps.processes.forkserver import PROGRAM, READY
from fastps.processes.launcher import Launcher
from fastps.processes.options import JobOptions
from fastps.processes.outcome import Outcome
from tests.support import commands
from tests.support.scripts import program

TRAINING = """
import os, pathlib, signal, sys, time
import torch, fastps
folder = pathlib.Path(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
opt = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), sync="bsp")
opt.wait_for_start()
joined = opt.worker.generation
if joined:
    (folder / "joined").touch()
while opt.worker.steps < 60:
    if fastps.rank() == 1 and not joined and opt.worker.steps == 10:
        while not (folder / "ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    opt.zero_grad(); model(torch.ones(2, 4)).sum().backward(); opt.step()
    time.sleep(0.02 if not (folder / "joined").exists() else 0.001)
    if fastps.rank() == 0 and opt.worker.steps == 50:
        while not (folder / "joined").exists():
            time.sleep(0.01)
            opt.worker._membership.check(opt.worker.store.clock.now_ns())
is_forked = "fastps.processes.forkserver" in pathlib.Path("/proc/self/cmdline").read_text()
(folder / f"worker-{fastps.rank()}").write_text(f"{joined} {is_forked} {opt.worker.begun_at}")
opt.close()
"""


def _launcher(folder: Path, text: str, imports: list[str] | None = None, **options: Any) -> Launcher:
    """The launcher of two workers of a program, which gets the folder."""
    return Launcher([*program(folder, text), str(folder)], 2, options=JobOptions(**options), imports=imports)


def _ended(outcome: Outcome) -> list[tuple[int, int, int | None]]:
    """The rank, restart and exit code of each process of a job that ended well."""
    assert outcome.exit_code == 0, [list(worker.errors.tail) for worker in outcome.workers]
    return [(worker.rank, worker.restart, worker.exit_code) for worker in outcome.workers]


@pytest.mark.slow
def test_a_killed_worker_is_replaced_by_the_fork_server_and_the_job_ends_well(tmp_path: Path) -> None:
    launcher = _launcher(tmp_path, TRAINING, restarts=1)

    def look() -> None:
        if launcher._forkserver is not None and launcher._forkserver.is_ready:
            (tmp_path / "ready").touch()

    assert _ended(launcher.run(on_tick=look)) == [(0, 0, 0), (1, 0, -9), (1, 1, 0)]
    generation, is_forked, begun = (tmp_path / "worker-1").read_text().split()
    assert (generation, is_forked) == ("1", "True")
    assert int(begun) >= 10


PHASES = """
import os, sys, time, torch, fastps
fresh = "FASTPS_JOINS" not in os.environ
for phase in range(2):
    model = torch.nn.Linear(4, 1)
    opt = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), sync="asp" if phase == 0 else "bsp")
    if fresh:
        opt.wait_for_start()
    for step in range(5):
        opt.zero_grad(); model(torch.ones(2, 4)).sum().backward(); opt.step()
        if fresh and fastps.rank() == 0 and phase == 0 and step == 3:
            os.kill(os.getpid(), 9)
    while fresh and fastps.rank() == 1 and phase == 0 and opt.worker.store.arena.generation(0) == 0:
        opt.worker.check_peers()  # until the replacement has come
        time.sleep(0.01)
    opt.close()
"""


@pytest.mark.slow
def test_a_replaced_worker_0_makes_the_arena_of_the_next_optimizer(tmp_path: Path) -> None:
    assert sorted(_ended(_launcher(tmp_path, PHASES, restarts=1).run())) == [(0, 0, -9), (0, 1, 0), (1, 0, 0)]


NO_SHOW = """
import os, sys, torch, fastps
for phase in range(2):
    if os.environ["RANK"] == str(1 + phase):
        os.kill(os.getpid(), 9)
    model = torch.nn.Linear(4, 1)
    opt = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), sync="bsp")
    for _ in range(5):
        opt.zero_grad(); model(torch.ones(2, 4)).sum().backward(); opt.step()
    opt.close()
"""


@pytest.mark.slow
def test_nobody_waits_for_workers_that_failed_before_they_attached_and_are_not_replaced(tmp_path: Path) -> None:
    """Worker 1 does not come to the first optimizer, worker 2 not to the second."""
    outcome = Launcher(program(tmp_path, NO_SHOW), 3, options=JobOptions(on_worker_loss="continue")).run()
    assert _ended(outcome) == [(0, 0, 0), (1, 0, -9), (2, 0, -9)]
    assert outcome.seconds < 60


AFTERWARDS = """
import os, sys, time, torch, fastps
model = torch.nn.Linear(4, 1)
opt = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), sync="bsp")
for step in range(5):
    opt.zero_grad(); model(torch.ones(2, 4)).sum().backward(); opt.step()
    time.sleep(0.1)  # so that the job is seen
opt.close()
time.sleep(0.5 + fastps.rank())
sys.exit(fastps.rank() == 0)
"""


@pytest.mark.slow
def test_a_worker_that_fails_when_training_is_over_is_not_replaced_and_fails_the_launch(tmp_path: Path) -> None:
    outcome = _launcher(tmp_path, AFTERWARDS, restarts=2).run()
    assert [(worker.rank, worker.restart, worker.exit_code) for worker in outcome.workers] == [(0, 0, 1), (1, 0, 0)]
    assert outcome.exit_code == 1 and outcome.first_failure is outcome.workers[0]


LOSSES = """
import os, pathlib, signal, sys, time
import numpy
folder, restart = pathlib.Path(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if os.environ["RANK"] == "0":
    while not (folder / "life-2").exists():
        time.sleep(0.01)
    sys.exit()
is_forked = "fastps.processes.forkserver" in pathlib.Path("/proc/self/cmdline").read_text()
(folder / f"life-{restart}").write_text(f"{is_forked} {os.getppid()} {numpy.random.random()} {sys.argv[0]}")
print("life", restart)
while restart < 2 and not (folder / f"end-{restart}").exists():
    time.sleep(0.01)
if restart < 2:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def _lose_twice(folder: Path, before_second: Callable[[Launcher], None]) -> list[list[str]]:
    """Lose worker 1 twice, `before_second` between; returns what each of its three processes wrote."""
    launcher = _launcher(folder, LOSSES, ["numpy"], restarts=3)

    def look() -> None:
        if launcher._forkserver is not None and launcher._forkserver.is_ready and (folder / "life-0").exists():
            (folder / "end-0").touch()
        if (folder / "life-1").exists() and not (folder / "end-1").exists():
            before_second(launcher)
            (folder / "end-1").touch()

    assert _ended(launcher.run(on_tick=look, tick_s=0.02)) == [(0, 0, 0), (1, 0, -9), (1, 1, -9), (1, 2, 0)]
    return [(folder / f"life-{restart}").read_text().split() for restart in range(3)]


@pytest.mark.slow
def test_one_fork_server_forks_all_workers_and_replacements_which_are_processes_like_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lives = _lose_twice(tmp_path, lambda launcher: None)
    assert [life[0] for life in lives] == ["True", "True", "True"]
    assert {life[1] for life in lives} == {str(os.getpid())}, "each is the launcher's own child"
    assert len({life[2] for life in lives}) == 3, "numpy's random numbers are each process' own"
    assert {life[3] for life in lives} == {str(tmp_path / "script.py")}
    printed = [line for line in capsys.readouterr().out.splitlines() if "life" in line]
    assert printed == [f"[1] life {life}" for life in range(3)]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_without_a_fork_server_that_answers_a_replacement_is_a_new_process(tmp_path: Path, number: signal.Signals) -> None:
    def hurt(launcher: Launcher) -> None:
        assert launcher._forkserver_worker is not None
        launcher._forkserver_worker.send(number)

    assert [life[0] for life in _lose_twice(tmp_path, hurt)] == ["True", "True", "False"]


@pytest.mark.parametrize("waits", [False, True], ids=["before it is ready", "once it is ready"])
def test_a_fork_server_ends_without_a_word_with_a_launcher_that_has_read_nothing(waits: bool) -> None:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its, ours:
        command = [sys.executable, "-c", PROGRAM, "", str(its.fileno()), "json"]
        server = subprocess.Popen(command, pass_fds=[its.fileno()], stderr=subprocess.PIPE, text=True)
        its.close()
        if waits:
            assert ours.recv(16, socket.MSG_PEEK) == READY
        ours.close()
        _, said = server.communicate(timeout=60)
    assert (server.returncode, said) == (0, "")


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("word", [None, "continue"])
def test_without_restarts_left_the_others_go_on_alone_and_the_launch_fails_unless_told_to_continue(
    tmp_path: Path, word: str | None
) -> None:
    text = "import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit('no luck')\ntime.sleep(3)"
    outcome = _launcher(tmp_path, text, [], restarts=2, on_worker_loss=word).run()
    assert outcome.exit_code == (0 if word == "continue" else 1)
    assert [worker.exit_code for worker in outcome.workers if worker.rank == 0] == [0]
    assert [(worker.rank, worker.restart) for worker in outcome.workers if worker.failed][-1][0] == 1
    assert len(outcome.workers) <= 4


def test_when_all_fail_the_first_failure_is_reported(tmp_path: Path) -> None:
    outcome = _launcher(tmp_path, "import sys\nsys.exit('the disk is full')", [], restarts=2).run()
    assert outcome.exit_code == 1
    assert outcome.first_failure is not None
    assert list(outcome.first_failure.errors.tail)[-1] == "the disk is full"
    assert len(outcome.workers) == 4


@pytest.mark.parametrize("text", ["kill", "kill:x", "maim:3", "kill:-1", "kill:1.5", "stop:1,seconds:0"])
def test_a_plan_of_faults_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--inject-faults"):
        FaultPlan.parse(text)


def test_a_plans_moments_follow_from_its_seed() -> None:
    plan = FaultPlan.parse("kill:40,stop:20,seconds:600", seed=3)
    moments = plan.moments()
    assert moments == FaultPlan.parse("kill:40,stop:20,seconds:600", seed=3).moments()
    assert moments == sorted(moments) and all(0 <= at_s <= 600 for at_s, _ in moments)
    assert [sum(kind == name for _, kind in moments) for name in ("kill", "stop")] == [40, 20]


@pytest.mark.parametrize(
    "options", [{"restarts": -1}, {"every": -1}, {"restarts": 1, "on_worker_loss": "stop"}, {"nonfinite": "perhaps"}]
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="expected"):
        JobOptions(**options)  # type: ignore[arg-type]


def _train(folder: Path, *arguments: str) -> dict[str, Any]:
    """Train on digits by the command line; the row of the result."""
    file = folder / "row.json"
    ended = commands.fastps("train", "--data", "digits", "--no-progress", "--json", str(file), *arguments, FASTPS_TIMEOUT="200")
    assert ended.returncode == 0, ended.stderr
    row: dict[str, Any] = json.loads(file.read_text())["rows"][0]
    return row


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_train_resumes_bit_for_bit_under_bsp_sampler_included(tmp_path: Path) -> None:
    """Two epochs are 90 versions. One before the last is resumed; the last checkpoint is that of the end."""
    saved, common = tmp_path / "saved", ["-n", "2", "--sync", "bsp", "--epochs", "2", "--save"]
    _train(tmp_path, *common, str(tmp_path / "whole.npz"), "--checkpoint", str(saved), "--every", "20")
    before, last = sorted(saved.iterdir())
    row = _train(tmp_path, *common, str(tmp_path / "resumed.npz"), "--resume", str(before))
    assert 20 <= fastps.load(before).version < fastps.load(last).version == 90
    assert row["steps"] == 2 * (90 - fastps.load(before).version)
    with np.load(tmp_path / "whole.npz") as whole, np.load(tmp_path / "resumed.npz") as resumed:
        for name in whole.files:
            assert whole[name].tobytes() == resumed[name].tobytes(), name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_training_under_fire_ends_well_and_tells_what_it_cost(tmp_path: Path) -> None:
    fire = ["--inject-faults", "kill:2,stop:1,seconds:8", "--restarts", "2", "--compute-ms", "20"]
    row = _train(tmp_path, "-n", "3", "--sync", "asp", "--epochs", "20", *fire)
    assert row["chaos"]["faults"]["kill"] >= 1
    assert row["chaos"]["updates"] > 0 and row["chaos"]["live_worker_seconds"] > 0
    assert row["test_accuracy"] > 0.8
