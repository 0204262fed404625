"""Training steps per second: the same loop, images and model under fastps, what others use, and one process.

It trains two models on MNIST-5k: the demo job's CNN, with short steps, and a perceptron of 20 million parameters, which cost
more to move. Sides alternate; their first steps must give the same weights, and each must learn. `fastps compare` measures
accuracy and the time to reach it.
"""

import contextlib
import importlib.util
import mmap
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from fastps.bench import rpc
from fastps.bench.crew import ForkedCrew
from fastps.bench.integrations import ray_server
from fastps.bench.measure import BenchOptions, Floats, Row, Spread, aligned, check, interleaved, whole_lines
from fastps.bench.member import load_torch
from fastps.errors import UsageError
from fastps.lab.demo.data import CLASSES, Dataset, load, open_saved
from fastps.lab.demo.models import inputs_of, model_for
from fastps.lab.demo.options import TrainingOptions
from fastps.lab.demo.worker_main import Batches
from fastps.system.extras import how_to_install
from fastps.torch.optimizer import DistributedOptimizer

BATCH_SIZE, LEARNING_RATE, MOMENTUM = 16, 0.02, 0.5
CHECKED_STEPS, JUDGED_IMAGES = 8, 500
WIDTH, SMOKE_WIDTH = 4096, 32
MODELS = ("cnn", "mlp")
OURS = ("bsp", "dssp:3,15")
PEERS = {"ddp": "bsp", "hogwild": "asp", "rpc": "bsp", "ray": "bsp"}


@dataclass(frozen=True)
class Job:
    """Facts shared by one side's workers; `shared` is float32, whole cache lines for each parameter of Hogwild's weights."""

    name: str
    sync: str
    model: str
    workers: int
    smoke: bool
    folder: Path
    parameters: int
    shared: Floats
    barrier: Any

    @property
    def is_level(self) -> bool:
        """Whether all workers must hold the same weights after the same steps."""
        return self.sync == "bsp"

    @property
    def processes(self) -> int:
        """Number of processes that compute: 1 for the side of a single process with the batches of all workers."""
        return 1 if self.name == "single" else self.workers


@dataclass(frozen=True)
class Loop:
    """A side's part of the common loop."""

    model: nn.Module
    optimizer: rpc.Steps
    close: Callable[[], object] = lambda: None


def model_of(name: str, data: Dataset, smoke: bool) -> nn.Module:
    """Make one of the two models, the same in every process."""
    torch.manual_seed(0)
    if name == "cnn":
        return model_for(data)
    width = SMOKE_WIDTH if smoke else WIDTH
    inputs = int(np.prod(data.train_images.shape[1:]))
    layers = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)]
    return nn.Sequential(nn.Flatten(), *layers)


def _sgd(parameters: Iterable[torch.Tensor], *, fused: bool = True, rate: float = LEARNING_RATE) -> torch.optim.SGD:
    """Make the optimizer of every side."""
    return torch.optim.SGD(parameters, lr=rate, momentum=MOMENTUM, fused=fused)


def _fastps(job: Job, rank: int, model: nn.Module) -> Loop:
    """Make the two changes that fastps needs in a loop."""
    names = f"{job.folder.name}-{job.model}-{job.workers}-{job.sync}"
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(job.workers), FASTPS_JOB=names)
    optimizer = DistributedOptimizer(_sgd(model.parameters(), fused=False), job.sync, model=model)
    return Loop(model, optimizer, optimizer.close)


def _ddp(job: Job, rank: int, model: nn.Module) -> Loop:
    """Set up DistributedDataParallel with its fastest options here: gradients are views of its buckets."""
    method = f"file://{job.folder}/ddp-{job.model}-{job.workers}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=job.workers)
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Loop(wrapped, _sgd(wrapped.parameters()), dist.destroy_process_group)


def _hogwild(job: Job, rank: int, model: nn.Module) -> Loop:
    """Set up Hogwild: workers update weights in one shared memory without synchronization, each with its own momentum."""
    first = 0
    for parameter in model.parameters():
        view = torch.from_numpy(job.shared[first : first + parameter.numel()]).view(parameter.shape)
        if rank == 0:
            view.copy_(parameter.detach())
        parameter.data = view
        first += whole_lines(parameter.numel())
    job.barrier.wait()
    return Loop(model, _sgd(model.parameters()))


def _served(model: nn.Module, rate: float) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    """The weights of a server, in one flat tensor, and their optimizer."""
    weights = nn.utils.parameters_to_vector(model.parameters()).detach().requires_grad_()
    return weights, _sgd([weights], rate=rate)


