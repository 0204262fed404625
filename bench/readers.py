"""What readers and evaluators cost a training, and how soon a reader uses a new version.

The training is a perceptron of the wanted size. Each round is compared with the rounds without readers before and after it.
Beside it are eight readers that wait for each version, that update without any pause, or that do so in the scheduling class
SCHED_IDLE; eight processes that only take processor time; one evaluator of that class, or four, which make a forward pass of
each newest version; and eight stopped readers. A machine with fewer cores than processes shares them: readers without a pause
take most of its time. Processes that are only busy tell how much of the slowdown that alone is, and idle ones what reading
costs if the training has precedence.
"""

import contextlib
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastps.bench import weight_transport
from fastps.bench.crew import ForkedCrew
from fastps.bench.measure import BenchOptions, Row, Spread, check
from fastps.bench.member import load_torch
from fastps.errors import TimeoutExceededError
from fastps.evaluation.loop import Evaluation
from fastps.evaluation.options import EvaluationOptions
from fastps.torch.optimizer import DistributedOptimizer
from fastps.torch.reader import reader

READERS, SMOKE_READERS = 8, 2
INPUTS, CLASSES, BATCH_SIZE = 256, 10, 16
LEARNING_RATE, MOMENTUM = 0.01, 0.5
CALM = "none"  # the rounds without readers, which every other kind is compared with
_EVALUATORS = {"1 evaluator, idle": 1, "4 evaluators, idle": 4}
KINDS = (CALM, "wait", "no pause", "only busy", "no pause, idle", *_EVALUATORS, "stopped")
_WORK = {"only busy": "_be_busy", **dict.fromkeys(_EVALUATORS, "_evaluate")}  # of Reading; the others read
PAUSE_S = 0.05  # after a change of the readers, before the next round is measured
_WAIT_S = 0.2  # how often a waiting reader looks whether it is to end


def network(parameters: int) -> nn.Module:
    """A perceptron of about so many parameters, with random weights, the same in every process."""
    torch.manual_seed(0)
    fixed = INPUTS + CLASSES + 3
    width = max(4, round((-fixed + (fixed**2 + 4 * parameters) ** 0.5) / 2))
    layers = [nn.Linear(INPUTS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)]
    return nn.Sequential(*layers)


class Trainer:
    """A worker of the training; a command is a number of steps."""

    def __init__(self, job: str, rank: int, workers: int, parameters: int) -> None:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workers))
        self.model = network(parameters)
        generator = torch.Generator().manual_seed(rank)
        self.inputs = torch.randn(BATCH_SIZE, INPUTS, generator=generator)
        self.labels = torch.randint(CLASSES, (BATCH_SIZE,), generator=generator)
        inner = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
        self.optimizer = DistributedOptimizer(inner, "bsp", model=self.model, job=job, rank=rank, workers=workers)

    def __call__(self, steps: int) -> tuple[int, int, int, int]:
        """Take steps after one that aligns the workers: begin and end in ns, processor time in ns, and the version."""
        self.step()
        began_ns, cpu_ns = time.monotonic_ns(), time.process_time_ns()
        for _ in range(steps):
            self.step()
        return began_ns, time.monotonic_ns(), time.process_time_ns() - cpu_ns, self.optimizer.version

    def step(self) -> None:
        """One step of training, on the same batch."""
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(self.inputs), self.labels).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def close(self) -> None:
        """Leave the job."""
        self.optimizer.close()


class Reading:
    """A process beside the training; a command ends what it does, and begins another of KINDS in a thread."""

    def __init__(self, job: str, rank: int, parameters: int) -> None:
        torch.set_num_threads(1)
        self._job, self._rank, self._model = job, rank, network(parameters)
        self._thread: threading.Thread | None = None
        self._is_over, self._has_begun = threading.Event(), threading.Event()
        self._updates = self._cpu_ns = 0

    def __call__(self, kind: str) -> tuple[int, int, int]:
        """Returns the process id, how often the kind before has updated the model, and its processor time in ns."""
        self.close()
        updates, cpu_ns = self._updates, self._cpu_ns
        self._updates = self._cpu_ns = 0
        self._is_over.clear()
        self._has_begun.clear()
        if kind != CALM and self._rank < _EVALUATORS.get(kind, READERS):
            self._thread = threading.Thread(target=getattr(self, _WORK.get(kind, "_read")), args=(kind,))
            self._thread.start()
            self._has_begun.wait(60)
        return os.getpid(), updates, cpu_ns

    def _be_busy(self, kind: str) -> None:
        self._has_begun.set()
        while not self._is_over.is_set():
            pass

    def _evaluate(self, kind: str) -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        inputs = torch.randn(BATCH_SIZE, INPUTS, generator=torch.Generator().manual_seed(0))

        def judge(model: Any) -> dict[str, Any]:
            return {"mean": model(inputs).mean()}

        began_ns = time.thread_time_ns()
        for _ in Evaluation(lambda: self._model, judge, self._job, EvaluationOptions(), end=self._is_over).rows():
            self._updates += 1
            self._has_begun.set()
        self._cpu_ns = time.thread_time_ns() - began_ns

    def _read(self, kind: str) -> None:
        if kind == "no pause, idle":
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # of this thread
        model = self._model
        with reader(self._job, timeout_s=30) as opened:
            opened.update(model)
            self._has_begun.set()
            began_ns = time.thread_time_ns()
            while not self._is_over.is_set():
                if kind == "stopped":
                    self._is_over.wait()
                elif kind != "wait" or self._waits(opened):
                    opened.update(model)
                    self._updates += 1
            self._cpu_ns = time.thread_time_ns() - began_ns

    def _waits(self, opened: Any) -> bool:
        """Wait for a version, in parts, so that the end of the round is seen."""
        with contextlib.suppress(TimeoutExceededError):
            return bool(opened.wait(timeout_s=_WAIT_S))
        return False

    def close(self) -> None:
        """End the thread."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None


class Beside:
    """The processes beside the training: all of one kind at a time."""

    def __init__(self, crew: ForkedCrew) -> None:
        self._crew = crew

    @contextlib.contextmanager
    def all_are(self, kind: str) -> Iterator[dict[str, int]]:
        """Let them be of this kind inside the block; the yielded dict has `updates` and `cpu_ns` of all after it."""
        found: dict[str, int] = {}
        process_ids = [process_id for process_id, *_ in self._crew.call(kind)]
        stopped = process_ids if kind == "stopped" else []
        for process_id in stopped:
            os.kill(process_id, signal.SIGSTOP)
        time.sleep(PAUSE_S)
        try:
            yield found
        finally:
            for process_id in stopped:
                os.kill(process_id, signal.SIGCONT)
        ended = self._crew.call(CALM)
        found["updates"], found["cpu_ns"] = sum(each[1] for each in ended), sum(each[2] for each in ended)


def measure(options: BenchOptions) -> list[Row]:
    """Return the rows of the training for the largest size, and those of a version's way to a reader for all sizes."""
    load_torch()
    trained = [row for workers in options.workers for row in _training(workers, max(options.parameters), options)]
    return trained + weight_transport.measure(options)


