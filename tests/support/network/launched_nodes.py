"""Nodes on loopback that `fastps run` starts, each with a launcher in a session of its own, and what a test kills of them.

The program trains a small model on real digits with steps that follow from their numbers: what it ends with does not depend on
how often it was lost, if it goes on from checkpoints. Each worker appends a line for each step to a file of its own.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import torch

from fastps.system.ports import free_port
from tests.support.torch_optimizers import steps_on

MARK = "LAUNCHED_NODES_OF_TESTS"
KINDS = ("worker", "agent", "rendezvous", "launcher", "node")
_MODULES = {"agent": "fastps.network.agent", "rendezvous": "fastps.network.meeting"}
DIGITS = """
import json, os, pathlib, sys, time, zlib
import torch
import fastps
from sklearn.datasets import load_digits

torch.set_num_threads(1)
torch.manual_seed(0)
digits = load_digits()
inputs, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
"""
PROGRAM = (
    DIGITS
    + """
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
optimizer = fastps.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.002), model=model)
rank, workers, steps, pause_s = fastps.rank(), fastps.world_size(), int(sys.argv[1]), float(sys.argv[2])
gate = pathlib.Path(os.environ.get("GATE_OF_TESTS", "/"))  # ten steps before the end all wait for it
log = pathlib.Path(os.environ["STEPS_OF_TESTS"], f"{rank}.{os.getpid()}").open("w", buffering=1)
for step in range(optimizer.worker.steps, steps):
    while step == steps - 10 and not gate.exists():
        time.sleep(0.05)
    rows = torch.randint(0, 1500, (32,), generator=torch.Generator().manual_seed(step * workers + rank))
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
    optimizer.step()
    print(step, file=log)
    time.sleep(pause_s)
optimizer.wait_for_others()
with torch.no_grad():
    accuracy = float((model(inputs[1500:]).argmax(1) == labels[1500:]).float().mean())
total = sum(value.double().abs().sum().item() for value in model.parameters())
print("found", json.dumps({"rank": rank, "version": optimizer.version, "accuracy": accuracy, "total": total}), flush=True)
optimizer.close()
"""
)


def port_below_ephemeral() -> int:
    """A free port that the kernel gives no connection: a rendezvous opens it again and again."""
    while (port := free_port() // 2 + 1024) > 30_000:
        pass
    return port


def alone(workers: int, steps: int) -> tuple[float, float]:
    """The sum of weights and the accuracy with which one process ends that trains as PROGRAM does, on the batches of all."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    torch.manual_seed(0)
    digits = load_digits()
    inputs, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    adam = torch.optim.Adam(model.parameters(), lr=0.002)
    for step in range(steps):
        generators = [torch.Generator().manual_seed(step * workers + rank) for rank in range(workers)]
        rows = torch.cat([torch.randint(0, 1500, (32,), generator=each) for each in generators])
        of_rows = partial(torch.nn.functional.cross_entropy, target=labels[rows])
        steps_on(model, adam, inputs[rows], loss=of_rows)
    with torch.no_grad():
        accuracy = float((model(inputs[1500:]).argmax(1) == labels[1500:]).float().mean())
    return sum(value.double().abs().sum().item() for value in model.parameters()), accuracy


class LaunchedNodes:
    """The launchers, and everything that they write into `folder`."""

    def __init__(self, folder: Path, count: int, script: str, *words: str, **variables: str) -> None:
        """`words` are options of `fastps run` and then arguments of the script, which follow the word "--"."""
        self.folder, self.count = folder, count
        split = words.index("--") if "--" in words else len(words)
        self._options, self._arguments = list(words[:split]), list(words[split + 1 :])
        (folder / "steps").mkdir(parents=True, exist_ok=True)
        (folder / "train.py").write_text(script)
        self._mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self._variables = {"OMP_NUM_THREADS": "1", "FASTPS_TIMEOUT": "60", **variables}
        self._place = f"127.0.0.1:{port_below_ephemeral()}"
        self.starts = 0
        self.launchers: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, node: int, *words: str) -> None:
        """Start a node's launcher, with further options."""
        command = [sys.executable, "-m", "fastps", "run", "--nnodes", str(self.count), "--node-rank", str(node), "-n", "1"]
        command += ["--rendezvous", self._place, *self._options, *words, str(self.folder / "train.py"), *self._arguments]
        own = {MARK: self._mark, "STEPS_OF_TESTS": str(self.folder / "steps"), "PYTHONPATH": os.pathsep.join(sys.path)}
        with (self.folder / f"out-{node}-{self.starts}").open("wb") as out:
            self.launchers[node] = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, **own, **self._variables},
            )  # fmt: skip
        self.starts += 1

    def said(self, node: int) -> str:
        """What all launchers of a node have written."""
        found = sorted(self.folder.glob(f"out-{node}-*"), key=lambda path: int(path.name.rpartition("-")[2]))
        return "".join(path.read_text(errors="replace") for path in found)

    def find(self, node: int, kind: str) -> list[psutil.Process]:
        """The processes of a node: workers that have begun, its agent, its process at the rendezvous, its launcher, or all."""
        with contextlib.suppress(psutil.Error):
            launcher = psutil.Process(self.launchers[node].pid)
            tree = launcher.children(recursive=True)
            if kind in ("launcher", "node"):
                return [launcher, *(tree if kind == "node" else ())]
            workers = {int(path.name.partition(".")[2]) for path in (self.folder / "steps").iterdir()}  # a fork has no words
            return [each for each in tree if (each.pid in workers if kind == "worker" else _MODULES[kind] in each.cmdline())]
        return []

    def kill(self, node: int, kind: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to these processes; how many there were."""
        found = self.find(node, kind)
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
        return len(found)

    def steps(self, since: float = 0.0) -> dict[int, int]:
        """The last step of each rank whose worker has begun since this time."""
        found: dict[int, int] = {}
        for path in (self.folder / "steps").iterdir():
            lines = path.read_text().splitlines()
            if lines and path.stat().st_mtime > since:
                rank = int(path.name.partition(".")[0])
                found[rank] = max(found.get(rank, -1), int(lines[-1]))
        return found

    def await_steps(self, step: int, limit_s: float = 120.0) -> None:
        """Wait until every worker has made this step."""
        deadline = time.monotonic() + limit_s
        while not (len(found := self.steps()) == self.count and min(found.values()) >= step):
            assert time.monotonic() < deadline, (found, self.texts())
            time.sleep(0.05)

    def wait(self, limit_s: float) -> list[int]:
        """The exit codes of all launchers."""
        deadline = time.monotonic() + limit_s
        while any(each.poll() is None for each in self.launchers.values()):
            assert time.monotonic() < deadline, self.texts()
            time.sleep(0.05)
        return [self.launchers[node].returncode for node in range(self.count)]

    def texts(self) -> str:
        """What all launchers have written, for the message of a failed assertion."""
        return "\n".join(f"--- node {node}\n{self.said(node)[-3000:]}" for node in range(self.count))

    def left(self) -> list[psutil.Process]:
        """Processes of these nodes that run."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


@contextmanager
def launched(
    folder: Path, count: int, script: str, *words: str, variables: Mapping[str, str] | None = None
) -> Iterator[LaunchedNodes]:
    """Start all nodes. At the end, what is left of them is killed, and must be nothing if the block succeeds."""
    made = LaunchedNodes(folder, count, script, *words, **(variables or {}))
    for node in range(count):
        made.start(node)
    try:
        yield made
        assert not (left := made.left()), left
    finally:
        for process in made.left():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for launcher in made.launchers.values():
            launcher.wait(30)
