"""How an optimizer joins its job: checks, the checkpoint to resume from, and the arena, created or connected to.

Worker 0 creates the arena, and its weights become the job's first. The other workers, and a lost worker's replacement, connect
to it.
"""

import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fastps.checkpoint.format import Checkpoint
from fastps.checkpoint.loading import load
from fastps.checkpoint.runs import check_folder, folder_of
from fastps.errors import CheckpointError, LayoutError, UnsupportedError, UsageError
from fastps.job import environment, limits
from fastps.job.environment import Identity
from fastps.job.layout import GradientType, Layout
from fastps.job.options import value_of
from fastps.job.precision import check_double
from fastps.job.update_rules import Hyper
from fastps.membership import discovery
from fastps.store import jobs_of_process
from fastps.store.attached_lane import AttachedLane
from fastps.store.combining import Combining
from fastps.store.server_process import ServerPlan
from fastps.store.store import StartState, Store
from fastps.store.worker import Worker
from fastps.system.clock import Clock
from fastps.system.memory_limits import available_bytes
from fastps.torch import foreign
from fastps.torch.any_optimizer import saved
from fastps.torch.carried import CarriedBuffers
from fastps.torch.checkpoint import restore_buffers, restore_group
from fastps.torch.names import UNNAMED
from fastps.torch.update_rules import PARAMETER_TYPES, left_out, without

logger = logging.getLogger("fastps.torch")

_JOIN_S = 10.0  # how long a lost worker's replacement looks for the remaining workers


def tensors_of(optimizer: torch.optim.Optimizer) -> tuple[dict[int, str], list[Any]]:
    """What `left_out` leaves out, and the parameters that the job holds."""
    ids = left_out(optimizer.param_groups)
    return ids, [tensor for group in without(optimizer.param_groups, ids) for tensor in group["params"]]


def gradient_type(push_dtype: torch.dtype, tensors: Sequence[torch.Tensor]) -> GradientType:
    """The layout's name for a push's dtype. Raises UsageError for a dtype that pushes of these parameters cannot have."""
    found = PARAMETER_TYPES.get(push_dtype)
    if found is None or (found == "float64" and any(tensor.dtype != torch.float64 for tensor in tensors)):
        raise UsageError(f"push_dtype: expected torch.float32, torch.bfloat16 or torch.float16, found {push_dtype!r}")
    return found


def check_parameters(tensors: list[torch.Tensor], layout: Layout, *, is_counted: bool) -> None:
    """Raise UnsupportedError for a model that would train wrongly: shared memory, or gradients averaged elsewhere.

    Raises UsageError if the job has a number alone (`is_counted`), and could be taken for another of this process.
    """
    if is_counted:
        _check_distinct(layout)
    names = [parameter.name for parameter in layout.parameters]
    foreign.check_memory(tensors, names)
    foreign.check_not_averaged(tensors)
    check_double(layout)
    places = sorted((tensor.data_ptr(), index) for index, tensor in enumerate(tensors) if tensor.numel())
    for (begin, one), (following, other) in itertools.pairwise(places):
        if begin + tensors[one].nbytes > following:
            both = " and ".join(repr(names[index]) for index in sorted((one, other)))
            raise UnsupportedError(
                f"parameters {both} share memory: expected tied weights to be one Parameter (a.weight = b.weight), given once"
            )


def _check_distinct(layout: Layout) -> None:
    """Raise UsageError if an open job of this process cannot be told from this one: no names, and the same shapes.

    The jobs of a script are counted, so a worker that makes them in another order would join the others' for them.
    """
    has_names = not all(each.name.startswith(UNNAMED) for each in layout.parameters)
    stores = jobs_of_process.open_stores() if layout.workers > 1 and not has_names else []
    if any(each.layout.parameters == layout.parameters for each in stores):
        raise UsageError(
            "another open optimizer has parameters of the same shapes, and neither has names: expected what tells them apart in"
            " every worker, found their order alone; give each its own job= (with rank= and workers=), or named parameters"
            " ([(name, parameter), ...]), or all parameters to one optimizer"
        )


