"""A step with an optimizer that runs in Python, beside DDP: Muon in float32 for matrices, AdamW for the rest.

It trains a small decoder on random text. With fastps one process runs each optimizer's `step()`; with DDP every process does.
Sides take turns of a few steps. The tail is the 95th percentile of single steps; the memory is that of all processes of a side
after a step (proportional set sizes). After the same steps both sides have the same weights.
"""

import contextlib
import os
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from fastps.bench.crew import ForkedCrew
from fastps.bench.measure import BenchOptions, Row, Spread, check
from fastps.bench.memory import share_of_memory
from fastps.torch.optimizer import DistributedOptimizer

SIZES = ((256, 4), (416, 5))  # the decoder's width and layers: 3.2 and 10.5 million floats
WORDS, ROWS, LENGTH = 97, 4, 64
TURN, CHECKED_STEPS = 6, 3


@dataclass(frozen=True)
class Job:
    """Facts shared by one side's workers."""

    name: str
    workers: int
    width: int
    layers: int
    folder: str


class Decoder(nn.Module):
    """A causal transformer over words."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        kind = partial(nn.TransformerEncoderLayer, width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(kind() for _ in range(layers))
        self.head = nn.Linear(width, WORDS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Scores of the next word at each place: float32[rows, length, words]."""
        found: torch.Tensor = self.words(text)
        for block in self.blocks:
            found = block(found, src_mask=self.mask, is_causal=True)
        scores: torch.Tensor = self.head(found)
        return scores


class Muon(torch.optim.Optimizer):
    """Muon with products in float32, as examples/muon.py has it: torch's own multiplies in bfloat16."""

    def __init__(self, matrices: Any, lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make one step along the orthogonalized momentum."""
        for group in self.param_groups:
            for matrix in group["params"]:
                buffer = self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix))
                buffer.lerp_(matrix.grad, 1 - group["momentum"])
                matrix.sub_(_orthogonal(matrix.grad.lerp(buffer, group["momentum"])), alpha=group["lr"])


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    flat = matrix.flatten(1)  # a convolution's filters: a row each
    is_wide = flat.shape[0] <= flat.shape[1]
    wide: torch.Tensor = flat if is_wide else flat.T
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        gram = wide @ wide.T
        wide = 3.4445 * wide + (2.0315 * gram @ gram - 4.775 * gram) @ wide
    return (wide if is_wide else wide.T).reshape(matrix.shape)


def _optimizers(model: Decoder) -> list[torch.optim.Optimizer]:
    matrices = [each for each in model.blocks.parameters() if each.ndim == 2]
    others = [each for each in model.parameters() if all(each is not matrix for matrix in matrices)]
    return [Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=1e-3)]


class Member:
    """A worker process of one side, which answers its crew's commands."""

    def __init__(self, job: Job, rank: int) -> None:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // job.workers))
        torch.manual_seed(0)
        self.plain = Decoder(job.width, job.layers)
        self.model: nn.Module = self.plain
        self.optimizers: list[Any] = _optimizers(self.plain)
        self.generator = torch.Generator().manual_seed(rank)
        if job.name == "ddp":
            dist.init_process_group("gloo", init_method=f"file://{job.folder}/ddp", rank=rank, world_size=job.workers)
            self.model = nn.parallel.DistributedDataParallel(self.plain, gradient_as_bucket_view=True)
        else:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(job.workers), FASTPS_JOB=Path(job.folder).name)
            self.optimizers = [DistributedOptimizer(each, "bsp", model=self.plain) for each in self.optimizers]

    def __call__(self, command: int | str) -> Any:
        """Take steps after one that aligns all workers: the seconds of each. Or "memory" in bytes, or sums of the "weights".

        A copy of all weights would stay in the allocator, and count as memory.
        """
        if command == "memory":
            return share_of_memory("Pss:")
        if command == "weights":
            return np.array([[each.sum().item(), each.norm().item()] for each in self.plain.parameters()])
        self._step()
        return [self._step() for _ in range(int(command))]

    def _step(self) -> float:
        began = time.perf_counter()
        text = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=self.generator)
        for each in self.optimizers:
            each.zero_grad()
        scores = self.model(text[:, :-1])
        nn.functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
        for each in self.optimizers:
            each.step()
        return time.perf_counter() - began

    def close(self) -> None:
        """Leave the job or the process group."""
        for each in self.optimizers:
            if isinstance(each, DistributedOptimizer):
                each.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def measure(options: BenchOptions) -> list[Row]:
    """Return a row for each number of workers, size and side."""
    sizes = ((16, 1),) if options.smoke else SIZES
    return [row for workers in options.workers for size in sizes for row in _rows(workers, size, options)]


def _rows(workers: int, size: tuple[int, int], options: BenchOptions) -> list[Row]:
    names = ("fastps", "ddp") if "ddp" in options.against else ("fastps",)
    with contextlib.ExitStack() as stack:
        crews = {}
        for name in names:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fastps-bench-"))
            member = partial(Member, Job(name, workers, *size, folder))
            crews[name] = stack.enter_context(ForkedCrew(workers, member, method="spawn"))
        for crew in crews.values():
            crew.call(CHECKED_STEPS - 1)
        weights = {name: crew.call("weights") for name, crew in crews.items()}
        _check_same(weights)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(options.repeats):
            for name, crew in crews.items():
                seconds[name] += [max(of_step) for of_step in zip(*crew.call(1 if options.smoke else TURN), strict=True)]
        memory = {name: sum(crew.call("memory")) for name, crew in crews.items()}
    with torch.device("meta"):
        parameters = sum(each.numel() for each in Decoder(*size).parameters())
    ours = Spread(tuple(seconds["fastps"])).median
    return [
        {
            "bench": "optimizer", "name": name, "sync": "bsp", "workers": workers, "parameters": parameters,
            **(spread := Spread(tuple(seconds[name]))).row(), "ratio": spread.median / ours,
            "tail_ratio": float(np.percentile(seconds[name], 95)) / spread.median,
            "bytes": memory[name], "bytes_ratio": memory[name] / memory["fastps"], "checked": True,
        }
        for name in names
    ]  # fmt: skip


def _check_same(weights: dict[str, list[Any]]) -> None:
    """Check that all workers of a side have the same weights, and all sides but for the order of sums."""
    reference = weights["fastps"][0]
    for name, (first, *others) in weights.items():
        check(all(np.array_equal(first, other) for other in others), f"{name}: the same weights in all workers", "others")
        difference = float(np.abs(first - reference).max() / np.abs(reference).max())
        check(difference < 1e-3, f"{name}: fastps' weights after {CHECKED_STEPS} steps", f"a difference of {difference:g}")
