"""Under asp a slow node and one that is cut off cost the others nothing; blips of a second lose no node, a longer cut does.

Three nodes are network namespaces on a bridge. The rates are those of 4 s before a fault and of 4 s after it.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fastps.bench.two_nodes.namespaces import missing_reason
from tests.support.network.bridge import Bridge, bridge
from tests.support.nodes import await_files
from tests.support.processes import wait_until

REASON = missing_reason()
pytestmark = [pytest.mark.slow, pytest.mark.timing, pytest.mark.timeout(500), pytest.mark.skipif(bool(REASON), reason=REASON)]

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
        how = {"stderr": subprocess.STDOUT, "env": {**os.environ, "READY": f"{folder}/ready", "STOP": f"{folder}/stop"}}
        self._launchers = []
        for node in range(3):
            with (folder / f"out-{node}").open("wb") as out:
                words = "--sync", "asp", *options, str(folder / "train.py")
                self._launchers.append(nodes.launch(node, *words, stdout=out, **how))
        await_files(folder, 3, 180, "ready*")

    def await_end(self, rank: int) -> None:
        """Wait until a worker has ended, and written what it found."""
        wait_until(lambda: (self._folder / f"ready{rank}").stat().st_size, 60, f"worker {rank} goes on")

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


def test_the_others_keep_their_rate_beside_a_slow_node_and_one_that_is_cut_off(tmp_path: Path) -> None:
    with bridge(3) as nodes:
        job = Job(nodes, tmp_path, "--on-node-loss", "continue")
        time.sleep(5)
        began = [time.monotonic()]
        nodes.slow(2, 50)
        time.sleep(4)
        began.append(time.monotonic())
        nodes.cut(2, True)
        time.sleep(4)
        nodes.cut(2, False)
        found = job.stop()
    times = [found[rank]["times"] for rank in (0, 1)]
    before, *after = (sum(_rate(each, at, at + 4) for each in times) for at in (began[0] - 4, *began))
    print(before, after)
    # On idle cores they are the same. A job that waited for node 2 would make no steps for 3 s of 4.
    assert min(after) >= 0.4 * before


def test_blips_of_a_second_with_busy_cores_lose_no_node_and_one_that_stays_away_is_named_in_time(tmp_path: Path) -> None:
    blips = int(os.environ.get("FASTPS_BLIPS", "10"))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    with bridge(3) as nodes:
        try:
            job = Job(nodes, tmp_path)
            for blip in range(blips):
                nodes.cut(1 + blip % 2, True)
                time.sleep(1)
                nodes.cut(1 + blip % 2, False)
                time.sleep(1)
        finally:
            for process in busy:
                process.kill()
                process.wait()
        cut = time.monotonic()
        nodes.cut(2, True)
        for rank in (0, 1):
            job.await_end(rank)
        nodes.cut(2, False)
        found = job.stop()
    took = [found[rank]["ended"] - cut for rank in (0, 1)]
    print(took, found[0]["failure"])
    assert all("NodeLostError: node 2 was lost" in found[rank]["failure"] for rank in (0, 1))
    assert min(took) > 0 and max(took) <= 4.5, "a blip lost a node, or it was named too late"