def _training(workers: int, parameters: int, options: BenchOptions) -> list[Row]:
    readers = SMOKE_READERS if options.smoke else READERS
    rounds_of: dict[str, list[Round]] = {kind: [] for kind in KINDS}
    ratios: dict[str, list[Round]] = {kind: [] for kind in KINDS}
    updates = dict.fromkeys(KINDS, 0)
    beside_cpu: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="fastps-bench-") as folder, contextlib.ExitStack() as stack:
        job = Path(folder).name
        crew = stack.enter_context(ForkedCrew(workers, lambda rank: Trainer(job, rank, workers, parameters)))
        beside = Beside(stack.enter_context(ForkedCrew(readers, lambda rank: Reading(job, rank, parameters))))
        rounds = Rounds(crew, options.train_repeat_s)
        before = rounds.run()
        for kind in KINDS[1:] * options.repeats:
            with beside.all_are(kind) as found:
                rounds_of[kind].append(rounds.run())
            updates[kind] += found["updates"]
            beside_cpu[kind].append(found["cpu_ns"] / 1e9 / rounds.versions_of_a_round)
            after = rounds.run()
            rounds_of[CALM].append(after)
            ratios[CALM].append(after.over(before, before))
            ratios[kind].append(rounds_of[kind][-1].over(before, after))
            before = after
    check(updates["no pause"] > 0 and updates["wait"] > 0, "readers that update", updates)
    facts = {"workers": workers, "parameters": parameters}
    return [
        _row(kind, rounds_of[kind], ratios[kind], updates[kind], readers)
        | facts
        | {"readers_cpu_seconds": statistics.median(beside_cpu[kind]) if updates[kind] else None}
        for kind in KINDS
    ]


@dataclass(frozen=True)
class Round:
    """The time of a step, from begin to end and of all workers' processors: in seconds, or as a ratio of two rounds."""

    wall: float
    cpu: float

    def over(self, one: "Round", other: "Round") -> "Round":
        """This round over the mean of two."""
        return Round(2 * self.wall / (one.wall + other.wall), 2 * self.cpu / (one.cpu + other.cpu))


class Rounds:
    """The training's rounds, each of as many steps as fit in a time; the version shows that they were made."""

    def __init__(self, crew: ForkedCrew, round_s: float) -> None:
        self._crew, self._versions, self._steps = crew, 0, 1
        for _ in range(3):
            self._steps = max(2, round(round_s / self.run().wall))

    @property
    def versions_of_a_round(self) -> int:
        """The steps of a round, and the one before them that aligns the workers."""
        return self._steps + 1

    def run(self) -> Round:
        """Make a round and return the times of a step."""
        spans = self._crew.call(self._steps)
        self._versions += self._steps + 1
        check(spans[0][3] == self._versions, f"version {self._versions}", spans[0][3])
        wall_ns = max(span[1] for span in spans) - min(span[0] for span in spans)
        return Round(wall_ns / 1e9 / self._steps, sum(span[2] for span in spans) / 1e9 / self._steps)


def _row(kind: str, rounds: list[Round], ratios: list[Round], updates: int, readers: int) -> Row:
    walls = [ratio.wall for ratio in ratios]
    return {
        "bench": "readers",
        "name": kind,
        "readers": 0 if kind == CALM else min(readers, _EVALUATORS.get(kind, readers)),
        "updates": updates,
        **Spread(tuple(each.wall for each in rounds)).row(),
        "ratio": statistics.median(walls),
        "ratio_min": min(walls),
        "ratio_max": max(walls),
        "cpu_seconds_median": statistics.median(each.cpu for each in rounds),
        "cpu_ratio": statistics.median(ratio.cpu for ratio in ratios),
        "checked": True,
    }
