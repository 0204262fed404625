"""Steps of a recommendation model with tables of embeddings: fastps beside Hogwild, and one push beside a plain C loop.

The model sums 26 looked-up rows of four tables for each of 2,048 samples. Hogwild is torch.multiprocessing's way: the
parameters lie in shared memory, and each process steps its own torch optimizer over them, sparse SGD, or SparseAdam beside
Adam. Sides alternate. Every push of fastps must be folded, and every side must learn.
"""

import contextlib
import mmap
import multiprocessing
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from fastps.bench.crew import ForkedCrew
from fastps.bench.measure import BenchOptions, Floats, Row, aligned, check, interleaved, repeated, whole_lines
from fastps.bench.member import load_torch
from fastps.job.update_rules import SGD
from fastps.kernels.baseline.roofline import update_rows
from fastps.store.store import Store
from fastps.torch.optimizer import DistributedOptimizer

TABLES, WIDTH, DENSE, LOOKUPS = 4, 16, 13, 26
ROWS, SMOKE_ROWS = 1_000_000, 500
BATCH_SIZE, SMOKE_BATCH_SIZE = 2048, 32
PUSHED, SMOKE_PUSHED = 50_000, 100
BATCHES = 16  # of each worker, made before the measurement
RATE = {"sgd": 0.1, "sparse-adam": 0.005}


@dataclass(frozen=True)
class Job:
    """Facts shared by one side's workers; `shared` is float32, whole cache lines for each parameter of Hogwild's weights."""

    name: str
    optimizer: str
    workers: int
    rows: int
    batch_size: int
    shared: Floats
    barrier: Any
    job: str