def _rpc(job: Job, rank: int, model: nn.Module) -> Loop:
    """Set up torch's RPC: worker 0's process has the server beside its own loop."""
    if rank == 0:
        rpc.serve(*_served(model, LEARNING_RATE / job.workers), job.workers)
    rpc.join(rank, job.workers, f"{job.folder}/rpc-{job.model}-{job.workers}")
    return Loop(model, rpc.Pushed(list(model.parameters())), rpc.leave)


def _plain(job: Job, rank: int, model: nn.Module) -> Loop:
    """Set up plain torch: for one process with all cores and the batches of all workers, and for a worker of Ray's."""
    return Loop(model, _sgd(model.parameters()))


MAKERS: dict[str, Callable[[Job, int, nn.Module], Loop]] = {
    "fastps": _fastps,
    "ddp": _ddp,
    "hogwild": _hogwild,
    "rpc": _rpc,
    "ray": _plain,
    "single": _plain,
}


def _missing_reason(peer: str) -> str | None:
    """Why a peer cannot be measured here, or None."""
    if peer == "rpc":
        return rpc.missing_reason()
    is_missing = peer == "ray" and importlib.util.find_spec("ray") is None
    return f"ray is not installed: {how_to_install('ray')}" if is_missing else None


class Trainer:
    """A worker process of one side, which answers its crew's commands."""

    def __init__(self, job: Job, rank: int) -> None:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // job.processes))
        data = open_saved(job.folder)
        options = TrainingOptions(workers=job.workers, batch_size=BATCH_SIZE)
        ranks = range(job.workers) if job.name == "single" else [rank]
        self.batches = [Batches(data, options, each) for each in ranks]
        self.judged = inputs_of(data, data.train_images[:JUDGED_IMAGES]), torch.tensor(data.train_labels[:JUDGED_IMAGES])
        self.model = model_of(job.model, data, job.smoke)
        self.loop = MAKERS[job.name](job, rank, self.model)
        self.close = self.loop.close

    def __call__(self, command: int | str) -> Any:
        """Take steps after one that aligns all workers: (begin, end) in ns. Or "loss", or "weights": float32, flat."""
        if command == "loss":
            with torch.no_grad():
                return float(nn.functional.cross_entropy(self.model(self.judged[0]), self.judged[1]))
        if command == "weights":
            return np.concatenate([parameter.detach().numpy().ravel() for parameter in self.model.parameters()])
        self.step()
        began_ns = time.monotonic_ns()
        for _ in range(int(command)):
            self.step()
        return began_ns, time.monotonic_ns()

    def step(self) -> None:
        """Take one step like a training script, including reading the batch."""
        self.compute()
        self.loop.optimizer.step()

    def compute(self) -> None:
        """Compute the gradients of the next batch."""
        parts = [batches.next() for batches in self.batches]
        inputs, labels = parts[0] if len(parts) == 1 else (torch.cat(each) for each in zip(*parts, strict=True))
        self.loop.optimizer.zero_grad()
        nn.functional.cross_entropy(self.loop.model(inputs), labels).backward()  # type: ignore[no-untyped-call]


def _member(job: Job, rank: int) -> Callable[[int | str], Any]:
    if job.name != "ray":
        return Trainer(job, rank)
    sent = replace(job, shared=np.empty(0, np.float32), barrier=None)
    return ray_server.Driver(job.workers, partial(_server, sent), partial(Trainer, sent))


def _server(job: Job) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    return _served(model_of(job.model, open_saved(job.folder), job.smoke), LEARNING_RATE)