def check_checkpoints(
    wanted: tuple[Path, int] | None, resumed: Checkpoint | None, rank: int, layout: Layout, timeout_s: float | None
) -> None:
    """Raise UsageError if the job cannot move to another arena, as sync="auto" requires.

    Worker 0 raises CheckpointError as well, if the folder for checkpoints is another run's, or cannot be used. One that joins
    a running job does not look: another run may have begun there meanwhile.
    """
    if layout.policy.warm_up and (wanted or resumed or layout.faults.continues):
        raise UsageError(
            'sync="auto" moves the job to a new arena after its warm-up: expected no checkpoints, no resume and'
            ' on_worker_loss="stop" beside it; take what it recommends (fastps advise) as sync instead'
        )
    if wanted is not None and rank == 0 and not environment.joins():
        overwrite = value_of("FASTPS_OVERWRITE") == "1"
        tables = [parameter for parameter in layout.parameters if parameter.is_table]  # whose rows may have less state
        floats = layout.buffer_floats * (1 + layout.planes) + sum(table.size for table in tables)
        check_folder(wanted[0], resumed, overwrite=overwrite, needed_bytes=4 * floats, timeout_s=timeout_s)


def resumed_from(
    path: str | os.PathLike[str] | None,
    layout: Layout,
    model: torch.nn.Module | None,
    optimizer: torch.optim.Optimizer,
    instance: int = 0,
) -> Checkpoint | None:
    """Load the checkpoint to resume from, if any, and restore the options of the param_groups and the model's buffers.

    The checkpoint is `path`, else that of the script's optimizer number `instance` in FASTPS_RESUME. Raises CheckpointError,
    LayoutError.
    """
    given = os.environ.get("FASTPS_RESUME")
    if path is None and given:
        path = folder_of(Path(given), instance)
        if instance and not path.is_dir() and jobs_of_process.is_any_open():
            raise CheckpointError(
                f"checkpoint {given}: expected the checkpoints of the script's optimizer number {instance} in {path}, found no"
                ' such folder; give this optimizer resume=, the folder of its checkpoints, or resume="" to begin it anew'
            )
        if instance and not path.is_dir():  # the script's optimizers train one after the other, and the run ended before this
            logger.warning("resume: the run had no checkpoint of the script's optimizer number %d, which begins anew", instance)
            return None
    if not path:
        return None
    found = load(path)
    found.check_layout(layout)
    if model is not None:
        restore_buffers(model, found)
    for group, described in zip(optimizer.param_groups, found.description["param_groups"], strict=True):
        restore_group(group, described)
    if layout.rule.runs_in_python:
        saved.restore(optimizer, found)
        return found
    state = optimizer.state
    optimizer.__setstate__({"state": {}})  # torch's AdamW stays AdamW after it has loaded Adam's options
    optimizer.state = state
    return found


def with_frozen(
    layout: Layout, tensors: Sequence[torch.Tensor], state: Mapping[Any, Any], resumed: Checkpoint | None
) -> Layout:
    """The layout without memory for gradients and state of those `tensors` that nobody trains as yet."""
    begun = [each["steps"] > 0 for each in resumed.description["parameters"]] if resumed is not None else [False] * len(tensors)
    trains = [tensor.requires_grad or tensor.grad is not None or bool(state.get(tensor)) for tensor in tensors]
    dense = [index for index, parameter in enumerate(layout.parameters[: len(tensors)]) if parameter.length]
    return replace(layout, frozen=frozenset(index for index in dense if not (trains[index] or begun[index])))


def writer_of(tensors: list[torch.Tensor]) -> Callable[[list[Any]], None]:
    """A function that writes these parameters into flat views, one each, in memory order: the weights of version 0."""

    def write(views: list[Any]) -> None:
        for view, tensor in zip(views, tensors, strict=True):
            flat = torch.as_strided(tensor.detach(), (tensor.numel(),), (1,))
            view[:] = flat.to("cpu", getattr(torch, view.dtype.name)).numpy()

    return write


