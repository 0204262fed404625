"""The main job: one worker's training loop on real images.

The launcher runs it as `python -m fastps.lab.demo.worker_main OPTIONS.json`. The worker writes its measurements to a file
beside the options.
"""

import copy
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from fastps.checkpoint.loading import load
from fastps.errors import Error, UsageError
from fastps.job.environment import rank
from fastps.job.policy import Policy
from fastps.job.specs import parse_policy
from fastps.lab.demo.data import Dataset, open_saved
from fastps.lab.demo.delays import Delays, delay
from fastps.lab.demo.metrics import Row
from fastps.lab.demo.models import accuracy, inputs_of, model_for
from fastps.lab.demo.options import TrainingOptions, extra_wait_ns
from fastps.lab.demo.prefetch import prefetch
from fastps.store.worker import Worker
from fastps.system.clock import SYSTEM_CLOCK
from fastps.torch.optimizer import DistributedOptimizer

_FIGURES = ("rank", "steps", "samples", "wait_ns", "compute_ns", "folded", "dropped", "staleness_sum", "staleness_max")


class Batches:
    """Batches in an order common to all workers, new in every pass; no sample is drawn twice in a pass.

    With `draw`, a counter common to all workers, each batch is the next of that order, so other workers draw a lost worker's
    samples. Without it each worker has a fixed share, from `begun` samples on, independent of the workers' speeds: schemes that
    keep all workers level need this.
    """

    def __init__(
        self, data: Dataset, options: TrainingOptions, rank: int, begun: int = 0, draw: Callable[[int], int] | None = None
    ) -> None:
        self._data = data
        self._options = options
        self._rank = rank
        self._next = begun
        self._draw = draw
        self._orders: dict[int, torch.Tensor] = {}

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield self.next()

    def next(self, tuned: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next batch, of `tuned` samples unless that is 0; a new pass follows the end of the last."""
        size = tuned or self._options.batch_size
        first = self._next if self._draw is None else self._draw(size)
        self._next += size
        chosen, position = [], first
        while position < first + size:
            order = self._order(position)
            begin = position % len(order)
            chosen.append(order[begin : begin + first + size - position])
            position += len(chosen[-1])
        index = torch.cat(chosen).numpy()
        return inputs_of(self._data, self._data.train_images[index]), torch.from_numpy(self._data.train_labels[index])

    def _order(self, position: int) -> torch.Tensor:
        """Return the pass of a sample's position: all of it, or this worker's share."""
        samples = len(self._data.train_labels)
        rank, workers = (0, 1) if self._draw is not None else (self._rank % self._options.workers, self._options.workers)
        number = position // len(range(rank, samples, workers))
        if number not in self._orders:
            generator = torch.Generator().manual_seed(1_000_003 * self._options.seed + number)
            self._orders = {number: torch.randperm(samples, generator=generator)[rank::workers]}
        return self._orders[number]


class TrainingRun:
    """One worker's run: steps until all workers together have drawn the budget of samples."""

    def __init__(self, options: TrainingOptions, data: Dataset, rank: int) -> None:
        self._options = options
        self._rank = rank
        self._clock = SYSTEM_CLOCK
        self._policy: Policy = parse_policy(options.sync)
        self._data = data
        self._budget = options.epochs * len(data.train_labels)
        resume = os.environ.get("FASTPS_RESUME")
        self._drawn_before = load(resume).drawn if resume else 0
        torch.manual_seed(options.seed)
        self._model = model_for(data)
        # Weights at the end of each epoch; worker 0 keeps them and evaluates them after the timed part.
        self._snapshots: list[tuple[float, dict[str, torch.Tensor]]] = []

    def run(self) -> Row:
        """Train and return the measurements; worker 0 also evaluates the weights of each epoch and the final ones.

        Times are in ns of the machine's monotonic clock; "sync" is the discipline at the end.
        """
        options = self._options
        if options.straggler:
            torch.set_num_threads(1)  # so that a step's processor time is this thread's
        inner = torch.optim.SGD(self._model.parameters(), lr=options.learning_rate, momentum=options.momentum)
        seeds = {"seed": options.seed}
        push_dtype = getattr(torch, options.push_dtype)
        with DistributedOptimizer(inner, sync=self._policy, model=self._model, seeds=seeds, push_dtype=push_dtype) as optimizer:
            batches = self._batches(optimizer.worker)
            if options.warm_start and not optimizer.worker.generation:
                load_weights(self._model, Path(options.warm_start))
            if options.transfer_ms or options.pull_delay_share:
                late = options.pull_delay_share, options.pull_delay_s
                delay(optimizer.worker, Delays(options.transfer_ms, *late, options.seed))
            optimizer.wait_for_start()
            began_ns = self._clock.now_ns()
            self._steps(optimizer, batches, began_ns)
            ended_ns = self._clock.now_ns()
            final = math.nan
            if self._rank == 0:
                optimizer.wait_for_others()
                with optimizer.averaged_weights():
                    final = self._judge(self._model.state_dict())
                    if options.weights_file:
                        save_weights(self._model, Path(options.weights_file))
            row = optimizer.statistics()[self._rank]
            histograms, sync = optimizer.histograms(), optimizer.policy.spec
        curve = [(seconds, self._judge(weights)) for seconds, weights in self._snapshots]
        return {
            **{name: getattr(row, name) for name in (*_FIGURES, "stale_blocks")},
            "began_ns": began_ns,
            "ended_ns": ended_ns,
            "accuracy_over_time": curve,
            "final_accuracy": final,
            "histograms": histograms,
            "sync": sync,
        }

    def _steps(self, optimizer: DistributedOptimizer, batches: Batches, began_ns: int) -> None:
        """Step until the budget is drawn. Read batches ahead, unless grants decide their size."""
        with prefetch(() if self._policy.tune else batches) as ahead:
            while self._drawn(optimizer) < self._budget:
                tuned = optimizer.worker.batch_size
                self._step(optimizer, *(batches.next(tuned) if self._policy.tune else next(ahead)))
                if self._rank == 0:
                    self._keep_snapshot(optimizer, began_ns)

    def _batches(self, worker: Worker) -> Batches:
        """Return fixed shares for schemes that keep all workers level, else batches drawn from one order."""
        if self._policy.is_level and not self._policy.tune:
            return Batches(self._data, self._options, self._rank, worker.steps * self._options.batch_size)
        return Batches(self._data, self._options, self._rank, draw=worker.store.arena.draw)

    def _step(self, optimizer: DistributedOptimizer, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        cpu_ns = self._clock.thread_cpu_ns()
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self._model(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self._clock.sleep_ns(extra_wait_ns(self._options, self._rank, self._clock.thread_cpu_ns() - cpu_ns))
        optimizer.report_loss(float(loss.detach()), len(labels))
        optimizer.step()

    def _drawn(self, optimizer: DistributedOptimizer) -> int:
        """Return the samples drawn by all workers together."""
        if optimizer.policy.is_level and not optimizer.policy.warm_up:
            # All workers are at the same step, also after a resume or a join.
            steps = optimizer.worker.earlier_steps + optimizer.worker.steps
            return steps * self._options.batch_size * self._options.workers
        return self._drawn_before + sum(row.samples for row in optimizer.statistics())

    def _keep_snapshot(self, optimizer: DistributedOptimizer, began_ns: int) -> None:
        epochs = self._drawn(optimizer) * self._options.epochs // self._budget
        if epochs > len(self._snapshots):
            seconds = (self._clock.now_ns() - began_ns) / 1e9
            self._snapshots.append((seconds, copy.deepcopy(self._model.state_dict())))

    def _judge(self, weights: dict[str, torch.Tensor]) -> float:
        judge = copy.deepcopy(self._model)
        judge.load_state_dict(weights)
        return accuracy(judge, self._data)


def save_weights(model: torch.nn.Module, file: Path) -> None:
    """Write a model's weights as arrays (.npz), without pickle."""
    with file.open("wb") as stream:
        np.savez(stream, **{name: value.numpy() for name, value in model.state_dict().items()})


def load_weights(model: torch.nn.Module, file: Path) -> None:
    """Load the weights of `save_weights`. Raises UsageError for another model's file."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            model.load_state_dict({name: torch.from_numpy(arrays[name]) for name in arrays.files})
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"--warm-start {file}: expected the weights of this model, found others ({error})") from None


def main(options_file: str) -> None:
    """Run this process's worker with the options and the data set beside them; write the result there, too."""
    path = Path(options_file)
    worker = rank()
    result = TrainingRun(TrainingOptions.read(path), open_saved(path.parent), worker).run()
    path.with_name(f"worker-{worker}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except Error as error:
        sys.exit(f"fastps: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
