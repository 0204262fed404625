"""Collectives of the process group "fastps" beside Gloo: all-reduce, and forward and backward under DDP.

Both backends are groups of the same processes, and take turns. The limit is one pass of each process over its own tensor,
which it reads and writes, all at once: an all-reduce cannot move less.
"""

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fastps.bench.crew import ForkedCrew
from fastps.bench.measure import BenchOptions, Row, Spread, check
from fastps.collectives import backend

DDP_LEAST = 100_000  # parameters; below, a model of square layers has no such size
LAYERS = 6
KINDS = ("all_reduce float32", "all_reduce bfloat16", "DDP")


class Member:
    """A process in a group of each backend. A command is (side, kind, times): it returns its seconds of one operation."""

    def __init__(self, rank: int, workers: int, size: int, folder: str) -> None:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workers))
        backend.register()
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=workers)
        self._groups = {"gloo": dist.group.WORLD, "fastps": dist.new_group(backend="fastps")}
        self._workers, self._size, self._rank = workers, size, rank
        self._tensors = {"float32": torch.zeros(size), "bfloat16": torch.zeros(size, dtype=torch.bfloat16)}
        self._models: dict[str, torch.nn.Module] = {}
        self._input = torch.ones(1, max(1, round((size / LAYERS) ** 0.5)))

    def __call__(self, command: tuple[str, str, int]) -> float:
        """Run the operation so many times, between a barrier and the end, and check the last result."""
        side, kind, times = command
        run, right = self._operation(side, kind)
        dist.barrier()
        began_ns = time.perf_counter_ns()
        for _ in range(times):
            run()
        seconds = (time.perf_counter_ns() - began_ns) / 1e9 / times
        check(right(), f"the sum over all ranks after {kind} by {side}", "another")
        return seconds

    def _operation(self, side: str, kind: str) -> tuple[Callable[[], Any], Callable[[], bool]]:
        """What to time, and whether the last result is right."""
        if kind == "DDP":
            model = self._model(side)
            return lambda: self._backward(model), lambda: self._agrees(model, side)
        tensor = self._tensors[kind.split()[1]].fill_(1)
        if side == "limit":
            return lambda: tensor.mul_(1), lambda: bool((tensor == 1).all())

        def right() -> bool:
            """Sums of ones stay exact for one operation; times of many run into infinity, and equal everywhere."""
            dist.all_reduce(tensor.fill_(self._rank + 1), group=self._groups[side])
            return bool((tensor == self._workers * (self._workers + 1) / 2).all())

        return lambda: dist.all_reduce(tensor, group=self._groups[side]), right

    def _model(self, side: str) -> torch.nn.Module:
        if side not in self._models:
            width = self._input.shape[1]
            torch.manual_seed(0)
            layers = [torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)]
            model: torch.nn.Module = torch.nn.Sequential(*layers)
            if side != "limit":
                model = torch.nn.parallel.DistributedDataParallel(
                    model, process_group=self._groups[side], gradient_as_bucket_view=True
                )
            self._models[side] = model
        return self._models[side]

    def _backward(self, model: torch.nn.Module) -> None:
        model.zero_grad()
        model(self._input * (self._rank + 1)).sum().backward()

    def _agrees(self, model: torch.nn.Module, side: str) -> bool:
        """Whether all ranks have one gradient; without a group each has its own."""
        if side == "limit":
            return True
        mean = torch.stack([each.grad.abs().mean() for each in model.parameters() if each.grad is not None])
        every = [torch.empty_like(mean) for _ in range(self._workers)]
        dist.all_gather(every, mean)
        return all(torch.equal(each, mean) for each in every)

    def close(self) -> None:
        """Leave the groups."""
        dist.destroy_process_group()


def measure(options: BenchOptions) -> list[Row]:
    """Return a row for each number of workers, size, kind and side."""
    sides = ("fastps", *(side for side in ("gloo", "limit") if side in options.against))
    return [row for size in options.parameters for n in options.workers for row in _rows(n, size, sides, options)]


def _rows(workers: int, size: int, sides: tuple[str, ...], options: BenchOptions) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="fastps-bench-") as folder:
        with ForkedCrew(workers, lambda rank: Member(rank, workers, size, folder)) as crew:
            for kind in KINDS[: 3 if size >= DDP_LEAST or options.smoke else 2]:
                found: dict[str, list[float]] = {side: [] for side in sides}
                times = {side: _times(max(crew.call((side, kind, 2))), options.repeat_s) for side in sides}
                for _ in range(options.repeats):
                    for side in sides:
                        found[side].append(max(crew.call((side, kind, times[side]))))
                rows += [_row(side, kind, workers, size, found) for side in sides]
    return rows


def _times(seconds: float, repeat_s: float) -> int:
    """How many operations fill a repeat."""
    return max(1, min(1000, round(repeat_s / max(seconds, 1e-6))))


def _row(side: str, kind: str, workers: int, size: int, found: dict[str, list[float]]) -> Row:
    ratios = sorted(theirs / ours for theirs, ours in zip(found[side], found["fastps"], strict=True))
    return {
        "bench": "collectives",
        "name": side,
        "kind": kind,
        "workers": workers,
        "parameters": size,
        **Spread(tuple(found[side])).row(),
        "ratio": ratios[len(ratios) // 2],
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
        "checked": True,
    }
