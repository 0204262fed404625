"""A job leaves a checkpoint of its last version: at its end, and after SIGTERM; SIGUSR1 asks for one at once."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import fastps
from fastps.system.noted_signals import EndedBySignalError


def _versions(folder: Path) -> list[int]:
    files = sorted(folder.glob("checkpoint-*/checkpoint.json"))
    return [json.loads(file.read_text())["version"] for file in files]


def _job(folder: Path, every: int = 1000) -> tuple[torch.nn.Module, fastps.DistributedOptimizer]:
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, fastps.DistributedOptimizer(inner, checkpoint=folder, every=every, workers=1)


def _step(model: torch.nn.Module, optimizer: fastps.DistributedOptimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_a_job_that_ends_leaves_a_checkpoint_of_its_last_version(tmp_path: Path) -> None:
    model, optimizer = _job(tmp_path, every=2)
    for _ in range(5):
        _step(model, optimizer)
    optimizer.close()
    assert _versions(tmp_path)[-1] == 5


def test_a_version_that_is_written_is_not_written_again(tmp_path: Path) -> None:
    model, optimizer = _job(tmp_path)
    _step(model, optimizer)
    fastps.save(optimizer, tmp_path)
    optimizer.close()
    assert _versions(tmp_path) == [1]
    _, resumed = _job(tmp_path)  # another run, which makes no step
    resumed.close()
    assert _versions(tmp_path) == [1]


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


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_sigterm_to_the_launcher_loses_no_update(sync: str, tmp_path: Path) -> None:
    """Each worker leaves in order after a step; what they have pushed until then is in the newest checkpoint."""
    script = tmp_path / "train.py"
    script.write_text(
        "import atexit, os, pathlib, sys, time, torch, fastps\nmodel = torch.nn.Linear(2, 1)\n"
        "optimizer = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001))\n"
        f"atexit.register(lambda: pathlib.Path({str(tmp_path)!r}, f'end{{fastps.rank()}}').write_text(str(steps)))\n"
        "for steps in range(1, 10**9):\n    optimizer.zero_grad(); model(torch.ones(1, 2)).sum().backward()\n"
        "    optimizer.step()\n"
        f"    if steps == 20: pathlib.Path({str(tmp_path)!r}, f'twenty{{fastps.rank()}}').touch()\n    time.sleep(0.01)\n"
    )
    command = [sys.executable, "-m", "fastps.cli", "run", "-n", "3", "--sync", sync, "--checkpoint", str(tmp_path / "saved")]
    with subprocess.Popen([*command, str(script)], stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 90
            while len(list(tmp_path.glob("twenty*"))) < 3:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 143, errors
    steps = [int((tmp_path / f"end{rank}").read_text()) for rank in range(3)]
    version = _versions(tmp_path / "saved")[-1]
    assert version == (max(steps) if sync == "bsp" else sum(steps)), (steps, errors)
    assert "Traceback" not in errors
