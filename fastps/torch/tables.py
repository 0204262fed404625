"""Which of a model's parameters are tables, and what a job with tables refuses.

A table is the weight of a layer with sparse=True. Its gradients are sparse, and its rows lie in the arena once.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fastps.errors import UnsupportedError
from fastps.job.policy import Policy
from fastps.job.update_rules import UPDATE_RULES, Rule
from fastps.store.row_slots import check_rows
from fastps.store.worker import Worker
from fastps.torch import foreign
from fastps.torch.gradients import Gradients
from fastps.torch.placements.host import HostPlacement
from fastps.torch.table_gradients import TableGradients
from fastps.torch.update_rules import hyper_of


def tables_of(tensors: Sequence[torch.Tensor], rule: Rule) -> frozenset[int]:
    """The numbers of the parameters that are tables: of layers with sparse=True, or all if the rule updates nothing else.

    Raises UnsupportedError for a table that is not float32.
    """
    row = None if rule.address else UPDATE_RULES.get(rule.name)  # a user's rule may have the name of another
    only_rows = row is not None and row.only_rows
    found = frozenset(range(len(tensors)) if only_rows else foreign.sparse_parameters(tensors))
    for index in sorted(found):
        if tensors[index].dtype != torch.float32:
            cure = "model.float(), or sparse=False" if tensors[index].dtype == torch.float64 else "layer.float()"
            raise UnsupportedError(
                f"parameter number {index} belongs to a layer with sparse=True: expected float32, because a table is in the"
                f" arena once, found {str(tensors[index].dtype).removeprefix('torch.')}; use {cure}"
            )
    return found


def check(
    tables: frozenset[int],
    names: Sequence[str],
    groups: Sequence[Mapping[str, Any]],
    rule: Rule,
    policy: Policy,
    placement: HostPlacement,
) -> None:
    """Raise UnsupportedError for tables that the job's rule, policy or placement cannot have. `names`: of all parameters."""
    if not tables:
        return
    if placement.name != "host":
        where = "several nodes" if placement.name == "node" else "GPUs"
        raise UnsupportedError(
            f"parameter {names[min(tables)]!r} belongs to a layer with sparse=True: expected a model on the CPU of one node,"
            f" found {where}; build the layer with sparse=False"
        )
    of_each = [(tensor, group) for group in groups for tensor in group["params"]]
    chosen = [(name, *of_each[index]) for index, name in enumerate(names) if index in tables]
    described = [(name, tuple(tensor.shape), hyper_of(dict(group), rule)) for name, tensor, group in chosen]
    check_rows(rule, policy, described, len(names))


def gradients_of(placement: HostPlacement, worker: Worker, tensors: list[torch.Tensor], keeps: bool) -> Gradients:
    """The gradients of a worker's parameters in its slots."""
    store = worker.store
    parameters, tables = store.layout.parameters, store.tables
    dense = [index for index in range(len(tensors)) if index not in tables]

    def name(index: int) -> str:
        return parameters[index].name

    def views(slot: int) -> list[torch.Tensor]:
        made = placement.slot_views(store, store.gradient_views(worker.rank, slot))
        return [made[index] for index in dense]

    found = placement.gradients_kind(worker)(
        [tensors[index] for index in dense], views, store.arena.slots, keeps=keeps, name=lambda place: name(dense[place])
    )
    return TableGradients(found, tensors, tables, worker.rows, name) if tables else found
