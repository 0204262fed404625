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
import time
import tomllib
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import torch

import fastps
from tests.network.test_meeting import SCRIPT, srun
from tests.processes.test_cluster_launchers import EXAMPLES, environment
from tests.support import commands
from tests.support.network.launched_nodes import PROGRAM, port_below_ephemeral
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


@pytest.mark.slow
@needs_the_examples
def test_the_commands_of_the_unit_and_of_the_image_are_understood() -> None:
    unit = (EXAMPLES / "fastps.service").read_text()
    (started,) = re.findall(r"^ExecStart=/srv/train/.venv/bin/(fastps run .*)$", unit, re.MULTILINE)
    found = _config_of(started.split())
    assert (found["workers"], found["checkpoint"], found["script"]) == (4, "runs", ["train.py"])
    stop_s = int(re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[0])
    assert stop_s > 30 and "KillMode=mixed" in unit
    image = (EXAMPLES / "Dockerfile").read_text()
    entry, command = (json.loads(each) for each in re.findall(r"^(?:ENTRYPOINT|CMD) (.*)$", image, re.MULTILINE))
    assert _config_of([*entry, *command]) == {"workers": 2, "log_format": "json", "script": ["train.py"]}


def _of_a_node(folder: Path, node: int) -> tuple[str, list[str], set[int]]:
    """The unit of a machine, its command on this one, and the exit codes after which systemd does not start it again."""
    unit = (EXAMPLES / "fastps-node.service").read_text()
    (command,) = re.findall(r"^ExecStart=/srv/train/.venv/bin/fastps (run (?:.*\\\n)*.*)$", unit, re.MULTILINE)
    words = command.replace("\\\n", " ").replace("%i", str(node)).split()
    codes = {int(code) for code in re.findall(r"^RestartPreventExitStatus=(.*)$", unit, re.MULTILINE)[0].split()}
    return unit, [sys.executable, "-m", "fastps", *words], codes | {0}


@needs_the_examples
def test_the_command_of_a_machines_unit_is_understood(tmp_path: Path) -> None:
    unit, command, codes = _of_a_node(tmp_path, 2)
    found = _config_of(["fastps", *command[3:]])
    assert (found["nnodes"], found["node_rank"], found["retries"]) == (3, "2", 20)
    assert found["checkpoint"] == found["resume"] == "runs", "the first start begins, and the others go on"
    assert "Restart=on-failure" in unit and codes == {0, 1, 2}, "75 starts it again"


@needs_the_examples
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_machines_that_are_lost_one_after_the_other_come_back_by_their_units(tmp_path: Path) -> None:
    """A stand-in for systemd starts a launcher again that was killed, node 0's included, until the job ends well."""
    (tmp_path / "steps").mkdir()
    (tmp_path / "train.py").write_text("import sys\nsys.argv[1:] = ['200', '0.02']\n" + PROGRAM)
    place = f"127.0.0.1:{port_below_ephemeral()}"
    own = environment(STEPS_OF_TESTS=str(tmp_path / "steps"), FASTPS_TIMEOUT="60")

    def start(node: int) -> "subprocess.Popen[str]":
        command = _of_a_node(tmp_path, node)[1]
        for name, value in {"--nnodes": "2", "--rendezvous": place, "-n": "1", "--every": "20"}.items():
            command[command.index(name) + 1] = value
        return started(command, cwd=tmp_path, env=own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    running, starts, victims = {node: start(node) for node in range(2)}, 2, [0, 1]
    while any(process.poll() != 0 for process in running.values()):
        if victims and len(list((tmp_path / "runs").glob("checkpoint-*"))) >= 2 and starts == 4 - len(victims):
            running[victims.pop(0)].kill()
            shutil.rmtree(min((tmp_path / "runs").glob("checkpoint-*")))  # so that two are a sign of steps after the kill
        for node, process in running.items():
            if (code := process.poll()) not in (None, 0):
                assert code not in _of_a_node(tmp_path, node)[2], f"node {node} ended with {code}"
                running[node], starts = start(node), starts + 1
        time.sleep(0.2)
    assert starts >= 4


@needs_the_examples
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("name", ["fastps.service", "fastps-node@.service"])
def test_systemd_accepts_the_units(name: str, tmp_path: Path) -> None:
    text = (EXAMPLES / name.replace("@", "")).read_text()
    (tmp_path / name).write_text(text.replace("/srv/train/.venv/bin/fastps", "/bin/echo"))  # a program that is there
    ended = subprocess.run(["systemd-analyze", "verify", tmp_path / name], capture_output=True, text=True, check=False)
    assert "service:" not in ended.stderr, ended.stderr
