"""The rule's state and the weights' moving average as tensors: what goes between a job's arena and a torch optimizer's state.

Copies, of one version, made under the turns of all shards. Refuses to know param_groups, and when any of it is asked for.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fastps.rules import Rule
from fastps.store import Store
from fastps.torch_rules import entry_of
from fastps.worker import Worker

Tensors = list[torch.Tensor]
MakeTensors = Callable[[list[Any]], Tensors]
"""Makes tensors, with the parameters' strides, of flat views of the arena, one a parameter."""


def averages(worker: Worker, tensors_of: MakeTensors) -> Tensors:
    """Copies of the moving average of the weights."""
    worker.hold_turns()
    try:
        _, buffers = worker.store.committed()
        views = worker.store.plane_views(buffers, worker.store.layout.planes - 1)
        return [average.clone() for average in tensors_of(views)]
    finally:
        worker.release_turns(False)


def entries(
    worker: Worker, tensors_of: MakeTensors, rule: Rule, groups: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any] | None]:
    """For each parameter, of the param_group in `groups`: its entry of torch's state; None before the rule's first step."""
    worker.hold_turns()
    try:
        _, buffers = worker.store.committed()
        steps = [int(count[0]) for count in worker.store.rule_steps(buffers)]
        planes = {
            name: [view.clone() for view in tensors_of(worker.store.plane_views(buffers, plane))]
            for plane, name in enumerate(rule.planes)
        }
    finally:
        worker.release_turns(False)
    of_each = [{name: tensors[index] for name, tensors in planes.items()} for index in range(len(groups))]
    return [entry_of(group, rule, steps[index], of_each[index].__getitem__) for index, group in enumerate(groups)]


def publish(worker: Worker, tensors_of: MakeTensors, rule: Rule, given: Sequence[Mapping[str, Any]]) -> None:
    """Make each parameter's entry of torch's state, empty where it has none, the job's. Weights and version stay."""
    store = worker.store
    worker.hold_turns()
    published = False
    try:
        spares = [worker.lane.spare(shard) for shard in range(store.arena.shards)]
        weights_buffers, state_buffers = [pair[0] for pair in spares], [pair[1] for pair in spares]
        active, active_state = store.committed()
        _copy(store.weight_views(active), store.weight_views(weights_buffers))
        if store.layout.policy.ema:
            last = store.layout.planes - 1
            _copy(store.plane_views(active_state, last), store.plane_views(state_buffers, last))
        write(store, state_buffers, tensors_of, rule, given)
        published = True
    finally:
        worker.release_turns(published)


def publish_weights(worker: Worker, tensors_of: MakeTensors, make: Callable[[Tensors], Sequence[torch.Tensor]]) -> None:
    """Make what `make` returns of the newest weights the job's weights. The rule's state and the version stay.

    Raises ValueError for tensors of another number or shape, and what `make` raises; then nothing has changed.
    """
    store = worker.store
    worker.hold_turns()
    published = False
    try:
        spares = [worker.lane.spare(shard) for shard in range(store.arena.shards)]
        weights_buffers, state_buffers = [pair[0] for pair in spares], [pair[1] for pair in spares]
        active, active_state = store.committed()
        newest = tensors_of(store.weight_views(active))
        with torch.no_grad():
            values = list(make([tensor.clone() for tensor in newest]))
            if [value.shape for value in values] != [tensor.shape for tensor in newest]:
                raise ValueError(
                    f"expected a tensor for each of {len(newest)} parameters, in their order and shapes, found"
                    f" {[tuple(value.shape) for value in values]}"
                )
            for target, value in zip(tensors_of(store.weight_views(weights_buffers)), values, strict=True):
                target.copy_(value)
        for plane in range(store.layout.planes):
            _copy(store.plane_views(active_state, plane), store.plane_views(state_buffers, plane))
        _copy(store.rule_steps(active_state), store.rule_steps(state_buffers))
        published = True
    finally:
        worker.release_turns(published)


def write(
    store: Store, buffers: Sequence[int], tensors_of: MakeTensors, rule: Rule, given: Sequence[Mapping[str, Any]]
) -> None:
    """Write each parameter's entry of torch's state into its shard's state buffer; without one, what the rule begins with."""
    steps = store.rule_steps(buffers)
    for index, entry in enumerate(given):
        has_state = any(entry.get(name) is not None for name in rule.planes)
        steps[index][0] = int(entry.get("step", 1)) if has_state else 0
    for plane, name in enumerate(rule.planes):
        for values, entry in zip(tensors_of(store.plane_views(buffers, plane)), given, strict=True):
            value = entry.get(name)
            if value is None:
                values.fill_(rule.initial_value(plane))
            else:
                values.copy_(value)


def _copy(sources: Sequence[Any], views: Sequence[Any]) -> None:
    for source, view in zip(sources, views, strict=True):
        view[:] = source
