"""The memory of a whole job, while it trains: fastps, DistributedDataParallel and Hogwild beside the least that is possible.

The processes of a side are started one by one, as launchers do, and train a perceptron of 25 equal layers. Between two steps,
when each worker still has its gradients, the proportional set sizes of all are added: memory that several map counts once.

The floor is what any data-parallel job of so many processes needs: torch in each (measured, with a model of a few floats), a
gradient for each worker, and the weights and the optimizer's state once.
"""

import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fastps.bench.crew import ForkedCrew
from fastps.bench.measure import BenchOptions, Row, check
from fastps.torch.optimizer import DistributedOptimizer

LAYERS, BATCH_SIZE, STEPS = 25, 16, 6
FLOATS_OF_STATE = {"sgd": 1, "adam": 2}  # for each parameter
OURS = (("fastps", "bsp"), ("fastps", "asp"))
PEERS = {"ddp": ("ddp", "bsp"), "hogwild": ("hogwild", "asp")}


@dataclass(frozen=True)
class Job:
    """One side. `width` is that of its model's layers; 1: nothing but torch."""

    name: str
    sync: str
    optimizer: str
    workers: int
    width: int
    folder: str

    @property
    def parameters(self) -> int:
        """Floats of the model."""
        return LAYERS * self.width * (self.width + 1)


@dataclass(frozen=True)
class Loop:
    """A side's part of the training loop."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    close: Callable[[], object] = lambda: None


def _optimizer(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    if job.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=1e-6)
    return torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)


def _plain(job: Job, rank: int, model: nn.Module) -> Loop:
    return Loop(model, _optimizer(job, model))


def _fastps(job: Job, rank: int, model: nn.Module) -> Loop:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(job.workers), FASTPS_JOB=Path(job.folder).name)
    optimizer = DistributedOptimizer(_optimizer(job, model), job.sync, model=model)

    def close() -> None:
        if rank == 0:
            optimizer.wait_for_others()
        optimizer.close()

    return Loop(model, optimizer, close)


def _ddp(job: Job, rank: int, model: nn.Module) -> Loop:
    dist.init_process_group("gloo", init_method=f"file://{job.folder}/ddp", rank=rank, world_size=job.workers)
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Loop(wrapped, _optimizer(job, wrapped), dist.destroy_process_group)


def _hogwild(job: Job, rank: int, model: nn.Module) -> Loop:
    """Let all workers update weights in one shared memory without synchronization, each with its own optimizer's state."""
    shared = torch.from_file(f"{job.folder}/weights", shared=True, size=job.parameters)
    first = 0
    for parameter in model.parameters():
        view = shared[first : first + parameter.numel()].view(parameter.shape)
        first += parameter.numel()
        parameter.data = view.copy_(parameter.detach())  # the same values in each worker
    return Loop(model, _optimizer(job, model))


MAKERS = {"torch": _plain, "single": _plain, "fastps": _fastps, "ddp": _ddp, "hogwild": _hogwild}


class Member:
    """A worker process of one side, which answers its crew's commands."""

    def __init__(self, job: Job, rank: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(job.width, job.width) for _ in range(LAYERS)])
        self.inputs = torch.randn(STEPS, BATCH_SIZE, job.width, generator=torch.Generator().manual_seed(rank))
        self.loop = MAKERS[job.name](job, rank, model)
        self.close = self.loop.close

    def __call__(self, command: str) -> float:
        """Train, and return the sum of the weights' absolute values; or the process's share of memory of a kind, in bytes."""
        if command != "train":
            return share_of_memory(command)
        for inputs in self.inputs:
            self.loop.optimizer.zero_grad()
            self.loop.model(inputs).square().mean().backward()
            self.loop.optimizer.step()
        with torch.no_grad():
            return sum(float(parameter.abs().sum()) for parameter in self.loop.model.parameters())


def share_of_memory(kind: str) -> int:
    """The proportional set size of this process, of a kind: its own pages, and its share of those that others map, too."""
    words = Path("/proc/self/smaps_rollup").read_text().split()
    return int(words[words.index(kind) + 1]) * 1024


def measure(options: BenchOptions) -> list[Row]:
    """Return a row for each optimizer, number of workers, size and side."""
    widths = [max(1, math.isqrt(parameters // LAYERS)) for parameters in options.parameters]
    optimizers = ("sgd",) if options.smoke else tuple(FLOATS_OF_STATE)
    sides = [("torch", ""), *OURS, *(PEERS[name] for name in PEERS if name in options.against)]
    rows = []
    for optimizer, width, workers in [(o, w, n) for o in optimizers for w in widths for n in options.workers]:
        found = {side: _run(side, optimizer, workers, width) for side in sides}
        found["single", ""] = _run(("single", ""), optimizer, 1, width)
        torch_bytes, _ = found.pop(("torch", ""))
        size = 4 * LAYERS * width * (width + 1)
        floor = torch_bytes + size * (workers + 1 + FLOATS_OF_STATE[optimizer])
        level = {name: weights for (name, sync), (_, weights) in found.items() if sync == "bsp"}
        check(max(level.values()) - min(level.values()) < 1e-4 * level["fastps"], "the same weights in all that wait", level)
        for (name, sync), (taken, _) in found.items():
            rows.append({
                "bench": "memory", "name": name, "sync": sync, "optimizer": optimizer,
                "workers": 1 if name == "single" else workers, "parameters": size // 4,
                "bytes": taken, "floor_bytes": floor, "ratio": taken / found["fastps", "bsp"][0],
                "floor_ratio": None if name == "single" else taken / floor, "checked": True,
            })  # fmt: skip
    return rows


def _run(
    side: tuple[str, str], optimizer: str, workers: int, width: int, kinds: Sequence[str] = ("Pss:",)
) -> tuple[int, float]:
    """Train one side; return the bytes of these kinds of all its processes, and worker 0's sum of weights."""
    with tempfile.TemporaryDirectory(prefix="fastps-bench-", dir="/dev/shm") as folder:
        job = Job(*side, optimizer, workers, 1 if side[0] == "torch" else width, folder)
        with ForkedCrew(workers, partial(Member, job), method="spawn") as crew:
            weights = crew.call("train")
            return sum(int(share) for kind in kinds for share in crew.call(kind)), weights[0]
