"""Node 0, which has the state, is killed: every node ends and names it, and the same command with --resume goes on."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastps
from fastps.system.ports import free_port
from tests.support.nodes import await_files
from tests.support.torch_optimizers import mean_square, steps_on

pytestmark = pytest.mark.slow

SCRIPT = """
import sys, time
import torch
import fastps

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(8, 3)
optimizer = fastps.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model=model)
for step in range(optimizer.worker.steps, 300):
    inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(step * fastps.world_size() + fastps.rank()))
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
    time.sleep(0.01)
optimizer.wait_for_others()
print("ends", optimizer.version, sum(value.double().abs().sum().item() for value in model.parameters()))
"""


def _alone(workers: int) -> float:
    """What plain torch ends with in one process that trains on the inputs of all."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 3)
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(300):
        generators = [torch.Generator().manual_seed(step * workers + rank) for rank in range(workers)]
        steps_on(model, adam, torch.cat([torch.randn(8, 8, generator=each) for each in generators]), loss=mean_square)
    return sum(value.double().abs().sum().item() for value in model.parameters())


def _launch(node: int, port: int, script: Path, *options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "fastps", "run", "--nnodes", "2", "--node-rank", str(node)]
    command += ["--rendezvous", f"127.0.0.1:{port}", "-n", "2", *options, str(script)]
    # A session of its own, because the whole node is killed.
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def _ends(script: Path, *options: str) -> list[str]:
    """Run both nodes to the end: what each worker says there."""
    port = free_port()
    launched = [_launch(node, port, script, *options) for node in range(2)]
    outputs = [process.communicate(timeout=90) for process in launched]
    assert [process.returncode for process in launched] == [0, 0], outputs
    return [line for out, _ in outputs for line in re.findall(r"ends (.*)", out)]


def _kill_node(launcher: "subprocess.Popen[str]") -> None:
    """Kill a launcher and all that it has started, as when its machine fails."""
    import psutil

    found = [*psutil.Process(launcher.pid).children(recursive=True), psutil.Process(launcher.pid)]
    for process in found:
        process.send_signal(signal.SIGKILL)


@pytest.mark.timeout(300)
def test_the_others_name_node_0_and_a_resumed_job_ends_as_one_that_went_on(tmp_path: Path) -> None:
    script, saved, port = tmp_path / "train.py", tmp_path / "saved", free_port()
    script.write_text(SCRIPT)
    launched = [_launch(node, port, script, "--checkpoint", str(saved), "--every", "50") for node in range(2)]
    await_files(tmp_path, 1, 120, "saved/checkpoint-*")
    _kill_node(launched[0])
    _, errors = launched[1].communicate(timeout=30)  # not after the timeout of 60 s
    assert launched[1].returncode not in (0, None)
    assert "NodeLostError" in errors and "node 0" in errors
    launched[0].communicate(timeout=10)
    assert 50 <= fastps.load(saved).version < 300
    resumed = _ends(script, "--resume", str(saved))
    assert len(set(resumed)) == 1 and len(resumed) == 4
    version, weights = resumed[0].split()
    assert (version, float(weights)) == ("300", pytest.approx(_alone(4), rel=1e-3))
    assert not [path for path in Path("/dev/shm").iterdir() if "fastps" in path.name]