def warn_of_gradients(tensors: Sequence[torch.Tensor], workers: int) -> None:
    """Warn if too little memory is left beside the arena: each worker keeps the memory of the largest gradient."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors if tensor.device.type == "cpu"]
    free, limit = available_bytes()
    if workers * max(sizes, default=0) > free:
        logger.warning(
            "%.2f GiB are free beside the arena (%s), and the largest gradient takes %.2f GiB in all %d workers together: the"
            " kernel may kill a worker; use fewer workers",
            free / 2**30, limit, workers * max(sizes) / 2**30, workers,
        )  # fmt: skip


@dataclass(frozen=True)
class Joining:
    """A worker's request to join a job: its identity, the checkpoint to resume from, and the timeout of its waits.

    `is_named`: whether the script names the job, so that no other job of the launch can be meant. `carried`: the model's
    buffers. `combining` and `plan`: what folds, and what the server is told, if the compiled core does not fold.
    """

    identity: Identity
    is_named: bool
    resumed: StartState | None
    timeout_s: float | None
    clock: Clock
    carried: CarriedBuffers
    combining: Callable[[AttachedLane], Combining] | None = None
    plan: ServerPlan | None = None

    @property
    def finds_others(self) -> bool:
        """Whether the worker replaces a lost one in a job that already runs; in a later job of its launch it may be first."""
        return environment.joins() and (self.identity.instance == 0 or self.identity.name in discovery.listening())

    def at_its_place(self) -> "Joining":
        """This request, for the launch's job that expects this worker; worker 0 creates the job that its own count gives."""
        if self.is_named or self.identity.rank == 0 or self.finds_others:
            return self
        return replace(self, identity=jobs_of_process.find_job(self.identity, limits.timeout_s(self.timeout_s), self.clock))


def join(
    layout: Layout,
    tensors: list[torch.Tensor],
    hypers: list[Hyper],
    to: Joining,
    kind: type[Store] = Store,
    attach: Callable[[Any, int], Worker] = Store.attach,
    read_first: Callable[[Any], None] = lambda store: None,
    finish: Callable[[Any], None] | None = None,
    **created: Any,
) -> Worker:
    """Attach this process's worker to the job's store, of this `kind`. Worker 0 creates it, with the options `created`.

    `read_first` is called by the others before they attach: worker 0 changes the first weights once all are attached. `finish`
    writes more into a new store before others join.

    Raises ArenaError, AttachError, LayoutError.
    """
    to = to.at_its_place()
    job, rank = to.identity.name, to.identity.rank
    if to.finds_others:
        limit_s = min(_JOIN_S, limits.timeout_s(to.timeout_s))  # the other workers run already, or have ended
        store = kind.connect(job, layout, hypers, timeout_s=limit_s, clock=to.clock).with_timeout(to.timeout_s)
    elif rank == 0:

        def write_more(store: Store) -> None:
            to.carried.write_first(store)
            if finish is not None:
                finish(store)

        created |= {"finish": write_more}
        write, options = writer_of(tensors), {"timeout_s": to.timeout_s, "clock": to.clock, "server_plan": to.plan, **created}
        store = kind.create_for(layout, write, hypers, resume=to.resumed, job=job, **options)
        warn_of_gradients(tensors, layout.workers)
    else:
        store = kind.connect(job, layout, hypers, timeout_s=to.timeout_s, clock=to.clock)
    store.combining = to.combining
    try:
        if rank:
            read_first(store)
        return attach(store, rank)
    except BaseException:
        store.close()
        raise


def tell_of_other_weights(names: Sequence[str], own: Mapping[int, torch.Tensor], first: Sequence[torch.Tensor]) -> None:
    """Warn of parameters, by number, that are other ones than worker 0's `first`, which take their place.

    Raises LayoutError for one without a name that is another of worker 0's: the optimizers have them in another order.
    """
    for index, tensor in own.items() if any(name.startswith(UNNAMED) for name in names) else ():
        for place, other in enumerate(first):
            if names[place].startswith(UNNAMED) and tensor.shape == other.shape and torch.equal(tensor, other):
                raise LayoutError(
                    f"{names[index]} is worker 0's {names[place]}: give all optimizers the parameters in one order (a list,"
                    " not a set), or with their names (model=, or model.named_parameters())"
                )
    which = repr(names[min(own)]) + (f" and {len(own) - 1} more" if len(own) > 1 else "")
    logger.warning(
        "the first weights here (%s) are not worker 0's, which take their place: copies that the script has made of them (a"
        " target network, an average) stay other ones than worker 0's; copy after wrapping, or seed all workers alike before",
        which,
    )


def limit_threads(workers: int) -> None:
    """Limit torch to cores // workers threads, unless OMP_NUM_THREADS is set: more threads would compete for the cores."""
    if workers > 1 and "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, min(torch.get_num_threads(), cores // workers)))
