"""How soon a reader uses a new version: from gradients that are ready in the trainer until the reader has read a new weight.

fastps' reader is pointed at the version. The others copy new weights in place into tensors in shared memory, which the model
of their reader shows: by hand, or with TorchRL's SharedMemTransport. A word in shared memory tells their reader the version.
TorchRL itself sends an instruction through a queue, so its whole scheme is no faster. In place, nothing keeps a reader from a
mixture of two versions: free rounds, in which the trainer does not wait for the reader, count these looks.
"""

import contextlib
import importlib.util
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastps.bench import peers
from fastps.bench.crew import ForkedCrew
from fastps.bench.measure import BenchOptions, Row, Spread, check
from fastps.bench.peers import ForkedJob
from fastps.torch.reader import reader

ROUNDS_S = 0.5  # of one turn of a side
FREE_LOOKS = 300
VERSION, SEEN, SEEN_NS, USED_NS = 0, 1, 2, 3  # words of a side
_POLL_LIMIT_S = 60.0


class Model(torch.nn.Module):
    """A model of the given tensors."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(tensor) for tensor in tensors)


class FastpsTrainer:
    """One worker of fastps."""

    def __init__(self, job: ForkedJob, words: Any) -> None:
        self._peer = peers.Fastps(job, 0, "bsp")

    def step(self) -> None:
        """Make the next version."""
        self._peer.step()

    def close(self) -> None:
        """Leave the job."""
        self._peer.close()


class FastpsReader:
    """fastps.reader, which asks for the newest version without a pause; with `waits` it calls `wait`, and sleeps."""

    def __init__(self, job: ForkedJob, words: Any, *, waits: bool) -> None:
        self.model = Model(job.tensors_of(torch.ones(job.size)))
        self._reader = reader(f"{Path(job.folder).name}-{job.name}", timeout_s=30)
        self._waits = waits

    def take(self, version: int) -> int:
        """Show at least this version, and return the time at which it was seen."""
        if self._waits:
            self._reader.wait(version)
        while self._reader.newest < version:
            os.sched_yield()
        seen_ns = time.monotonic_ns()
        self._reader.update(self.model)
        return seen_ns

    def close(self) -> None:
        """Give the place back."""
        self._reader.close()


class InPlaceTrainer:
    """A trainer with weights of its own, and a copy into shared memory after each step; row 0 of the job's memory."""

    def __init__(self, job: ForkedJob, words: Any, copy: Callable[[list[torch.Tensor], list[torch.Tensor]], Callable[[], Any]]):
        job.shared[0] = 1.0
        self._words = words
        self._tensors = [tensor.clone().requires_grad_() for tensor in job.tensors_of(torch.ones(job.size))]
        for tensor in self._tensors:
            tensor.grad = torch.full_like(tensor, job.gradient(0))
        self._optimizer = peers.fused_sgd(self._tensors)
        self._copy = copy([tensor.detach() for tensor in self._tensors], job.tensors_of(torch.from_numpy(job.shared[0])))

    def step(self) -> None:
        """Make the next version, copy it, and tell it."""
        self._optimizer.step()
        self._copy()
        self._words[VERSION] += 1

    def close(self) -> None:
        """Nothing is held."""


class InPlaceReader:
    """A model whose parameters lie in the memory that the trainer copies into."""

    def __init__(self, job: ForkedJob, words: Any) -> None:
        self.model = Model(job.tensors_of(torch.from_numpy(job.shared[0])))
        self._words = words

    def take(self, version: int) -> int:
        """Return the time at which at least this version was announced."""
        while self._words[VERSION] < version:
            os.sched_yield()
        return time.monotonic_ns()

    def close(self) -> None:
        """Nothing is held."""


def copied_by_hand(own: list[torch.Tensor], shared: list[torch.Tensor]) -> Callable[[], Any]:
    """One call of torch for all tensors."""
    return lambda: torch._foreach_copy_(shared, own)


def copied_by_torchrl(own: list[torch.Tensor], shared: list[torch.Tensor]) -> Callable[[], Any]:
    """TorchRL's transport over shared memory."""
    from tensordict import TensorDict
    from torchrl.weight_update import SharedMemTransport

    transport = SharedMemTransport()
    transport.register_weights({0: TensorDict({str(i): each for i, each in enumerate(shared)})}, {})
    mine = TensorDict({str(i): each for i, each in enumerate(own)})
    return lambda: transport.send_weights(mine)


SIDES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "fastps": (FastpsTrainer, lambda job, words: FastpsReader(job, words, waits=False)),
    "fastps, wait()": (FastpsTrainer, lambda job, words: FastpsReader(job, words, waits=True)),
    "in place": (lambda job, words: InPlaceTrainer(job, words, copied_by_hand), InPlaceReader),
    "torchrl": (lambda job, words: InPlaceTrainer(job, words, copied_by_torchrl), InPlaceReader),
}


