"""A job leaves a checkpoint of its last version: at its end, and after SIGTERM; SIGUSR1 asks for one at once."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fastps
from fastps.system.noted_signals import EndedBySignalError
from fastps.system.ports import free_port
from tests.support import processes
from tests.support.torch_optimizers import steps_on


def _versions(folder: Path) -> list[int]:
    files = sorted(folder.glob("checkpoint-*/checkpoint.json"))
    return [json.loads(file.read_text())["version"] for file in files]


def _job(folder: Path, every: int = 1000, **options: Any) -> tuple[torch.nn.Module, fastps.DistributedOptimizer]:
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, fastps.DistributedOptimizer(inner, checkpoint=folder, every=every, **{"workers": 1, **options})


def _step(model: torch.nn.Module, optimizer: fastps.DistributedOptimizer, steps: int = 1) -> None:
    steps_on(model, optimizer, torch.ones(1, 2), steps)


@pytest.mark.parametrize(("sync", "every"), [("bsp", 2), ("bsp", 1000), ("asp", 1000), ("ssp:3", 1000)])
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.sampled(3)
def test_a_job_that_ends_leaves_a_checkpoint_of_its_last_version_and_one_that_resumes_it_begins_at_its_step(
    waits: bool, sync: str, every: int, tmp_path: Path
) -> None:
    """Also where the worker that wrote it had left, as after `wait_for_others`, so that no worker was in the job any more."""
    model, optimizer = _job(tmp_path, every, sync=sync)
    _step(model, optimizer, 5)
    if waits:
        optimizer.wait_for_others()
    optimizer.close()
    assert _versions(tmp_path)[-1] == 5
    _, resumed = _job(tmp_path, resume=tmp_path, sync=sync)
    assert (resumed.worker.steps, resumed.version) == (5, 5)
    resumed.close()


def test_checkpoints_are_in_the_folder_that_was_meant_when_the_job_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    model, optimizer = _job(Path("runs"), every=2)
    monkeypatch.chdir(tmp_path / "elsewhere")
    _step(model, optimizer, 3)
    optimizer.close()
    assert _versions(tmp_path / "runs")[-1] == 3
    assert not list(Path().iterdir())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["StepLR", "ExponentialLR", "CosineAnnealingLR", "LinearLR", "OneCycleLR"])
def test_a_schedule_that_is_stepped_to_where_a_resumed_job_begins_has_its_learning_rate(kind: str, tmp_path: Path) -> None:
    def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        options: dict[str, dict[str, Any]] = {
            "StepLR": {"step_size": 2}, "ExponentialLR": {"gamma": 0.5}, "CosineAnnealingLR": {"T_max": 9}, "LinearLR": {},
            "OneCycleLR": {"max_lr": 0.1, "total_steps": 9, "cycle_momentum": False},
        }  # fmt: skip
        made: torch.optim.lr_scheduler.LRScheduler = getattr(torch.optim.lr_scheduler, kind)(optimizer, **options[kind])
        return made

    model, optimizer = _job(tmp_path)
    schedule = schedule_of(optimizer)
    for _ in range(3):
        _step(model, optimizer)
        schedule.step()
    optimizer.close()
    _, resumed = _job(tmp_path, resume=tmp_path)
    for group in resumed.param_groups:
        group["lr"] = group.get("initial_lr", group["lr"])
    schedule = schedule_of(resumed)
    for _ in range(resumed.worker.steps):
        schedule.step()
    assert resumed.param_groups[0]["lr"] == pytest.approx(optimizer.param_groups[0]["lr"])
    resumed.close()


def test_a_version_that_is_written_is_not_written_again(tmp_path: Path) -> None:
    model, optimizer = _job(tmp_path)
    _step(model, optimizer)
    fastps.save(optimizer, tmp_path)
    optimizer.close()
    assert _versions(tmp_path) == [1]
    _, resumed = _job(tmp_path)  # another run, which makes no step
    resumed.close()
    assert _versions(tmp_path) == [1]


def test_a_job_that_goes_on_from_an_older_checkpoint_leaves_one_of_its_last_version_below_the_newest_there(
    tmp_path: Path,
) -> None:
    model, optimizer = _job(tmp_path)
    _step(model, optimizer, 3)
    older = fastps.save(optimizer, tmp_path)
    _step(model, optimizer, 2)
    optimizer.close()
    for steps, expected in ((0, [3, 5]), (1, [5, 4])):  # without a step there is nothing new
        model, optimizer = _job(tmp_path, resume=older)
        _step(model, optimizer, steps)
        optimizer.close()
        assert _versions(tmp_path)[-2:] == expected


def test_a_worker_that_joins_late_and_is_the_last_leaves_a_checkpoint_of_the_version_at_which_it_joined(tmp_path: Path) -> None:
    job = {"job": f"late-{os.getpid()}", "workers": 2, "on_worker_loss": "continue"}
    model, first = _job(tmp_path, rank=0, sync="asp", **job)
    _, second = _job(tmp_path, rank=1, sync="asp", **job)
    _step(model, first, 5)
    second.close()
    with pytest.MonkeyPatch.context() as replaced:
        replaced.setenv("FASTPS_JOINS", "1")
        _, late = _job(tmp_path, rank=1, sync="asp", **job)
    assert late.version == 5
    assert first._job.checkpointing is not None
    first._job.checkpointing.close(failed=True)  # it has died
    first._job.checkpointing = None
    first.close()
    late.close()
    assert _versions(tmp_path) == [5]


def test_a_failed_job_leaves_no_last_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="a bug"):
        model, optimizer = _job(tmp_path)
        with optimizer:
            _step(model, optimizer)
            raise RuntimeError("a bug")
    assert _versions(tmp_path) == []


def test_sigusr1_makes_a_checkpoint_due_and_training_goes_on(tmp_path: Path) -> None:
    model, optimizer = _job(tmp_path)
    with optimizer:
        _step(model, optimizer)
        signal.raise_signal(signal.SIGUSR1)
        assert _versions(tmp_path) == []
        _step(model, optimizer)
        assert optimizer._job.checkpointing is not None
        optimizer._job.checkpointing._join()
        assert _versions(tmp_path) == [2]
        _step(model, optimizer)
    assert _versions(tmp_path) == [2, 3]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_sigterm_ends_the_program_after_its_step_with_a_last_checkpoint(tmp_path: Path) -> None:
    model, optimizer = _job(tmp_path)
    with pytest.raises(EndedBySignalError) as ended, optimizer:
        _step(model, optimizer)
        signal.raise_signal(signal.SIGTERM)
        _step(model, optimizer)
    assert ended.value.code == 143
    assert _versions(tmp_path) == [2]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


SCRIPT = """
import atexit, os, pathlib, time, torch, fastps
folder, rank = pathlib.Path({folder!r}), os.environ["FASTPS_RANK"]
model = torch.nn.Linear(2, 1)
optimizer = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001))
atexit.register(lambda: (folder / f"end{{rank}}").write_text(str(steps)))
for steps in range(1, 10**9):
    optimizer.zero_grad(); model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    (folder / f"steps{{rank}}").write_text(str(steps))
    time.sleep(0.01)
