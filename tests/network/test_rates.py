"""Under asp a node that is slow, killed, stopped or cut off costs the others nothing, and blips of a second cost no node.

Three nodes are network namespaces on a bridge. The rates are those of 4 s before a fault and of 4 s after it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from fastps.bench.two_nodes.namespaces import missing_reason
from tests.support.bridge import Bridge, bridge

REASON = missing_reason()
pytestmark = [pytest.mark.slow, pytest.mark.timing, pytest.mark.timeout(500), pytest.mark.skipif(bool(REASON), reason=REASON)]

MARK = "RATES_OF_TESTS"
SCRIPT = """
import json, os, sys, time
import torch
import fastps

torch.set_num_threads(1)
model = torch.nn.Linear(200, 100)
optimizer = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001), timeout_s=60)
inputs = torch.randn(4, 200)
times, failure = [], ""
with open(os.environ["READY"] + str(fastps.rank()), "w"):
    pass
try:
    while not os.path.exists(os.environ["STOP"]):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        times.append(time.monotonic())
        time.sleep(0.02)
    optimizer.close()
except fastps.Error as error:
    failure = f"{type(error).__name__}: {error}"
with open(os.environ["READY"] + str(fastps.rank()), "w") as out:
    json.dump({"rank": fastps.rank(), "times": times, "failure": failure, "ended": time.monotonic()}, out)
"""


class Job:
    """Three nodes that train until they are told to stop."""

    def __init__(self, nodes: Bridge, folder: Path, *options: str) -> None:
        (folder / "train.py").write_text(SCRIPT)
        self._folder = folder
        self._mark = f"{os.getpid()}-{time.monotonic_ns()}"
        variables = {**os.environ, MARK: self._mark, "READY": str(folder / "ready"), "STOP": str(folder / "stop")}
        self._launchers = []
        for node in range(3):
            command = [sys.executable, "-m", "fastps", "run", "--nnodes", "3", "--node-rank", str(node), "--sync", "asp"]
            command += ["--rendezvous", f"{Bridge.address(0)}:29400", *options, "-n", "1", str(folder / "train.py")]
            with (folder / f"out-{node}").open("wb") as out:
                self._launchers.append(
                    subprocess.Popen(nodes.command(node, command), stdout=out, stderr=subprocess.STDOUT, env=variables)
                )
        deadline = time.monotonic() + 180
        while len(list(folder.glob("ready*"))) < 3:
            assert time.monotonic() < deadline, "the nodes have not met"
            time.sleep(0.1)

    def agent(self, node: int) -> psutil.Process:
        """A node's agent."""
        for process in psutil.process_iter():
            try:
                own = process.environ()
                is_ours = own.get(MARK) == self._mark and own.get("FASTPS_NODE_RANK") == str(node)
                if is_ours and "fastps.network.agent" in process.cmdline():
                    return process
            except psutil.Error:
                continue
        raise AssertionError(f"node {node} has no agent")

    def await_ends(self, ranks: tuple[int, ...]) -> None:
        """Wait until these workers have ended, and written what they found."""
        deadline = time.monotonic() + 60
        while not all((self._folder / f"ready{rank}").stat().st_size for rank in ranks):
            assert time.monotonic() < deadline, "the workers go on"
            time.sleep(0.1)

    def stop(self) -> dict[int, dict[str, Any]]:
        """End training; what the workers found, by rank."""
        (self._folder / "stop").touch()
        for launcher in self._launchers:
            try:
                launcher.wait(60)
            except subprocess.TimeoutExpired:
                launcher.kill()
        print("\n".join((self._folder / f"out-{node}").read_text(errors="replace")[-800:] for node in range(3)))
        texts = [path.read_text() for path in self._folder.glob("ready*")]
        return {row["rank"]: row for row in map(json.loads, filter(None, texts))}


def _rate(times: list[float], first: float, last: float) -> float:
    return sum(first <= each < last for each in times) / (last - first)


def _begin(fault: str, nodes: Bridge, agent: psutil.Process) -> float:
    """Let a fault befall node 2; returns when."""
    began = time.monotonic()
    if fault == "slow":
        nodes.slow(2, 50)
    elif fault == "kill":
        agent.kill()
    elif fault == "stop":
        agent.send_signal(signal.SIGSTOP)
    else:
        nodes.cut(2, True)
    return began


def _end(fault: str, nodes: Bridge, agent: psutil.Process) -> None:
    if fault == "stop":
        agent.kill()
    nodes.cut(2, False)


@pytest.mark.parametrize("faults", [("slow", "cut"), ("kill",), ("stop",)], ids=", ".join)
def test_the_others_keep_their_rate(faults: tuple[str, ...], tmp_path: Path) -> None:
    began = []
    with bridge(3) as nodes:
        job = Job(nodes, tmp_path, "--on-node-loss", "continue")
        time.sleep(5)
        agent = job.agent(2)
        for fault in faults:
            began.append(_begin(fault, nodes, agent))
            time.sleep(4)
        _end(faults[-1], nodes, agent)
        found = job.stop()
    times = [found[rank]["times"] for rank in (0, 1)]
    before, *after = (sum(_rate(each, at, at + 4) for each in times) for at in (began[0] - 4, *began))
    print(faults, before, after)
    # On idle cores they are the same. A job that waited for node 2 would make no steps for most of the time.
    assert min(after) >= 0.6 * before


@pytest.mark.parametrize(("fault", "within_s"), [("kill", 0.5), ("stop", 3.5), ("cut", 3.5)])
def test_a_lost_node_is_named_in_time(fault: str, within_s: float, tmp_path: Path) -> None:
    with bridge(3) as nodes:
        job = Job(nodes, tmp_path)
        time.sleep(1)
        agent = job.agent(2)
        began = _begin(fault, nodes, agent)
        job.await_ends((0, 1))
        _end(fault, nodes, agent)
        found = job.stop()
    took = [found[rank]["ended"] - began for rank in (0, 1)]
    print(fault, took, [found[rank]["failure"] for rank in (0, 1)])
    assert all("NodeLostError: node 2 was lost" in found[rank]["failure"] for rank in (0, 1))
    assert max(took) <= within_s + 0.3, "0.3 s for the worker's own look"


def test_blips_of_a_second_with_busy_cores_lose_no_node(tmp_path: Path) -> None:
    blips = int(os.environ.get("FASTPS_BLIPS", "20"))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        with bridge(3) as nodes:
            job = Job(nodes, tmp_path)
            for blip in range(blips):
                nodes.cut(1 + blip % 2, True)
                time.sleep(1)
                nodes.cut(1 + blip % 2, False)
                time.sleep(1)
            found = job.stop()
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert {rank: row["failure"] for rank, row in found.items()} == {0: "", 1: "", 2: ""}
