"""Optimizer-state tensors and the weights' moving average, copied between a job's arena and a torch optimizer's state.

Every copy is of one version, and is made under the locks of all shards.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fastps.job.update_rules import Rule
from fastps.store.worker import Worker
from fastps.torch.tensors import Tensors
from fastps.torch.update_rules import MASTER, entry_of
from fastps.torch.weights import check_shapes

logger = logging.getLogger("fastps.torch")


def averages(worker: Worker, tensors: Tensors) -> list[torch.Tensor]:
    """Copies of the moving average of the weights."""
    with worker.locked():
        _, buffers = worker.store.committed()
        return [average.clone() for average in tensors.planes(buffers, worker.store.layout.planes - 1)]


def begin_average(worker: Worker, tensors: Tensors) -> None:
    """Let the moving average begin with the present weights, which a script has written before the first update."""
    with worker.locked():
        weights, buffers = worker.store.committed()
        _begin_average(tensors, tensors.weights(weights), buffers)


def _begin_average(tensors: Tensors, weights: list[torch.Tensor], buffers: Sequence[int]) -> None:
    """Write these weights over the moving average in the shards that have had no update. Nothing without `ema`."""
    store = tensors.store
    if not store.layout.policy.ema:
        return
    averages = tensors.planes(buffers, store.layout.planes - 1)
    for parameter, average, values in zip(store.parameters, averages, weights, strict=True):
        if store.arena.shard_version(parameter.shard) == 0 and average.numel() == values.numel():
            average.copy_(values)


@torch.inference_mode(mode=False)
def entries(worker: Worker, tensors: Tensors, rule: Rule, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any] | None]:
    """Each parameter's entry in torch's state. `groups` has each parameter's param_group. None before the rule's first step.

    The entry of a parameter in half precision has its float32 weights, too, as "master".
    """
    worker.store.layout.check_has_state("the optimizer's state")
    with worker.locked():
        weights, buffers = worker.store.committed()
        masters = {}
        if worker.store.layout.shown_type != "float32":
            each_type = zip(tensors.types, tensors.weights(weights), strict=True)
            masters = {index: each.clone() for index, (kind, each) in enumerate(each_type) if kind != "float32"}
        steps = [int(count[0]) for count in worker.store.rule_steps(buffers)]
        planes = {name: [view.clone() for view in tensors.planes(buffers, plane)] for plane, name in enumerate(rule.planes)}
    of_each = [{name: plane[index] for name, plane in planes.items()} for index in range(len(groups))]
    found = [entry_of(group, rule, steps[index], of_each[index].__getitem__) for index, group in enumerate(groups)]
    for index, master in masters.items():
        # Only beside the rest: torch takes an entry that is not empty for one that it has begun.
        if found[index] is not None or not rule.planes:
            found[index] = {**(found[index] or {}), MASTER: master}
    return found


@contextlib.contextmanager
def _republished(worker: Worker, tensors: Tensors) -> Iterator[tuple[list[int], list[int]]]:
    """Hold all shard locks inside the block, which changes a copy of the published weights and state; then publish it.

    The copy is in free buffers, of the weights and of the state one for each shard. Nothing changes if the block raises.
    """
    store = worker.store
    store.layout.check_has_state("replacing weights or the optimizer's state")
    worker.lock_shards()
    published = False
    try:
        weights, state = store.committed()
        spares = [worker.lane.spare(shard) for shard in range(store.arena.shards)]
        new_weights, new_state = [pair[0] for pair in spares], [pair[1] for pair in spares]
        for buffer in new_weights if store.layout.rule.runs_in_python else ():
            store.reserve_weights(buffer)
        _copy(tensors.weights(weights), tensors.weights(new_weights))
        for plane in range(store.layout.planes):
            _copy(tensors.planes(state, plane), tensors.planes(new_state, plane))
        for source, target in zip(store.rule_steps(state), store.rule_steps(new_state), strict=True):
            target[:] = source
        yield new_weights, new_state
        store.write_halves(new_weights)
        published = True
    finally:
        worker.unlock_shards(published)


def publish(worker: Worker, tensors: Tensors, rule: Rule, given: Sequence[Mapping[str, Any] | None]) -> None:
    """Make these entries of torch's state, one per parameter and empty if it has none, the job's. Weights and version stay.

    Where an entry is None, the job's stays. Only the digits that halves do not show come from an entry's "master".
    """
    with _republished(worker, tensors) as (weights, state):
        worker.store.thaw([index for index, entry in enumerate(given) if entry and _has_state(entry, rule)])
        write(tensors, state, rule, given)
        _refine(tensors, weights, given)


def _has_state(entry: Mapping[str, Any], rule: Rule) -> bool:
    return any(entry.get(name) is not None for name in rule.planes)


def _refine(tensors: Tensors, buffers: int | Sequence[int], given: Sequence[Mapping[str, Any] | None]) -> None:
    """Take the float32 weights of these entries where they round to the halves that the model shows."""
    others = []
    for parameter, tensor, entry in zip(tensors.store.parameters, tensors.weights(buffers), given, strict=True):
        master = entry.get(MASTER) if entry is not None else None
        if master is None or parameter.type not in ("float16", "bfloat16"):
            continue
        half = getattr(torch, parameter.type)
        if torch.equal(master.to(half), tensor.to(half)):
            tensor.copy_(master)
        else:
            others.append(parameter.name)
    if others:
        logger.warning(
            "the loaded master weights of %s are of other weights than the model's, and are not used: load the model's weights"
            " of the same moment first",
            ", ".join(map(repr, others[:3])) + (", ..." if len(others) > 3 else ""),
        )


def publish_weights(worker: Worker, tensors: Tensors, make: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]) -> None:
    """Make `make(copies of the newest weights)` the job's weights. The optimizer's state and the version stay.

    Raises ValueError for tensors of another number or shape, and the errors of `make`; nothing changes then.
    """
    store = worker.store
    with _republished(worker, tensors) as (buffers, state), torch.no_grad():
        weights = tensors.weights(buffers)
        values = list(make([tensor.clone() for tensor in weights]))
        check_shapes(weights, values)
        store.thaw([index for index in store.frozen if not torch.equal(weights[index], values[index].to(weights[index]))])
        weights = tensors.weights(buffers)
        for index, target in enumerate(weights):
            if index not in store.frozen:
                target.copy_(values[index])
        _begin_average(tensors, weights, state)


def write_first(tensors: Tensors, rule: Rule, given: Sequence[Mapping[str, Any]]) -> None:
    """Write these entries of torch's state into the first buffers, and the masters among them over the first weights."""
    write(tensors, [0] * tensors.store.arena.shards, rule, given)
    _refine(tensors, 0, given)


def write(tensors: Tensors, buffers: Sequence[int], rule: Rule, given: Sequence[Mapping[str, Any] | None]) -> None:
    """Write each parameter's entry of torch's state, or the rule's initial values, into its shard's state buffer.

    Nothing is written where an entry is None. Raises ValueError for a value of another shape.
    """
    steps = tensors.store.rule_steps(buffers)
    for index, entry in enumerate(given):
        if entry is None:
            continue
        steps[index][0] = int(entry.get("step", 1)) if _has_state(entry, rule) else 0
    for plane, name in enumerate(rule.planes):
        for values, entry in zip(tensors.planes(buffers, plane), given, strict=True):
            if entry is None:
                continue
            value = entry.get(name)
            if value is None:
                values.fill_(rule.initial_value(plane))
            elif value.shape != values.shape:
                raise ValueError(
                    f"optimizer.state: expected {name!r} of shape {tuple(values.shape)}, found {tuple(value.shape)}"
                )
            else:
                values.copy_(value)


def _copy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        if source.data_ptr() != target.data_ptr():  # a table lies in memory once
            target.copy_(source)