"""


class _Launched:
    """A launched job, whose workers leave the number of their steps in a folder."""

    def __init__(self, folder: Path, *options: str, **variables: str) -> None:
        self.folder, script = folder, folder / "train.py"
        script.write_text(SCRIPT.format(folder=str(folder)))
        command = [sys.executable, "-m", "fastps.cli", "run", *options, "--checkpoint", str(folder / "saved"), str(script)]
        paths = os.pathsep.join(path for path in sys.path if path)
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths, **variables}
        )

    def await_steps(self, workers: int, more: int = 20) -> None:
        """Wait until each worker has made so many steps more."""
        begun = self._steps()
        self.await_it(lambda: len(now := self._steps()) == workers and all(now[at] >= begun.get(at, 0) + more for at in now))

    def _steps(self) -> dict[str, int]:
        return {file.name: int(file.read_text() or 0) for file in self.folder.glob("steps*")}

    def await_it(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 90
        while not condition():
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.05)

    def end(self, workers: int) -> tuple[list[int], str]:
        """Send SIGTERM. Returns the steps of each worker, and what was written to standard error."""
        try:
            self.process.send_signal(signal.SIGTERM)
            _, errors = self.process.communicate(timeout=60)
        finally:
            self.process.kill()
        assert self.process.returncode == 143, errors
        assert "Traceback" not in errors
        return [int((self.folder / f"end{rank}").read_text()) for rank in range(workers)], errors


@pytest.mark.slow
def test_sigterm_to_the_launcher_loses_no_update(tmp_path: Path) -> None:
    """Each worker leaves in order after a step; what they have pushed until then is in the newest checkpoint."""
    job = _Launched(tmp_path, "-n", "3", "--sync", "asp")
    job.await_steps(3)
    steps, errors = job.end(3)
    assert _versions(tmp_path / "saved")[-1] == sum(steps), (steps, errors)


@pytest.mark.slow
def test_signals_write_checkpoints_of_a_job_of_several_nodes(tmp_path: Path) -> None:
    """All workers obey, and node 0's write: SIGUSR1 makes a checkpoint due, and SIGTERM ends the job with a last one."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nexec sh -c "$2"\n')  # it runs the command line here, whatever the host
    ssh.chmod(0o755)
    hosts = ["--hosts", "one,two", "--rendezvous", f"127.0.0.1:{free_port()}"]
    job = _Launched(tmp_path, *hosts, "-n", "1", FASTPS_SSH=str(ssh))
    job.await_steps(2)
    job.process.send_signal(signal.SIGUSR1)
    job.await_it(lambda: _versions(tmp_path / "saved"))
    job.await_steps(2)
    (of_node_0, _), errors = job.end(2)
    assert _versions(tmp_path / "saved")[-1] >= of_node_0, errors


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_workers_that_end_by_sigterm_save_although_worker_0_is_killed_in_that_moment(tmp_path: Path, sync: str) -> None:
    def work(rank: int) -> int:
        tells = rank == 0
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with fastps.DistributedOptimizer(inner, sync, checkpoint=tmp_path, every=10**6, timeout_s=30) as optimizer:
            while True:
                optimizer.zero_grad()
                model(torch.full((1, 2), 1.0 + rank)).sum().backward()
                optimizer.step()
                if tells and min(each.steps for each in optimizer.statistics()) >= 10:  # all note signals by then
                    tells = bool(os.kill(os.getppid(), signal.SIGUSR2))

    told: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda *_: told.append(1))
    try:
        children = processes.start_job(work, 2)
        processes.wait_until(lambda: told, 60)
        for child in children:
            os.kill(child.process_id, signal.SIGTERM)
        os.kill(children[0].process_id, signal.SIGKILL)
        processes.finish(children, 60)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert fastps.load(tmp_path).version >= 10
