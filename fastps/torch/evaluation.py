"""Counters of a wrapped optimizer, and other weights and buffers for an evaluation between steps.

Other workers see none of it, except the buffers that `average_buffers` publishes.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from fastps.job.policy import Policy
from fastps.membership.job_memory import JobMemory
from fastps.store.observer import WorkerStatistics, statistics_of
from fastps.store.worker import Worker
from fastps.torch import state
from fastps.torch.model_buffers import BufferRounds
from fastps.torch.placements import HostPlacement
from fastps.torch.weights import Weights, shown

if TYPE_CHECKING:
    from fastps.kernels.shm.arena import Histograms


class Evaluation:
    """The part of a DistributedOptimizer that reports statistics and serves evaluations."""

    _worker: Worker
    _store: JobMemory
    _tensors: list[Any]
    _rounds: BufferRounds
    _placement: HostPlacement
    _earlier_versions: int
    _weights: Weights

    def _tensor_views(self, views: list[Any]) -> list[torch.Tensor]:
        """Tensors over flat views of the arena, one per parameter."""
        raise NotImplementedError

    def _take_weights(self) -> None:
        """Update every parameter to the newest version."""
        raise NotImplementedError

    def _refuse_write(self, changed: int) -> None:
        """Raise ParameterChangedError for a write outside of step()."""
        raise NotImplementedError

    @property
    def version(self) -> int:
        """The number of updates that all workers together have made so far."""
        return self._earlier_versions + self._store.version

    @property
    def policy(self) -> Policy:
        """The discipline in force; with sync="auto" it can change after the warm-up."""
        return self._store.layout.policy

    @property
    def placement(self) -> str:
        """Where the job's shards are: "host", "staged" (shards in host memory, model on a GPU) or "device"."""
        return self._placement.name

    @property
    def worker(self) -> Worker:
        """The attached Worker of this optimizer; with sync="auto" it can change after the warm-up."""
        return self._worker

    def statistics(self) -> list[WorkerStatistics]:
        """Current statistics, one row per worker: steps, waiting, staleness and others."""
        return statistics_of(self._store.arena)

    def histograms(self) -> "list[Histograms]":
        """Each shard's histograms: gaps between updates, staleness, arrivals within a version."""
        return [self._store.arena.histograms(shard) for shard in range(self._store.arena.shards)]

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Show the moving average of the weights as the parameters inside the block; without `ema` they stay unchanged.

        theta_bar of Chen et al. 2017, section 1.1: "we will often evaluate performance on" it.
        """
        if not self._store.layout.policy.ema:
            yield
            return
        with shown(self._tensors, state.averages(self._worker, self._tensor_views)):
            yield

    def average_buffers(self) -> None:
        """Set this model's buffers to the average over all workers, for evaluation. A collective call.

        Every live worker must call it equally often; it waits until all have. A worker that left in good order counts with the
        buffers that it left with. Means are averaged, variances are averaged by their moments, and counters take the maximum.
        Raises TimeoutExceededError naming the workers that have not called it, WorkerDiedError, UsageError without `model=`.
        """
        self._rounds.average()

    def take_newest(self) -> None:
        """Take the newest weights now, not only with the next step: for an evaluation that the workers begin together.

        Raises ParameterChangedError for weights that were written to outside of step(), UsageError after close.
        """
        self._worker.check_open()
        if (changed := self._weights.changed()) >= 0:
            self._refuse_write(changed)
        self._worker.try_combine()
        lane, arena = self._worker.lane, self._store.arena
        if any(lane.shard_version(shard) != arena.shard_version(shard) for shard in range(arena.shards)):
            self._take_weights()

    @contextlib.contextmanager
    def private_weights(self) -> Iterator[None]:
        """Show copies of the present weights as the parameters inside the block, which may write into them.

        Libraries that exchange weights in place for an evaluation (averages) then change no other worker's. The block's writes
        are gone after it.

        >>> import fastps
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)) as optimizer:
        ...     before = model.weight.item()
        ...     with optimizer.private_weights(), torch.no_grad():
        ...         _ = model.weight.fill_(7.0)
        ...     model.weight.item() == before
        True
        """
        if (changed := self._weights.changed()) >= 0:
            self._refuse_write(changed)
        try:
            with self.shown_weights([tensor.detach().clone(memory_format=torch.preserve_format) for tensor in self._tensors]):
                yield
        finally:
            self._weights.remember()

    @contextlib.contextmanager
    def shown_weights(self, values: Iterable[torch.Tensor]) -> Iterator[None]:
        """Show these tensors as the parameters inside the block, one each in the order of the param_groups.

        Use it to evaluate other weights, such as the best so far or an average: writing them into the parameters would change
        the memory that other workers read. To change the job's weights, use `DistributedOptimizer.replace_weights`.
        """
        with shown(self._tensors, list(values)):
            yield
