"""How an optimizer comes into its job: what it refuses beforehand, what it goes on from, the arena made or joined.

Worker 0 makes the arena and its weights are everyone's first; the others ask for it, and so does a lost worker's replacement.
Refuses to know what a step is.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastps.checkpoint.format import Checkpoint, load
from fastps.errors import UnsupportedError, UsageError
from fastps.job import environment
from fastps.job import limits as config
from fastps.job.environment import Identity
from fastps.job.fault_policy import FaultPolicy
from fastps.job.layout import GradientType, Layout
from fastps.job.update_rules import Hyper
from fastps.membership import discovery
from fastps.store import instances as job_instances
from fastps.store.store import Store
from fastps.store.worker import Worker
from fastps.system.clock import Clock
from fastps.torch.checkpoint import restore_buffers, restore_group

Groups = Sequence[dict[str, Any]]

_JOIN_S = 10.0  # how long the replacement of a lost worker looks for those who go on without it
_PUSH_TYPES: dict[torch.dtype, GradientType] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


def gradient_type(push_dtype: torch.dtype) -> GradientType:
    """The layout's name for what pushes are made of. Raises UsageError for what they cannot be."""
    found = _PUSH_TYPES.get(push_dtype)
    if found is None:
        raise UsageError(f"push_dtype: expected torch.float32, torch.bfloat16 or torch.float16, found {push_dtype!r}")
    return found


def check_apart(tensors: list[torch.Tensor], layout: Layout) -> None:
    """Raises UnsupportedError for two parameters that are one memory: each gets memory of its own here."""
    first: dict[int, str] = {}
    for tensor, parameter in zip(tensors, layout.parameters, strict=True):
        if tensor.numel() and (other := first.setdefault(tensor.data_ptr(), parameter.name)) != parameter.name:
            raise UnsupportedError(
                f"parameters {other!r} and {parameter.name!r} share memory: expected tied weights to be one Parameter"
                " (a.weight = b.weight)"
            )


def check_may_move(has_checkpoints: bool, faults: FaultPolicy) -> None:
    """Raises UsageError where the arena has to stay, which with sync="auto" it does not."""
    if has_checkpoints or faults.continues:
        raise UsageError(
            'sync="auto" moves the job to a new arena after its warm-up: expected no checkpoints, no resume and'
            ' on_worker_loss="stop" beside it; take what it recommends (fastps advise) as sync instead'
        )


def resumed_from(
    path: str | os.PathLike[str] | None, layout: Layout, model: torch.nn.Module | None, groups: Groups
) -> Checkpoint | None:
    """The checkpoint to go on from, if any: every worker takes the options of its param_groups and the model's buffers.

    Raises CheckpointError, LayoutError.
    """
    if not path:
        return None
    found = load(path)
    found.check_layout(layout)
    if model is not None:
        restore_buffers(model, found)
    for group, described in zip(groups, found.description["param_groups"], strict=True):
        restore_group(group, described)
    return found


def writer_of(tensors: list[torch.Tensor]) -> Callable[[list[Any]], None]:
    """What writes these parameters into flat views, one each, in the order of their memory: the weights of version 0."""

    def write(views: list[Any]) -> None:
        for view, tensor in zip(views, tensors, strict=True):
            view[:] = torch.as_strided(tensor.detach(), (tensor.numel(),), (1,)).cpu().numpy()

    return write


@dataclass(frozen=True)
class Joining:
    """Who comes into which job, what the job goes on from, and how long the worker waits for others, then and later.

    `is_named`: whether the script names the job, so that no other of the launch's can be meant.
    """

    identity: Identity
    is_named: bool
    resumed: Checkpoint | None
    timeout_s: float | None
    clock: Clock

    @property
    def finds_others(self) -> bool:
        """Whether the worker replaces a lost one, and the others are in this job already; to a later one it may come first."""
        return environment.joins() and (self.identity.instance == 0 or self.identity.name in discovery.listening())

    def at_its_place(self) -> "Joining":
        """The same once the launch's job is known that expects this worker; worker 0 makes the one that it counts."""
        if self.is_named or self.identity.rank == 0 or self.finds_others:
            return self
        return replace(self, identity=job_instances.expected(self.identity, config.timeout_s(self.timeout_s), self.clock))


def join(
    layout: Layout,
    tensors: list[torch.Tensor],
    hypers: list[Hyper],
    to: Joining,
    finish: Callable[[Store], None] | None = None,
) -> Worker:
    """This process' worker, attached to the job's arena, which worker 0 makes, and finishes before anybody joins.

    Raises ArenaError, AttachError, LayoutError.
    """
    to = to.at_its_place()
    job, rank = to.identity.name, to.identity.rank
    if to.finds_others:
        patience_s = min(_JOIN_S, config.timeout_s(to.timeout_s))  # the others are there, or have come to their end
        store = Store.connect(job, layout, hypers, timeout_s=patience_s, clock=to.clock).with_timeout(to.timeout_s)
    elif rank == 0:
        store = Store.create_for(
            layout,
            writer_of(tensors),
            hypers,
            resume=to.resumed,
            job=job,
            timeout_s=to.timeout_s,
            clock=to.clock,
            finish=finish if to.resumed is None else None,
        )
    else:
        store = Store.connect(job, layout, hypers, timeout_s=to.timeout_s, clock=to.clock)
    try:
        return store.attach(rank)
    except BaseException:
        store.close()
        raise


def limit_threads(workers: int) -> None:
    """cores // workers threads for torch, unless the user set a number: more would fight over the cores."""
    if workers > 1 and "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, min(torch.get_num_threads(), cores // workers)))
