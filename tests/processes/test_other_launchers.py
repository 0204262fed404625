"""Workers that neither fastps nor torchrun starts: tasks of a process pool, and tasks of SLURM by their variables.

The programs are those of docs/how-to/other-launchers.md and docs/how-to/slurm.md.
"""

import concurrent.futures
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pytest
import torch

import fastps
from tests.network.test_meeting import SCRIPT, srun
from tests.processes.test_cluster_launchers import EXAMPLES, environment
from tests.support import commands
from tests.support.scripts import started
from tests.support.torch_optimizers import steps_on

needs_the_examples = pytest.mark.skipif(not EXAMPLES.exists(), reason="tests run without the source tree")


def _start(*command: str, **variables: str) -> "subprocess.Popen[str]":
    return started([sys.executable, *command], env=environment(**variables))


def _printed(running: "subprocess.Popen[str]") -> list[str]:
    told, errors = running.communicate(timeout=100)
    assert running.returncode == 0, errors
    return told.splitlines()


@needs_the_examples
@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_of_a_pool_train_one_job_after_the_other(method: str) -> None:
    lines = _printed(_start(str(EXAMPLES / "pool.py"), "--method", method))
    losses = [float(re.findall(r"loss ([\d.]+), the same in all workers: True", line)[0]) for line in lines]
    assert len(losses) == 2
    assert max(losses) < 0.5, "the first weights have 0.64"


def _work(job: str, rank: int) -> None:
    """Worker 1 is killed after its third step."""
    model = torch.nn.Linear(4, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    with fastps.DistributedOptimizer(inner, sync="bsp", job=job, rank=rank, workers=2) as optimizer:
        for step in range(10**6):
            if rank == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            steps_on(model, optimizer, torch.ones(2, 4))


def test_pools_tell_of_a_worker_that_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "FASTPS_RANK", "FASTPS_WORKERS", "FASTPS_JOB"):
        monkeypatch.delenv(name, raising=False)
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as executor:
        futures = [executor.submit(_work, f"killed-{os.getpid()}", rank) for rank in range(2)]
        with pytest.raises(BrokenProcessPool):
            futures[1].result(timeout=60)
    with context.Pool(2) as pool:
        survivor, _ = [pool.apply_async(_work, (f"killed-in-pool-{os.getpid()}", rank)) for rank in range(2)]
        with pytest.raises(fastps.WorkerDiedError, match="worker 1"):
            survivor.get(timeout=60)


@needs_the_examples
@pytest.mark.slow
def test_tasks_of_one_srun_that_say_so_are_two_jobs() -> None:
    script = str(EXAMPLES / "slurm.py")
    running = [_start(script, **srun((0, 0, 0, 0), rank)) for rank in range(4)]
    printed = [_printed(task) for task in running]
    found = [
        re.findall(r"learning rate ([\d.]+): loss ([\d.]+), (\d+) updates by 2 workers", "".join(lines)) for lines in printed
    ]
    (slow,), nothing, (fast,), nothing_either = found
    assert nothing == nothing_either == []
    assert (slow[0], slow[2], fast[0], fast[2]) == ("0.02", "768", "0.08", "768"), "each push is an update of its own job"
    assert float(fast[1]) < float(slow[1]) < 0.64


@pytest.mark.slow
def test_tasks_of_srun_find_each_other_by_themselves() -> None:
    running = [_start(str(SCRIPT), **srun((0, 0), rank), FASTPS_SYNC="asp") for rank in range(2)]
    (first,), (second,) = (_printed(task) for task in running)
    assert first.startswith("0 of 2 here 6 "), "each push is an update"
    assert second == "1" + first.removeprefix("0"), "with the same weights"


def _config_of(words: list[str]) -> dict[str, Any]:
    """The options that `fastps run` reads in a command."""
    assert words[:2] == ["fastps", "run"]
    found: dict[str, Any] = tomllib.loads(commands.done("run", "--print-config", *words[2:]).stdout)
    return found


@needs_the_examples
def test_the_commands_of_the_unit_and_of_the_image_are_understood() -> None:
    unit = (EXAMPLES / "fastps.service").read_text()
    (started,) = re.findall(r"exec \.venv/bin/(fastps run [^\n]*?) \"\$\$@\" (train\.py)", unit)
    found = _config_of(" ".join(started).split())
    assert (found["workers"], found["checkpoint"], found["script"]) == (4, "runs", ["train.py"])
    stop_s = int(re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[0])
    assert stop_s > 30 and "KillMode=mixed" in unit
    image = (EXAMPLES / "Dockerfile").read_text()
    entry, command = (json.loads(each) for each in re.findall(r"^(?:ENTRYPOINT|CMD) (.*)$", image, re.MULTILINE))
    assert _config_of([*entry, *command]) == {"workers": 2, "log_format": "json", "script": ["train.py"]}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit() -> None:
    ended = subprocess.run(
        ["systemd-analyze", "verify", EXAMPLES / "fastps.service"], capture_output=True, text=True, check=False
    )
    assert "fastps.service" not in ended.stderr, ended.stderr
