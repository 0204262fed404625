"""Real gradients in virtual time: the training that a simulation describes, with its accuracy over virtual time.

A simulation's trace names the version of each shard that a worker read, and the pushes that each update folded. This module
replays the trace with weights: torch computes each gradient with the versions that the worker had read, and each update is the
store's compiled fold with the policy's scales. A version is freed after its last read.

Two things differ from a live run: shards are equal parts of the weights, as in the simulation, not cut at parameters; and times
come from the simulation, not from a device.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from math import sqrt
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastps.errors import UsageError
from fastps.job.policy import Policy
from fastps.job.update_rules import Hyper
from fastps.kernels.update import fold as folding
from fastps.lab.demo.data import Dataset
from fastps.lab.demo.models import accuracy, model_for
from fastps.lab.demo.options import LEARNING_RATE, TrainingOptions
from fastps.lab.demo.worker_main import Batches
from fastps.simulation.simulate import TRACE_KINDS, Outcome, Row, Simulation, simulate

Floats = npt.NDArray[np.float32]

GOAL_ITERATIONS = 10
_BEGIN, _COMPUTED, _RECEIVE, _FOLD, _DROP = range(5)
_PULL = TRACE_KINDS.index("pull")


@dataclass(frozen=True, kw_only=True)
class VirtualTraining:
    """The training that accompanies a simulation; batch, workers and seed are the simulation's.

    Attributes:
        data: the images; the model is fastps.lab.demo.models.model_for's.
        learning_rate, momentum, weight_decay: of SGD.
        falls_at: shares of the run's pushes after which the learning rate is multiplied by falls_by.
        goal: a loss, reached once a worker's batches stay below it in 10 consecutive iterations (convergence in R2SP, section
            VI.A); None: no goal.
        looks: number of evaluations on the test images, evenly spaced in virtual time; the last one is at the end.
    """

    data: Dataset
    learning_rate: float = LEARNING_RATE
    momentum: float = 0.5
    weight_decay: float = 0.0
    falls_at: tuple[float, ...] = field(default=())
    falls_by: float = 0.1
    goal: float | None = None
    looks: int = 20

    def __post_init__(self) -> None:
        if not self.learning_rate > 0:
            raise UsageError(f"--lr: expected more than 0, found {self.learning_rate}")
        if not 0 <= self.momentum < 1:
            raise UsageError(f"--momentum: expected 0 to less than 1, found {self.momentum}")
        if self.looks < 1:
            raise UsageError(f"expected at least 1 look at the test images, found {self.looks}")


def train_virtually(
    policy: Policy,
    simulation: Simulation,
    training: VirtualTraining,
    *,
    tick: Callable[[int, int], None] | None = None,
) -> Outcome:
    """Simulate, then train along the trace; the row also has `test_accuracy`, `accuracy_over_time`, `train_loss`, `goal_s`.

    `accuracy_over_time` is a list of (virtual seconds, test accuracy), under ema= of the moving average; `train_loss` is the
    mean loss of the last tenth of the gradients; `goal_s` is the virtual time of the goal in seconds, None if it was not
    reached. `tick(done, of)` is called from time to time, in records of the trace.

    Raises UsageError, and what fastps.simulation.simulate.simulate raises.

    >>> from fastps import SSP
    >>> from fastps.lab.demo.data import load
    >>> training = VirtualTraining(data=load("digits"), learning_rate=0.02)
    >>> row = train_virtually(SSP(3), Simulation(workers=8, steps=40, batch=16), training).row
    >>> row["test_accuracy"] > 0.8, len(row["accuracy_over_time"])
    (True, 20)
    """
    if simulation.late_pushes[0]:
        raise UsageError("gradients are known by the order of their pushes: expected none that come late, found --late-push")
    outcome = simulate(policy, simulation, trace=True)
    assert outcome.trace is not None
    replay = _Replay(policy, simulation, training, outcome.trace)
    curve, loss = replay.run(tick)
    row: Row = {
        **outcome.row,
        "test_accuracy": curve[-1][1],
        "accuracy_over_time": curve,
        "train_loss": loss,
        "goal_s": None if replay.goal_ns is None else replay.goal_ns / 1e9,
    }
    return Outcome(row, outcome.trace)


class _Model:
    """A torch model whose weights and gradients are one vector each: float32[n]."""

    def __init__(self, data: Dataset, seed: int) -> None:
        torch.manual_seed(seed)
        self._data = data
        self.module = model_for(data)
        parameters = list(self.module.parameters())
        self._weights = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        self._gradient = torch.zeros_like(self._weights)
        first = 0
        for parameter in parameters:
            last = first + parameter.numel()
            parameter.data = self._weights[first:last].view_as(parameter)
            parameter.grad = self._gradient[first:last].view_as(parameter)
            first = last

    @property
    def weights(self) -> Floats:
        """Return a copy of the weights."""
        found: Floats = self._weights.numpy().copy()
        return found

    def load(self, parts: list[Floats]) -> None:
        """Set the weights from all shards, in order."""
        np.concatenate(parts, out=self._weights.numpy())

    def gradient(self, inputs: torch.Tensor, labels: torch.Tensor) -> tuple[Floats, float]:
        """Return the gradient of a batch's mean loss, and the loss."""
        self._gradient.zero_()
        loss = torch.nn.functional.cross_entropy(self.module(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        found: Floats = self._gradient.numpy().copy()
        return found, float(loss.detach())

    def accuracy(self) -> float:
        """Return the fraction of correctly classified test images."""
        return accuracy(self.module, self._data)


@dataclass
class _Pushed:
    """A push in flight: its gradient, and the scales of its parts."""

    gradient: Floats
    scale: float
    samples: int
    first_samples: int


class _Shard:
    """A range of the weights: its version, the versions still to be read, and the received pushes."""

    def __init__(self, weights: Floats, reads: Counter[int], training: VirtualTraining, policy: Policy) -> None:
        self.weights = self.average = weights
        self.version = 0
        self._reads = reads
        self._kept: dict[int, Floats] = {0: weights}
        self._state = np.zeros((1 if training.momentum and policy.momentum == "fold" else 0, len(weights)), np.float32)
        self._steps = np.zeros(1, np.int64)
        self._training = training
        self._policy = policy
        self.received: dict[int, deque[_Pushed]] = {}

    def read(self, version: int) -> Floats:
        """Return the weights of a version and count one read."""
        self._reads[version] -= 1
        found = self._kept[version]
        if self._reads[version] <= 0 and version != self.version:
            del self._kept[version]
        return found

    def fold(self, pushes: list[tuple[_Pushed, int]], part: slice, learning_rate: float) -> None:
        """Fold one update of (push, staleness) pairs, scaled as in the live store."""
        momentum = self._training.momentum if self._policy.momentum == "fold" else 0.0
        hyper = Hyper(learning_rate, momentum, 0.0, self._training.weight_decay)
        ordered = []
        for pushed, staleness in pushes:
            scale, rate_scale = pushed.scale, 1.0
            if self._policy.scale == "staleness" and staleness > 1:
                scale /= staleness  # Rudra, footnote 3
            elif self._policy.scale == "batch" and self._policy.is_mean:
                scale *= pushed.samples
            elif self._policy.scale == "batch":
                rate_scale = pushed.samples / pushed.first_samples  # R2SP, Algorithm 1, worker, line 5
            ordered.append((pushed.gradient[part], [hyper], [True], scale, rate_scale))
        weights, self._state, self._steps = folding.fold(
            folding.RULE_SGD,
            folding.FOLD_SUM if self._policy.is_sum else folding.FOLD_EACH,
            [(0, len(self.weights), 0)],
            ordered,
            self.weights,
            self._state,
            self._steps,
            scale=1.0 / self._divisor([pushed for pushed, _ in pushes]),
            rate_scale=self._rate_scale([pushed for pushed, _ in pushes]),
        )
        if self._reads[self.version] <= 0:
            self._kept.pop(self.version, None)
        self.version += 1
        self.weights = self._kept[self.version] = weights
        decay = np.float32(self._policy.ema)
        self.average = decay * self.average + (1 - decay) * weights if decay else weights

    def _divisor(self, pushes: list[_Pushed]) -> int:
        if not self._policy.is_mean:
            return 1
        return sum(pushed.samples for pushed in pushes) if self._policy.scale == "batch" else len(pushes)

    def _rate_scale(self, pushes: list[_Pushed]) -> float:
        if self._policy.scale == "linear":
            return len(pushes)  # PSP-SGD, Algorithm 1, line 13
        if self._policy.scale == "square-root":
            return sqrt(sum(pushed.samples for pushed in pushes) / self._policy.reference)  # Rudra, section 3.2
        return 1.0 / self._policy.divisor if self._policy.scale == "divisor" else 1.0  # Rudra, equation 6


class _Replay:
    """Replays a trace with weights and gradients."""

    def __init__(self, policy: Policy, simulation: Simulation, training: VirtualTraining, trace: npt.NDArray[np.void]) -> None:
        self._policy, self._training, self._trace = policy, training, trace
        self._model = _Model(training.data, simulation.seed)
        weights = self._model.weights
        bounds = np.linspace(0, len(weights), policy.shards + 1).astype(int)
        self._parts = [slice(int(first), int(last)) for first, last in pairwise(bounds)]
        reads = _reads(trace, policy)
        self._shards = [_Shard(weights[part].copy(), reads[shard], training, policy) for shard, part in enumerate(self._parts)]
        options = TrainingOptions(workers=simulation.workers, batch_size=simulation.batch, seed=simulation.seed)
        self._batches = [Batches(training.data, options, worker) for worker in range(simulation.workers)]
        self._views = [[shard.weights for shard in self._shards] for _ in range(simulation.workers)]
        self._made: list[deque[_Pushed]] = [deque() for _ in range(simulation.workers)]
        self._taken = [[0] * policy.shards for _ in range(simulation.workers)]  # by worker and shard: received pushes of `made`
        self._forgotten = [0] * simulation.workers  # by worker: pushes removed from the front of `made`
        self._first_samples = [0] * simulation.workers
        self._momentum: dict[int, Floats] = {}  # of each worker, under momentum=worker
        self._losses: list[float] = []
        self._loss_of = [float("inf")] * simulation.workers
        self._below_goal = [0] * simulation.workers  # consecutive iterations
        self.goal_ns: int | None = None
        self._last = simulation.steps if simulation.leave else -1
        self._done = 0
        self._of = max(1, simulation.workers * simulation.steps)

    def run(self, tick: Callable[[int, int], None] | None) -> tuple[list[tuple[float, float]], float]:
        """Return the accuracy over virtual time, and the mean loss of the last tenth of the gradients."""
        curve: list[tuple[float, float]] = []
        ended_ns = int(self._trace["time_ns"][self._trace["kind"] == _RECEIVE][-1])
        looks = [ended_ns * (index + 1) // self._training.looks for index in range(self._training.looks)]
        for number, (update, line) in enumerate(_updates(self._trace)):
            while len(curve) < len(looks) - 1 and line["time_ns"] > looks[len(curve)]:
                curve.append((looks[len(curve)] / 1e9, self._judge()))
            if update:
                self._fold(update)
            else:
                self._play(line)
            if tick is not None and number % 256 == 0:
                tick(self._done, self._of)
        curve.append((ended_ns / 1e9, self._judge()))
        last = self._losses[-max(1, len(self._losses) // 10) :]
        return curve, sum(last) / len(last)

    def _play(self, line: dict[str, int]) -> None:
        worker, shard = line["worker"], line["shard"]
        if line["kind"] == _BEGIN:
            self._begin(worker, line)
        elif line["kind"] == _COMPUTED:
            self._look_for_goal(worker, line["time_ns"])
        elif line["kind"] == _PULL:
            self._views[worker][shard] = self._shards[shard].read(line["version"])
        elif line["kind"] == _RECEIVE:
            number = self._taken[worker][shard]
            pushed = self._made[worker][number - self._forgotten[worker]]
            self._taken[worker][shard] += 1
            self._shards[shard].received.setdefault(worker, deque()).append(pushed)
            self._done += shard == 0
            self._forget(worker)
        elif line["kind"] == _DROP:
            # The dropped push is the latest one; an older push of the worker may be in the sum.
            self._shards[shard].received[worker].pop()

    def _begin(self, worker: int, line: dict[str, int]) -> None:
        """Begin a step: compute its gradient now, because it depends only on the weights read at the start."""
        if self._forgotten[worker] + len(self._made[worker]) == self._last:
            return  # the worker leaves
        if self._policy.overlap:
            self._views[worker][0] = self._shards[0].read(line["version"])
        self._model.load(self._views[worker])
        gradient, loss = self._model.gradient(*self._batches[worker].next(line["detail"]))
        scale = 1.0
        if self._policy.clip:
            scale = min(1.0, self._policy.clip / (float(np.linalg.norm(gradient)) + 1e-6))
        if self._policy.momentum == "worker" and (mu := np.float32(self._training.momentum)):
            gradient, scale = gradient * np.float32(scale), 1.0
            self._momentum[worker] = own = mu * self._momentum.get(worker, np.float32(0)) + gradient
            gradient += mu * own
        self._first_samples[worker] = self._first_samples[worker] or line["detail"]
        self._made[worker].append(_Pushed(gradient, scale, line["detail"], self._first_samples[worker]))
        self._losses.append(loss)
        self._loss_of[worker] = loss

    def _look_for_goal(self, worker: int, now_ns: int) -> None:
        if self._training.goal is None or self.goal_ns is not None:
            return
        self._below_goal[worker] = self._below_goal[worker] + 1 if self._loss_of[worker] < self._training.goal else 0
        if self._below_goal[worker] == GOAL_ITERATIONS:
            self.goal_ns = now_ns

    def _forget(self, worker: int) -> None:
        """Free the gradients that all shards have received."""
        while self._forgotten[worker] < min(self._taken[worker]):
            self._made[worker].popleft()
            self._forgotten[worker] += 1

    def _fold(self, update: list[dict[str, int]]) -> None:
        """Fold the pushes of one update in worker order, as a live sum does."""
        shard = self._shards[update[0]["shard"]]
        pushes = [
            (shard.received[line["worker"]].popleft(), line["detail"])
            for line in sorted(update, key=lambda line: line["worker"])
        ]
        falls = sum(self._done >= share * self._of for share in self._training.falls_at)
        shard.fold(pushes, self._parts[update[0]["shard"]], self._training.learning_rate * self._training.falls_by**falls)

    def _judge(self) -> float:
        self._model.load([shard.average for shard in self._shards])
        return self._model.accuracy()


def _reads(trace: npt.NDArray[np.void], policy: Policy) -> list[Counter[int]]:
    """Count the reads of each version of each shard."""
    counts: list[Counter[int]] = [Counter() for _ in range(policy.shards)]
    lines = trace[trace["kind"] == (_BEGIN if policy.overlap else _PULL)]
    for shard in range(policy.shards):
        chosen = lines if policy.overlap else lines[lines["shard"] == shard]
        counts[shard].update(chosen["version"].tolist())
    return counts


def _updates(trace: npt.NDArray[np.void]) -> Iterator[tuple[list[dict[str, int]], dict[str, int]]]:
    """Group the trace's records by update: (records of a fold, or none; the record, or the first of them)."""
    names = trace.dtype.names
    assert names is not None
    update: list[dict[str, int]] = []
    for values in trace.tolist():
        line: dict[str, Any] = dict(zip(names, values, strict=True))
        is_fold = line["kind"] == _FOLD
        if update and not (is_fold and _base(line) == _base(update[0])):
            yield update, update[0]
            update = []
        if is_fold:
            update.append(line)
        else:
            yield [], line
    if update:
        yield update, update[0]


def _base(line: dict[str, int]) -> tuple[int, int]:
    """Return a fold record's shard, and the shard's version before that update."""
    return line["shard"], line["version"] + line["detail"]
