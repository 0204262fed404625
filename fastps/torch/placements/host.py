"""Where a wrapped model's memory is: the base class, which places parameters in an arena in host memory."""

import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch

from fastps.checkpoint.format import Checkpoint
from fastps.checkpoint.snapshot import Pinned, PinnedVersion
from fastps.job.layout import Layout
from fastps.job.precision import check_double
from fastps.job.update_rules import Hyper
from fastps.membership.job_memory import JobMemory
from fastps.store.observer import WorkerStatistics, statistics_of
from fastps.store.store import StartState
from fastps.store.worker import Worker
from fastps.system.shared_memory import map_private
from fastps.torch import join
from fastps.torch.gradients import Gradients
from fastps.torch.join import Joining
from fastps.torch.tensors import Tensors, shaped_tensors
from fastps.torch.weights import Weights

logger = logging.getLogger("fastps.torch")


class HostPlacement:
    """Placement of a model on the CPU: its parameters and gradients point into the arena.

    Attributes:
        name: "host", "staged" or "device", for reports.
        shows_arena: whether the parameters are views of the arena's memory.
        keeps_own: whether parameters stay the script's own memory until they get a gradient.
        tensors: the parameters, and tensors over the arena; `over` makes these of flat views.
        state_follows: whether an optimizer's earlier state is published after joining, instead of written before others join.
        saves: whether a worker of this node writes the periodic checkpoints.
    """

    name = "host"
    over: Callable[..., list[torch.Tensor]] = staticmethod(shaped_tensors)
    shows_arena = keeps_own = saves = True
    state_follows = False

    def __init__(self, tensors: list[torch.Tensor], push_dtype: torch.dtype = torch.float32) -> None:
        self.tensors = Tensors(tensors, self.over)
        self._push_dtype = push_dtype

    def layout(self, layout: Layout) -> Layout:
        """The job's layout with this placement's additions. Raises UnsupportedError for what float64 excludes."""
        check_double(layout)
        return layout

    def stated_layout(self, layout: Layout) -> Layout:
        """The layout of the arena that holds the optimizer's state, with which a checkpoint is compared."""
        return layout

    def start(self, resumed: Checkpoint) -> StartState:
        """The state from which this process's arena resumes."""
        return resumed

    def saved_version(self, worker: Worker) -> int:
        """The version that the next checkpoint would have."""
        return worker.version

    def pin(
        self, worker: Worker, groups: list[dict[str, Any]], extra: Mapping[str, Any], *, waits: bool, **more: Any
    ) -> Pinned:
        """Pin the whole published version for a checkpoint."""
        return PinnedVersion(worker, groups, extra, waits=waits, **more)

    def statistics(self, worker: Worker) -> list[WorkerStatistics]:
        """The counters of the job's workers, by rank."""
        return statistics_of(worker.store.arena)

    def join(self, layout: Layout, hypers: list[Hyper], to: Joining, write_state: Callable[[JobMemory], None] | None) -> Worker:
        """Create the job's store or connect to it, and attach."""
        finish = write_state if to.resumed is None else None
        read_first = partial(self._read_first, is_resumed=to.resumed is not None)
        return join.join(layout, self.tensors, hypers, to, read_first=read_first, finish=finish)

    def _read_first(self, store: JobMemory, is_resumed: bool) -> None:
        """Take the first weights into the script's own memory. Raises LayoutError for parameters in another order."""
        if self.keeps_own:
            weights = Weights(self.tensors.enter(store), own=range(len(self.tensors)))
            first = store.committed()[0]
            others = weights.differing(weights.own, first)
            has_trained = is_resumed or any(store.arena.shard_version(shard) for shard in range(store.arena.shards))
            if others and not has_trained:
                join.tell_of_other_weights([each.name for each in store.parameters], others, self.tensors.values(first))
            weights.take(first, others)

    def begin(self) -> None:
        """Release the previous arena, if any, before a new one takes its place."""

    def use(self, worker: Worker) -> None:
        """Prepare this worker's arena. Raises ArenaError."""
        view = map_private(worker.store.descriptor)
        self.tensors.enter(worker.store, view, worker.store.tables)  # rows that others update would go stale in a private page
        if view.is_written():
            logger.info("faults of the model's memory cannot be handled here: each step compares the weights with the job's")

    def gradients_kind(self, worker: Worker) -> Callable[..., Gradients]:
        """The class that copies gradients into the slots."""
        return partial(Gradients, is_hooked=False) if worker.store.layout.steps_alone else Gradients

    def pull(self, weights: Weights, worker: Worker, written: Collection[int]) -> None:
        """Pull, and make the newest weights the parameters. `written`: those that an own push updates."""
        weights.show(worker.pull(), written)

    def end(self) -> None:
        """Release the arena, because the optimizer closes."""
