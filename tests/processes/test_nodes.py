"""Launchers of several nodes, all on this machine: they find each other, number their workers, and say what is wrong."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fastps.system.ports import free_port
from tests.support.processes import is_stopped, wait_until
from tests.support.scripts import program, started

SHOW = """
import os
names = ("FASTPS_RANK", "FASTPS_WORKERS", "FASTPS_LOCAL_RANK", "FASTPS_LOCAL_WORKERS", "FASTPS_NODE_RANK", "FASTPS_NNODES")
print(*(os.environ[name] for name in names), os.environ["FASTPS_JOB"])
"""


def _launched(folder: Path, text: str, *nodes: list[str], port: int = 0) -> list["subprocess.Popen[str]"]:
    """The launchers of a program on nodes, each with arguments of its own."""
    place, script = f"127.0.0.1:{port or free_port()}", program(folder, text)[1]
    command = [sys.executable, "-m", "fastps", "run", "--nnodes", "2", "--rendezvous", place]
    return [started([*command, *arguments, script]) for arguments in nodes]


@pytest.mark.slow
def test_launchers_number_the_workers_of_all_nodes(tmp_path: Path) -> None:
    launched = _launched(tmp_path, SHOW, ["-n", "1"], ["-n", "2"])
    ended = [process.communicate(timeout=60) for process in launched]
    assert [process.returncode for process in launched] == [0, 0], ended
    rows = sorted(line.split() for out, _ in ended for line in out.splitlines())
    jobs = {row.pop() for row in rows}
    assert len(jobs) == 1
    numbers = {int(row[-2]): row for row in rows}
    assert len(numbers) == 2, "either may be node 0"
    counts = {int(row[-2]): int(row[-3]) for row in rows}
    expected = []
    for node in (0, 1):
        first = 0 if node == 0 else counts[0]
        for local in range(counts[node]):
            expected.append([f"[{first + local}]", str(first + local), "3", str(local), str(counts[node]), str(node), "2"])
    assert rows == expected


OF_THE_SCRIPT = """
import os, time, torch, fastps
rank = fastps.rank()
if rank == 1 and not %d:
    raise SystemExit(3)
weights = torch.nn.Linear(4, 1)
optimizer = fastps.DistributedOptimizer(torch.optim.SGD(weights.parameters(), lr=0.01), timeout_s=60, on_worker_loss="continue")
optimizer.wait_for_start()
for step in range(4):
    weights(torch.randn(2, 4)).sum().backward()
    if (rank, step) == (1, 1):
        os.kill(os.getpid(), 9)
    optimizer.step()
time.sleep(3 * (rank == 0))  # longer than the launcher lets others end by themselves
"""


@pytest.mark.slow
@pytest.mark.parametrize("attaches", [True, False])
def test_launchers_of_several_nodes_let_a_job_go_on_after_a_loss_as_that_of_one_node(tmp_path: Path, attaches: bool) -> None:
    says = [] if attaches else ["--on-worker-loss", "continue"]  # the script's word is seen once it has attached
    nodes = [["--node-rank", str(node), "-n", str(2 - node), *says] for node in range(2)]
    launched = _launched(tmp_path, OF_THE_SCRIPT % attaches, *nodes)
    errors = [process.communicate(timeout=90)[1] for process in launched]
    assert [process.returncode for process in launched] == [0, 0], errors
    assert "was not replaced; the job went on without it" in errors[0]


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "message"), [
    ([["--node-rank", "0"], ["--node-rank", "0"]], "cannot listen on port"),
    ([["--node-rank", "0"], ["--node-rank", "1"], ["--node-rank", "1"]], "two nodes say that they are node 1"),
    ([["--node-rank", "0"], ["--nnodes", "3", "--node-rank", "1"]], "give the same --nnodes everywhere"),
])  # fmt: skip
def test_launchers_that_do_not_fit_together_are_told_why(tmp_path: Path, arguments: list[list[str]], message: str) -> None:
    launched = _launched(tmp_path, "import time\ntime.sleep(100)", *arguments)
    wait_until(lambda: any(process.poll() is not None for process in launched), 90, "nobody was refused")
    for process in launched:
        if process.poll() is None:  # it waits for a node that was refused, or trains
            process.send_signal(2)
    errors = [process.communicate(timeout=30)[1] for process in launched]
    assert any(message in text for text in errors), errors
    assert 2 in [process.returncode for process in launched]


def _listens(port: int) -> bool:
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()]
    return any(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows)


@pytest.mark.slow
def test_a_launcher_that_waits_for_other_nodes_obeys_ctrl_z_and_then_sigterm(tmp_path: Path) -> None:
    port = free_port()
    (launched,) = _launched(tmp_path, "", ["--node-rank", "0", "-n", "1", "--start-method", "spawn"], port=port)
    try:
        wait_until(lambda: _listens(port), 90, "nobody listens at the rendezvous")
        launched.send_signal(signal.SIGTSTP)
        wait_until(lambda: is_stopped(launched.pid), 30, "it goes on")
        launched.send_signal(signal.SIGCONT)
        launched.send_signal(signal.SIGTERM)
        assert launched.wait(30) == 128 + signal.SIGTERM
    finally:
        launched.kill()
        launched.communicate()