class Side:
    """One side: its crew, and the number of steps taken."""

    def __init__(self, job: Job) -> None:
        self.job = job
        members = 1 if job.name == "ray" else job.processes
        self.crew = ForkedCrew(members, lambda rank: _member(job, rank), paused=job.name == "rpc")
        self.steps = 0
        self.steps_a_repeat = 1
        self.first_loss = self.last_loss = float("nan")

    def run(self, steps: int) -> float:
        """Let every worker take steps; return the seconds of one."""
        spans = self.crew.call(steps)
        self.steps += steps + 1
        return float(max(end for _, end in spans) - min(begin for begin, _ in spans)) / 1e9 / steps

    def prepare(self, repeat_s: float) -> Floats:
        """Take the checked steps, choose the steps of a repeat, and return worker 0's weights after the checked ones."""
        self.first_loss = self.crew.call("loss")[0]
        self.run(CHECKED_STEPS - 1)
        weights = self.weights()
        for _ in range(2):
            self.steps_a_repeat = max(2, round(repeat_s / self.run(self.steps_a_repeat)))
        return weights

    def weights(self) -> Floats:
        """Return worker 0's weights; check that all workers hold the same if they must."""
        first: Floats
        first, *others = self.crew.call("weights")
        if self.job.is_level:
            differing = sum(not np.array_equal(first, other) for other in others)
            check(
                differing == 0, f"{self.job.name}: the same weights in all workers", f"others in {differing} of {len(others)}"
            )
        return first

    def finish(self) -> None:
        """Check the weights and the loss at the end."""
        self.weights()
        self.last_loss = self.crew.call("loss")[0]
        check(self.last_loss < self.first_loss, f"{self.job.name}: a loss below {self.first_loss:.3f}", self.last_loss)


def measure(options: BenchOptions) -> list[Row]:
    """Return a row for each model, number of workers and side."""
    try:
        data = load("mnist5k")
    except UsageError as error:
        return [{"bench": "train", "name": "mnist5k", "missing": str(error), "checked": False}]
    load_torch()
    with tempfile.TemporaryDirectory(prefix="fastps-bench-") as folder:
        data.save(Path(folder))
        pairs = [(model, workers) for model in MODELS for workers in options.workers]
        return [row for model, workers in pairs for row in _rows(model, workers, data, Path(folder), options)]


def _rows(model: str, workers: int, data: Dataset, folder: Path, options: BenchOptions) -> list[Row]:
    missing = {peer: reason for peer in PEERS if peer in options.against and (reason := _missing_reason(peer))}
    names = [("fastps", sync) for sync in OURS]
    names += [(peer, sync) for peer, sync in PEERS.items() if peer in options.against and peer not in missing]
    with torch.device("meta"):  # sizes only: nothing is computed before the fork
        sizes = [parameter.numel() for parameter in model_of(model, data, options.smoke).parameters()]
    floats = sum(whole_lines(size) for size in sizes)
    with contextlib.ExitStack() as stack:
        sides = []
        for name, sync in [*names, ("single", "bsp")]:
            shared = aligned(1, floats, mmap.mmap(-1, 4 * floats + mmap.PAGESIZE) if name == "hogwild" else None)[0]
            barrier = multiprocessing.get_context("fork").Barrier(workers)
            side = Side(Job(name, sync, model, workers, options.smoke, folder, sum(sizes), shared, barrier))
            stack.enter_context(side.crew)
            sides.append(side)
        _check_same([(side, side.prepare(options.train_repeat_s)) for side in sides])
        turns = {str(index): _turn(side) for index, side in enumerate(sides)}
        spreads = list(interleaved(turns, options.repeats).values())
        for side in sides:
            side.finish()
    keys = {"bench": "train", "model": model, "workers": workers, "checked": False}
    return [_row(side, spread, spreads[0]) for side, spread in zip(sides, spreads, strict=True)] + [
        {**keys, "name": peer, "sync": PEERS[peer], "missing": reason} for peer, reason in missing.items()
    ]


def _check_same(found: list[tuple[Side, Floats]]) -> None:
    """Check that after the same steps the synchronous sides have the same weights, up to the order of sums."""
    level = [(side, weights) for side, weights in found if side.job.is_level]
    reference = level[0][1]
    for side, weights in level[1:]:
        difference = float(np.abs(weights - reference).max() / np.abs(reference).max())
        check(
            difference < 1e-4,
            f"{side.job.name}: fastps' weights after {CHECKED_STEPS} steps",
            f"a difference of {difference:g}",
        )


def _turn(side: Side) -> Callable[[], float]:
    return lambda: side.run(side.steps_a_repeat)


def _row(side: Side, spread: Spread, ours: Spread) -> Row:
    job = side.job
    return {
        "bench": "train",
        "name": job.name,
        "sync": job.sync,
        "model": job.model,
        "workers": job.workers,
        "parameters": job.parameters,
        "batch_size": BATCH_SIZE * job.workers // job.processes,
        **spread.row(),
        "steps_per_s": 1 / spread.median,
        "samples_per_s": BATCH_SIZE * job.workers / spread.median,
        "ratio": spread.median / ours.median,
        "steps": side.steps,
        "loss_first": side.first_loss,
        "loss_last": side.last_loss,
        "checked": True,
    }
