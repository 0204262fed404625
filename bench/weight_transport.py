"""How soon a reader uses a new version: from gradients that are ready in the trainer until the reader has read a new weight.

fastps' reader is pointed at the version, of a wrapped optimizer or of a publisher. The others copy new weights in place into
tensors in shared memory, which the model of their reader shows: by hand, or with TorchRL's SharedMemTransport. A word in shared
memory tells their reader the version. TorchRL itself sends an instruction through a queue, so its whole scheme is no faster. In
place, nothing keeps a reader from a mixture of two versions: free rounds, in which the trainer does not wait for the reader,
count these looks. Under a lock, the reader copies once more, and sees no mixture.

What a publish costs is measured in one process, beside a plain copy of as many bytes.
"""

import contextlib
import fcntl
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
from fastps.torch.publisher import Publisher
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
    """One worker of fastps, whose step makes the version: `stepped_ns` is 0."""

    stepped_ns = 0

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


class PublishingTrainer:
    """A trainer with an optimizer of torch's, which publishes its weights after each step."""

    def __init__(self, job: ForkedJob, words: Any) -> None:
        self._tensors, self._optimizer = _trained(job)
        named = {f"weights.{number}": tensor for number, tensor in enumerate(self._tensors)}
        self._publisher = Publisher(named, f"{Path(job.folder).name}-{job.name}")

    def step(self) -> None:
        """Make the next version."""
        self._optimizer.step()
        self.stepped_ns = time.monotonic_ns()
        self._publisher.publish()

    def close(self) -> None:
        """End the job."""
        self._publisher.close()


def _trained(job: ForkedJob) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    """Weights of ones with their gradients, and an optimizer of them."""
    tensors = [tensor.clone().requires_grad_() for tensor in job.tensors_of(torch.ones(job.size))]
    for tensor in tensors:
        tensor.grad = torch.full_like(tensor, job.gradient(0))
    return tensors, peers.fused_sgd(tensors)


class InPlaceTrainer:
    """A trainer with weights of its own, and a copy into shared memory after each step; row 0 of the job's memory."""

    def __init__(self, job: ForkedJob, words: Any, copy: Callable[[list[torch.Tensor], list[torch.Tensor]], Callable[[], Any]]):
        job.shared[0] = 1.0
        self._words = words
        self._tensors, self._optimizer = _trained(job)
        self._copy = copy([tensor.detach() for tensor in self._tensors], job.tensors_of(torch.from_numpy(job.shared[0])))

    def step(self) -> None:
        """Make the next version, copy it, and tell it."""
        self._optimizer.step()
        self.stepped_ns = time.monotonic_ns()
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


class LockedTrainer(InPlaceTrainer):
    """The same, which copies while it holds a lock."""

    def __init__(self, job: ForkedJob, words: Any) -> None:
        super().__init__(job, words, copied_by_hand)
        self._lock = _Lock(job)

    def step(self) -> None:
        """Make the next version, copy it, and tell it."""
        self._optimizer.step()
        self.stepped_ns = time.monotonic_ns()
        with self._lock:
            self._copy()
            self._words[VERSION] += 1


class LockedReader(InPlaceReader):
    """A model with weights of its own, into which it copies while it holds the lock."""

    def __init__(self, job: ForkedJob, words: Any) -> None:
        super().__init__(job, words)
        shared = [each.detach() for each in self.model.weights]
        self.model = Model([each.clone() for each in shared])
        self._copy = copied_by_hand(shared, [each.detach() for each in self.model.weights])
        self._lock = _Lock(job)

    def take(self, version: int) -> int:
        """Copy at least this version, and return the time at which it was announced."""
        seen_ns = super().take(version)
        with self._lock:
            self._copy()
        return seen_ns


