"""One synchronization step of N workers, without compute: from gradients to new weights in every worker.

Each side is a crew of its own; they take turns, and who waits sleeps. A repeat is some steps in a row: from the first worker's
beginning to the last one's end. Rows give each side's ratio to fastps in the same run. Refuses to measure training.
"""

import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from fastps.bench import peers
from fastps.bench.crew import Crew
from fastps.bench.measure import BenchOptions, Row, Spread, check, interleaved
from fastps.bench.peers import LEARNING_RATE, MOMENTUM, Job

CHECKED_STEPS = 8
_SIDES: dict[
    str, dict[str, int | None]
] = {  # peer to sides: name and rows of shared memory beside one a worker, or None for no shared memory
    "limit": {"limit": 4, "limit-streaming": 4},
    "gloo": {"gloo": None},
    "ddp": {"ddp": None},
    "hogwild": {"hogwild": 1},
    "handmade": {"handmade": 2},
}


class Member:
    """A worker process of one side, and the orders that it answers."""

    def __init__(self, job: Job, rank: int) -> None:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // job.workers))
        makers: dict[str, Callable[[], Any]] = {
            "fastps": lambda: peers.Fastps(job, rank, "bsp"),
            "fastps-asp": lambda: peers.Fastps(job, rank, "asp"),
            "limit": lambda: peers.Limit(job, rank, streaming=False),
            "limit-streaming": lambda: peers.Limit(job, rank, streaming=True),
            "gloo": lambda: peers.Gloo(job, rank),
            "ddp": lambda: peers.Ddp(job, rank),
            "hogwild": lambda: peers.Hogwild(job, rank),
            "handmade": lambda: peers.Handmade(job, rank),
        }
        self.peer = makers[job.name]()

    def __call__(self, order: int) -> tuple[Any, Any]:
        """So many steps, after one that brings all together: (begin, end) in ns. Order 0: lowest and highest weight."""
        if order == 0:
            weights = self.peer.weights.detach()
            return float(weights.min()), float(weights.max())
        self.peer.run(1)
        began_ns = time.monotonic_ns()
        self.peer.run(order)
        return began_ns, time.monotonic_ns()

    def close(self) -> None:
        """The end of this process' part."""
        close = getattr(self.peer, "close", None)
        if close is not None:
            close()


class Side:
    """One side: its crew, and the steps that each of its workers has taken."""

    def __init__(self, job: Job) -> None:
        self.job = job
        size = min(job.workers, len(os.sched_getaffinity(0))) if job.name.startswith("limit") else job.workers
        self.crew = Crew(size, lambda rank: Member(job, rank))
        self.steps = 0
        self.steps_a_repeat = 1

    def run(self, steps: int) -> float:
        """Seconds of one of so many steps."""
        spans = self.crew.call(steps)
        self.steps += steps + 1
        return float(max(end for _, end in spans) - min(begin for begin, _ in spans)) / 1e9 / steps

    def prepare(self, repeat_s: float) -> None:
        """Check the first steps, and choose how many make a repeat."""
        self.run(CHECKED_STEPS - 1)
        self.check(tolerance=1e-4)
        seconds = self.run(2)
        for _ in range(3):
            self.steps_a_repeat = max(1, round(repeat_s / seconds))
            seconds = self.run(self.steps_a_repeat)

    def check(self, tolerance: float) -> None:
        """Compare every weight of every worker with what the steps must have made of it."""
        if self.job.name.startswith("limit"):
            lowest, highest = _weight_after(1, _mean(self.job)), _weight_after(1, _mean(self.job))
        elif self.job.is_level:
            lowest, highest = _weight_after(self.steps, _mean(self.job)), _weight_after(self.steps, _mean(self.job))
        else:
            # Of racing updates some are lost, or not yet seen (under asp a worker goes on while its last two pushes wait): at
            # least one worker's others were made, at most all. An update with the momentum of all is larger than with its own.
            lowest, highest = _weight_after(self.steps * self.job.workers, 1.0), _weight_after(self.steps - 2, 1.0)
            lowest = min(lowest, 1.0 - self.job.workers * (1.0 - highest))
        slack = tolerance * max(1.0, abs(lowest))
        for least, most in self.crew.call(0):
            is_right = lowest - slack <= least <= most <= highest + slack
            check(is_right, f"{self.job.name}: weights of {lowest:g} to {highest:g} after {self.steps} steps", (least, most))


