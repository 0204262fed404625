"""Where a wrapped model's memory is: the base, for parameters that lie in the arena in host memory.

A `DistributedOptimizer` holds one placement. `fastps.torch.staged` and `fastps.torch.on_device` have those of models on GPUs.
"""

from collections.abc import Callable
from typing import Any

import torch

from fastps.job.layout import Layout
from fastps.job.update_rules import Hyper
from fastps.membership.job_memory import JobMemory
from fastps.store.worker import Worker
from fastps.torch import join as torch_join
from fastps.torch.gradients import Gradients, HalfGradients
from fastps.torch.join import Joining
from fastps.torch.weights import Weights, shaped_tensors


class HostPlacement:
    """Parameters and gradients of a model on the CPU point into the arena.

    Attributes:
        name: "host", "staged" or "device", for reports.
        shows_arena: whether the parameters are the arena's memory, which other workers read.
        state_follows: whether an optimizer's earlier state is published after joining, not written before anybody joins.
    """

    name = "host"
    shows_arena = True
    state_follows = False

    def __init__(self, tensors: list[torch.Tensor], push_dtype: torch.dtype = torch.float32) -> None:
        self._tensors = tensors
        self._push_dtype = push_dtype

    def layout(self, layout: Layout) -> Layout:
        """The job's layout with what this placement adds to it."""
        return layout

    def join(self, layout: Layout, hypers: list[Hyper], to: Joining, write_state: Callable[[JobMemory], None] | None) -> Worker:
        """Make or find the job's store and attach to it."""
        return torch_join.join(layout, self._tensors, hypers, to, write_state)

    def begin(self) -> None:
        """Let go of the arena before another one takes its place, if there was one."""

    def use(self, worker: Worker) -> None:
        """Prepare the arena of this worker. Raises ArenaError."""

    def gradients_kind(self) -> type[Gradients]:
        """What brings gradients into the slots."""
        return Gradients if self._push_dtype == torch.float32 else HalfGradients

    def tensor_views(self, store: JobMemory, views: list[Any]) -> list[torch.Tensor]:
        """Tensors over flat float32 views of the arena, one a parameter."""
        return shaped_tensors(store, views)

    def slot_views(self, store: JobMemory, views: list[Any]) -> list[torch.Tensor]:
        """Tensors over flat views of a slot, one a parameter, of the layout's type of gradients."""
        return shaped_tensors(store, views, store.layout.gradient_type)

    def pull(self, weights: Weights, worker: Worker) -> None:
        """Let the parameters be the newest weights."""
        weights.show(worker.pull())

    def end(self) -> None:
        """Let go of the arena: the optimizer closes."""