class _Lock:
    """A lock of two processes: of a file."""

    def __init__(self, job: ForkedJob) -> None:
        self._file = (Path(job.folder) / f"{job.name}.lock").open("w")

    def __enter__(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *exception: object) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)


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
    "publisher": (PublishingTrainer, lambda job, words: FastpsReader(job, words, waits=False)),
    "lock, two copies": (LockedTrainer, LockedReader),
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
        """The trainer returns the ns of each round, the reader its mixed looks.

        Until the use: from gradients, from the version's sight, and from the end of the optimizer's step.
        """
        kind, rounds = order
        if kind == "open":
            return None
        if self.rank == 0:
            return self._train(rounds, is_free=kind == "free")
        return self._look(rounds, is_free=kind == "free")

    def _train(self, rounds: int, is_free: bool) -> list[tuple[int, int, int]]:
        taken: list[tuple[int, int, int]] = []
        deadline_s = time.monotonic() + _POLL_LIMIT_S
        while len(taken) < rounds or (is_free and self._words[SEEN] >= 0):
            began_ns = time.monotonic_ns()
            self.part.step()
            self._version += 1
            while not is_free and self._words[SEEN] < self._version and time.monotonic() < deadline_s:
                os.sched_yield()
            used_ns = int(self._words[USED_NS])
            stepped_ns = self.part.stepped_ns or began_ns
            taken.append((used_ns - began_ns, used_ns - int(self._words[SEEN_NS]), used_ns - stepped_ns))
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
    """Return a row for each size and side, and two for each size of a publish beside a copy."""
    published = [row for size in options.parameters for row in _published(size, options)]
    return [row for size in options.parameters for row in _rows(size, options)] + published


def _published(size: int, options: BenchOptions) -> list[Row]:
    """A publish of six tensors, and a copy of as many bytes into one of two arrays by turns, in interleaved bursts."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    own = np.ones(size, np.float32)
    copies, calls = [np.empty_like(own) for _ in range(2)], 2 if options.smoke else max(3, min(1000, round(2e7 / size)))
    found: dict[str, list[float]] = {"publish": [], "copy": []}
    tensors = {f"w{number}": each for number, each in enumerate(torch.from_numpy(own.copy()).chunk(6))}
    with Publisher(tensors, f"bench-publish-{os.getpid()}") as publisher:
        for _ in range(options.repeats):
            for name in ("copy", "publish"):
                began_ns = time.perf_counter_ns()
                for call in range(calls):
                    if name == "publish":
                        publisher.publish()
                    else:
                        np.copyto(copies[call % 2], own)
                found[name].append((time.perf_counter_ns() - began_ns) / calls / 1e9)
        check(publisher.version == options.repeats * calls, "a version for each publish", publisher.version)
    torch.set_num_threads(threads)
    ratio = statistics.median(mine / plain for mine, plain in zip(found["publish"], found["copy"], strict=True))
    ratios = {"publish": ratio, "copy": 1.0}
    return [
        {
            "bench": "publish",
            "name": name,
            "parameters": size,
            **Spread(tuple(times)).row(),
            "ratio": ratios[name],
            "checked": True,
        }
        for name, times in found.items()
    ]


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
                found[name].append([statistics.median(each[column] for each in taken) / 1e9 for column in (0, 1, 2)])
        for name, crew in crews.items():
            mixed[name] = crew.call(("free", looks))[1]
    for name in ("fastps", "publisher", "lock, two copies"):
        check(not mixed[name], f"no look of the reader of {name} at two versions", mixed[name])
    ours = [total for total, *_ in found["fastps"]]
    return [_row(name, size, found[name], ours, mixed[name], looks) for name in names] + missing


def _crew(number: int, name: str, size: int, folder: str) -> ForkedCrew:
    words = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.int64)
    job = ForkedJob(f"side{number}", 1, size, folder, 0 if name.startswith(("fastps", "publisher")) else 1)
    side = dict(enumerate(SIDES[name]))

    def begin(rank: int) -> Member:
        for variable in ("RANK", "WORLD_SIZE", "FASTPS_JOB"):
            os.environ.pop(variable, None)
        return Member(rank, job, words, side)

    return ForkedCrew(2, begin, paused=True)


def _row(name: str, size: int, found: list[list[float]], ours: list[float], mixed: int, looks: int) -> Row:
    totals = [total for total, *_ in found]
    return {
        "bench": "weight transport",
        "name": name,
        "parameters": size,
        **Spread(tuple(totals)).row(),
        "seconds_from_sight": statistics.median(after for _, after, _ in found),
        "seconds_from_publish": statistics.median(after for *_, after in found),  # without the optimizer's step
        "ratio": statistics.median(total / own for total, own in zip(totals, ours, strict=True)),
        "mixed_looks": mixed,
        "looks": looks,
        "checked": True,
    }


def _missing_row(size: int) -> Row:
    reason = "the package torchrl is not installed"
    return {"bench": "weight transport", "name": "torchrl", "parameters": size, "missing": reason, "checked": False}