def _mean(job: Job) -> float:
    return sum(job.gradient(rank) for rank in range(job.workers)) / job.workers


def _weight_after(steps: int, gradient: float) -> float:
    """A weight that began as 1, after so many steps of SGD with momentum."""
    weight, momentum = 1.0, 0.0
    for _ in range(steps):
        momentum = MOMENTUM * momentum + gradient
        weight -= LEARNING_RATE * momentum
    return weight


def measure(options: BenchOptions) -> list[Row]:
    """A row a side, number of workers and number of parameters; peers that cannot be measured have one, too."""
    _load_torch()
    pairs = [(workers, size) for size in options.parameters for workers in options.workers]
    return [row for workers, size in pairs for row in _rows(workers, size, options)]


def _load_torch() -> None:
    """Let torch import, before the crews are forked, what it imports at an optimizer's first step: seconds in each, else."""
    parameter = torch.ones(1, requires_grad=True)
    parameter.grad = torch.ones(1)
    peers.fused_sgd([parameter]).step()


def _rows(workers: int, size: int, options: BenchOptions) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="fastps-bench-") as folder, contextlib.ExitStack() as stack:
        sides = {}
        for name, rows in {"fastps": None, "fastps-asp": None, **_wanted(options)}.items():
            barrier = multiprocessing.get_context("fork").Barrier(workers)
            shared = 0 if rows is None else rows + (0 if name == "hogwild" else workers)
            sides[name] = Side(Job(name, workers, size, shared, folder, barrier))
            stack.enter_context(sides[name].crew)
        for side in sides.values():
            side.prepare(options.repeat_s)
        turns: dict[str, Callable[[], float]] = {name: _turn(side) for name, side in sides.items()}
        spreads = interleaved(turns, options.repeats)
        for side in sides.values():
            side.check(tolerance=0.05)
    missing = [name for name in options.against if name not in _SIDES]
    rows_of_sides = [_row(name, workers, size, spread, spreads) for name, spread in _with_better_limit(spreads).items()]
    return rows_of_sides + [_missing_row(name, workers, size) for name in missing]


def _wanted(options: BenchOptions) -> dict[str, int | None]:
    return {name: rows for peer in options.against if peer in _SIDES for name, rows in _SIDES[peer].items()}


def _turn(side: Side) -> Callable[[], float]:
    return lambda: side.run(side.steps_a_repeat)


def _with_better_limit(spreads: dict[str, Spread]) -> dict[str, Spread]:
    """Of the two kinds of stores the better is the limit."""
    found = dict(spreads)
    streaming = found.pop("limit-streaming", None)
    if streaming is not None and streaming.median < found["limit"].median:
        found["limit"] = streaming
    return found


def _row(name: str, workers: int, size: int, spread: Spread, spreads: dict[str, Spread]) -> Row:
    is_asynchronous = name in ("fastps-asp", "hogwild")
    ours = spreads["fastps-asp" if is_asynchronous else "fastps"]
    return {
        "bench": "step",
        "name": name.removesuffix("-asp"),
        "sync": "asp" if is_asynchronous else "bsp",
        "workers": workers,
        "parameters": size,
        **spread.row(),
        "ratio": spread.median / ours.median,
        "checked": True,
    }


def _missing_row(name: str, workers: int, size: int) -> Row:
    keys: Row = {"bench": "step", "name": name, "sync": "bsp", "workers": workers, "parameters": size}
    return {**keys, "missing": peers.missing_reason(name), "checked": False}