class Recommender(nn.Module):
    """Sums of embeddings from several tables and dense features, then a perceptron: the logit of a click."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, WIDTH, mode="sum", sparse=True) for _ in range(TABLES))
        self.top = nn.Sequential(nn.Linear(TABLES * WIDTH + DENSE, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: torch.Tensor, looked_up: list[torch.Tensor]) -> torch.Tensor:
        """Return a logit for each sample; `looked_up` has the rows of each table: (samples, lookups)."""
        sums = [table(rows) for table, rows in zip(self.tables, looked_up, strict=True)]
        logits: torch.Tensor = self.top(torch.cat([dense, *sums], 1))
        return logits.squeeze(1)


def batches_of(job: Job, rank: int) -> list[tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]]:
    """Make a worker's batches: dense features, rows of each table, and labels that the features decide."""
    generator = torch.Generator().manual_seed(rank)
    shares = [LOOKUPS // TABLES + (table < LOOKUPS % TABLES) for table in range(TABLES)]
    found = []
    for _ in range(BATCHES):
        dense = torch.randn(job.batch_size, DENSE, generator=generator)
        looked_up = [torch.randint(0, job.rows, (job.batch_size, share), generator=generator) for share in shares]
        found.append((dense, looked_up, (dense.sum(1) > 0).float()))
    return found


def _torch_optimizers(job: Job, model: Recommender) -> list[torch.optim.Optimizer]:
    rate = RATE[job.optimizer]
    if job.optimizer == "sgd":
        return [torch.optim.SGD(model.parameters(), lr=rate)]
    tables = list(model.tables.parameters())
    return [torch.optim.Adam(model.top.parameters(), lr=rate), torch.optim.SparseAdam(tables, lr=rate)]


class Trainer:
    """A worker process of one side, which answers its crew's commands."""

    def __init__(self, job: Job, rank: int) -> None:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // job.workers))
        torch.manual_seed(0)
        self.job, self.steps = job, 0
        self.model = Recommender(job.rows)
        self.batches = batches_of(job, rank)
        if job.name == "hogwild":
            self._share(rank)
        self.optimizers = _torch_optimizers(job, self.model)
        if job.name == "fastps":
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(job.workers))
            self.optimizers = [
                DistributedOptimizer(each, "asp", job=f"{job.job}-{number}", rank=rank, workers=job.workers)
                for number, each in enumerate(self.optimizers)
            ]

    def _share(self, rank: int) -> None:
        """Point the parameters at memory that all workers of the side share."""
        first = 0
        for parameter in self.model.parameters():
            view = torch.from_numpy(self.job.shared[first : first + parameter.numel()]).view(parameter.shape)
            if rank == 0:
                view.copy_(parameter.detach())
            parameter.data = view
            first += whole_lines(parameter.numel())
        self.job.barrier.wait()

    def __call__(self, command: int | str) -> Any:
        """Take steps after one that aligns all workers: (begin, end) in ns. Or "loss", or "version": updates of each job."""
        if command == "loss":
            with torch.no_grad():
                return sum(float(self.loss_of(batch)) for batch in self.batches) / BATCHES
        if command == "version":
            return [each.version for each in self.optimizers if isinstance(each, DistributedOptimizer)], self.steps
        self.step()
        began_ns = time.monotonic_ns()
        for _ in range(int(command)):
            self.step()
        return began_ns, time.monotonic_ns()

    def loss_of(self, batch: tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return the loss on a batch."""
        dense, looked_up, labels = batch
        return nn.functional.binary_cross_entropy_with_logits(self.model(dense, looked_up), labels)

    def step(self) -> None:
        """Take one step as a training script does."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.loss_of(self.batches[self.steps % BATCHES]).backward()  # type: ignore[no-untyped-call]
        for optimizer in self.optimizers:
            optimizer.step()
        self.steps += 1

    def close(self) -> None:
        """Leave fastps' jobs."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, DistributedOptimizer):
                optimizer.close()


class Side:
    """One side: its crew, and the steps of a repeat."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.crew = ForkedCrew(job.workers, lambda rank: Trainer(job, rank))
        self.steps_a_repeat = 1
        self.first_loss = self.last_loss = float("nan")

    def prepare(self, repeat_s: float) -> None:
        """Measure the first loss, and choose the steps of a repeat."""
        self.first_loss = self.crew.call("loss")[0]
        for _ in range(3):
            self.steps_a_repeat = max(2, round(repeat_s / self.run()))

    def run(self) -> float:
        """Let every worker take the steps of a repeat; return the seconds of one."""
        spans = self.crew.call(self.steps_a_repeat)
        return float(max(end for _, end in spans) - min(begin for begin, _ in spans)) / 1e9 / self.steps_a_repeat

    def finish(self) -> None:
        """Check that no push was lost, and that the side has learned."""
        self.last_loss = self.crew.call("loss")[0]
        check(self.last_loss < self.first_loss, f"{self.job.name}: a loss below {self.first_loss:.3f}", self.last_loss)
        found = self.crew.call("version")
        steps = sum(steps for _, steps in found)
        for versions, _ in found:
            check(all(version == steps for version in versions), f"{self.job.name}: {steps} updates", versions)


def measure(options: BenchOptions) -> list[Row]:
    """Return a row for a push and for the plain loop, and one for each optimizer, number of workers and side."""
    load_torch()
    found = _pushes(options)
    for optimizer in RATE:
        for workers in options.workers:
            found += _steps(optimizer, workers, options)
    return found


def _steps(optimizer: str, workers: int, options: BenchOptions) -> list[Row]:
    rows, batch = (SMOKE_ROWS, SMOKE_BATCH_SIZE) if options.smoke else (ROWS, BATCH_SIZE)
    with torch.device("meta"):
        sizes = [parameter.numel() for parameter in Recommender(rows).parameters()]
    floats = sum(whole_lines(size) for size in sizes)
    sides: list[Side] = []
    with contextlib.ExitStack() as stack:
        for name in ("fastps", *(peer for peer in ("hogwild",) if peer in options.against)):
            shared = aligned(1, floats, mmap.mmap(-1, 4 * floats + mmap.PAGESIZE) if name == "hogwild" else None)[0]
            barrier = multiprocessing.get_context("fork").Barrier(workers)
            side = Side(Job(name, optimizer, workers, rows, batch, shared, barrier, f"bench-rows-{secrets.token_hex(4)}"))
            stack.enter_context(side.crew)
            side.prepare(options.train_repeat_s)
            sides.append(side)
        spreads = list(interleaved({side.job.name: side.run for side in sides}, options.repeats).values())
        for side in sides:
            side.finish()
    ours = spreads[0].median
    return [
        {
            "bench": "rows",
            "name": side.job.name,
            "sync": "asp",
            "optimizer": optimizer,
            "workers": workers,
            "parameters": sum(sizes),
            "batch_size": batch,
            **spread.row(),
            "ratio": spread.median / ours,
            "loss_first": side.first_loss,
            "loss_last": side.last_loss,
            "checked": True,
        }
        for side, spread in zip(sides, spreads, strict=True)
    ]


def _pushes(options: BenchOptions) -> list[Row]:
    """One worker's push of rows, from the gradient to the commit, and the plain loop over the same rows."""
    rows, pushed = (SMOKE_ROWS, SMOKE_PUSHED) if options.smoke else (ROWS, PUSHED)
    rng = np.random.default_rng(0)
    numbers = [rng.permutation(rows)[:pushed].astype(np.int64) for _ in range(BATCHES)]
    values = rng.standard_normal((pushed, WIDTH)).astype(np.float32)
    plain = np.zeros((rows, WIDTH), np.float32)
    with Store.create({"table": plain}, SGD(lr=0.1), sync="asp", tables=["table"]) as store, store.attach(0) as worker:
        counts = {"fastps": 0, "loop": 0}

        def push(times: int) -> None:
            for _ in range(times):
                worker.put_rows("table", numbers[counts["fastps"] % BATCHES], values)
                worker.step()
                counts["fastps"] += 1

        def loop(times: int) -> None:
            for _ in range(times):
                update_rows(plain, numbers[counts["loop"] % BATCHES], values, 0.1)
                counts["loop"] += 1

        sides: dict[str, Callable[[], float]] = {
            name: repeated(run, options.repeat_s) for name, run in (("fastps", push), ("loop", loop))
        }
        spreads = interleaved(sides, options.repeats)
        (loop if counts["loop"] < counts["fastps"] else push)(abs(counts["loop"] - counts["fastps"]))
        difference = float(np.abs(worker.weights["table"] - plain).max())
        check(difference < 1e-3, "the plain loop's table", f"a difference of {difference:g}")
    return [
        {
            "bench": "rows",
            "name": name,
            "sync": "asp",
            "optimizer": "push",
            "workers": 1,
            "parameters": rows * WIDTH,
            "batch_size": pushed,
            **spread.row(),
            "ratio": spread.median / spreads["fastps"].median,
            "checked": True,
        }
        for name, spread in spreads.items()
    ]
