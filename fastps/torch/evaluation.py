"""What a wrapped optimizer shows between steps: counters, and other weights and buffers for an evaluation.

Refuses to change anything that other workers see, but for what `average_buffers` publishes.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from fastps.job.policy import Policy
from fastps.membership.job_memory import JobMemory
from fastps.store.observer import WorkerStatistics, statistics_of
from fastps.store.worker import Worker
from fastps.torch import state as torch_state
from fastps.torch.model_buffers import BufferRounds
from fastps.torch.placements import HostPlacement
from fastps.torch.weights import shown

if TYPE_CHECKING:
    from fastps.kernels.shm.arena import Histograms


class Evaluation:
    """The part of a DistributedOptimizer that is for looking and evaluating."""

    _worker: Worker
    _store: JobMemory
    _tensors: list[Any]
    _rounds: BufferRounds
    _placement: HostPlacement
    _earlier_versions: int

    def _tensor_views(self, views: list[Any]) -> list[torch.Tensor]:
        """Tensors over flat views of the arena, one a parameter."""
        raise NotImplementedError

    @property
    def version(self) -> int:
        """Updates that all workers together have made so far."""
        return self._earlier_versions + self._store.version

    @property
    def policy(self) -> Policy:
        """The discipline that is in force; with sync="auto" another after the warm-up."""
        return self._store.layout.policy

    @property
    def placement(self) -> str:
        """Where the job's shards lie for this model: "host", "staged" (host memory, a model on a GPU) or "device"."""
        return self._placement.name

    @property
    def worker(self) -> Worker:
        """The attached worker beneath; with sync="auto" another after the warm-up."""
        return self._worker

    def statistics(self) -> list[WorkerStatistics]:
        """One row a worker: steps, waiting, staleness and the rest, as they stand now."""
        return statistics_of(self._store.arena)

    def histograms(self) -> "list[Histograms]":
        """What each shard has counted: gaps between updates, staleness, arrivals within a version."""
        return [self._store.arena.histograms(shard) for shard in range(self._store.arena.shards)]

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Inside, the parameters are the moving average of the weights, for evaluation; without `ema` they stay as they are.

        theta_bar of Chen et al. 2017, section 1.1: "we will often evaluate performance on" it.
        """
        if not self._store.layout.policy.ema:
            yield
            return
        with shown(self._tensors, torch_state.averages(self._worker, self._tensor_views)):
            yield

    def average_buffers(self) -> None:
        """Give this model's buffers the average over all workers, for evaluation. Every live worker calls it, equally often.

        Waits until all live workers have called it; workers that have left in good order count with the buffers they left with.
        Means are averaged, variances by their moments, counters by their maximum. Needs `model=`.
        Raises TimeoutExceededError naming the workers that have not called it, WorkerDiedError, UsageError without `model=`.
        """
        self._rounds.average()

    @contextlib.contextmanager
    def shown_weights(self, values: Iterable[torch.Tensor]) -> Iterator[None]:
        """Inside, the parameters are these tensors, one each in the order of the param_groups: the best so far, an average.

        For evaluation: to write such weights into the parameters would write into what the other workers read. Weights that all
        shall go on with are for `DistributedOptimizer.replace_weights`.
        """
        with shown(self._tensors, list(values)):
            yield