class Member:
    """The trainer (0) or the reader (1) of a side; a command is a kind of rounds and their number."""

    def __init__(self, rank: int, job: ForkedJob, words: Any, side: Mapping[int, Callable[..., Any]]) -> None:
        torch.set_num_threads(1)
        self.rank, self._words, self._version = rank, words, 0
        self.part = side[rank](job, words)

    def __call__(self, order: tuple[str, int]) -> Any:
        """The trainer returns (ns from gradients, ns from the version's sight) of each round, the reader its mixed looks."""
        kind, rounds = order
        if kind == "open":
            return None
        if self.rank == 0:
            return self._train(rounds, is_free=kind == "free")
        return self._look(rounds, is_free=kind == "free")

    def _train(self, rounds: int, is_free: bool) -> list[tuple[int, int]]:
        taken: list[tuple[int, int]] = []
        deadline_s = time.monotonic() + _POLL_LIMIT_S
        while len(taken) < rounds or (is_free and self._words[SEEN] >= 0):
            began_ns = time.monotonic_ns()
            self.part.step()
            self._version += 1
            while not is_free and self._words[SEEN] < self._version and time.monotonic() < deadline_s:
                os.sched_yield()
            used_ns = int(self._words[USED_NS])
            taken.append((used_ns - began_ns, used_ns - int(self._words[SEEN_NS])))
            if time.monotonic() > deadline_s:
                break
        return taken

    def _look(self, rounds: int, is_free: bool) -> int:
        """Use each version: read its last weight. Free looks compare weights of all tensors, which are equal in one version."""
        mixed = 0
        weights = self.part.model.weights
        last = len(weights) - 1
        for _ in range(rounds):
            seen_ns = self.part.take(self._version + 1 - is_free)
            float(weights[last].detach()[-1])
            self._words[SEEN_NS], self._words[USED_NS] = seen_ns, time.monotonic_ns()
            self._version += 1 - is_free
            self._words[SEEN] = self._version
            if is_free:
                places = torch.stack([each.detach()[place] for each in weights for place in (0, len(each) // 2, -1)])
                mixed += bool(places.min() != places.max())
        if is_free:
            self._words[SEEN] = -1  # ends the trainer's rounds
        return mixed

    def close(self) -> None:
        """Close the part."""
        self.part.close()


def measure(options: BenchOptions) -> list[Row]:
    """Return a row for each size and side."""
    return [row for size in options.parameters for row in _rows(size, options)]


def _rows(size: int, options: BenchOptions) -> list[Row]:
    names = [name for name in SIDES if name != "torchrl"]
    missing = []
    if "torchrl" in options.against:
        if importlib.util.find_spec("torchrl") is None:
            missing = [_missing_row(size)]
        else:
            names.append("torchrl")
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    mixed = dict.fromkeys(names, 0)
    looks = 20 if options.smoke else FREE_LOOKS
    with tempfile.TemporaryDirectory(prefix="fastps-bench-") as folder, contextlib.ExitStack() as stack:
        crews = {name: stack.enter_context(_crew(number, name, size, folder)) for number, name in enumerate(names)}
        for crew in crews.values():
            crew.call(("open", 0))
        for _ in range(options.repeats):
            for name, crew in crews.items():
                rounds = 3 if options.smoke else max(10, min(1000, round(ROUNDS_S * 5e8 / size)))
                taken = crew.call(("round", rounds))[0]
                found[name].append([statistics.median(each[column] for each in taken) / 1e9 for column in (0, 1)])
        for name, crew in crews.items():
            mixed[name] = crew.call(("free", looks))[1]
    check(not mixed["fastps"], "no look of fastps' reader at two versions", mixed["fastps"])
    ours = [total for total, _ in found["fastps"]]
    return [_row(name, size, found[name], ours, mixed[name], looks) for name in names] + missing


def _crew(number: int, name: str, size: int, folder: str) -> ForkedCrew:
    words = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.int64)
    job = ForkedJob(f"side{number}", 1, size, folder, 0 if name.startswith("fastps") else 1)
    side = dict(enumerate(SIDES[name]))

    def begin(rank: int) -> Member:
        for variable in ("RANK", "WORLD_SIZE", "FASTPS_JOB"):
            os.environ.pop(variable, None)
        return Member(rank, job, words, side)

    return ForkedCrew(2, begin, paused=True)


def _row(name: str, size: int, found: list[list[float]], ours: list[float], mixed: int, looks: int) -> Row:
    totals = [total for total, _ in found]
    return {
        "bench": "weight transport",
        "name": name,
        "parameters": size,
        **Spread(tuple(totals)).row(),
        "seconds_from_sight": statistics.median(after for _, after in found),
        "ratio": statistics.median(total / own for total, own in zip(totals, ours, strict=True)),
        "mixed_looks": mixed,
        "looks": looks,
        "checked": True,
    }


def _missing_row(size: int) -> Row:
    reason = "the package torchrl is not installed"
    return {"bench": "weight transport", "name": "torchrl", "parameters": size, "missing": reason, "checked": False}
