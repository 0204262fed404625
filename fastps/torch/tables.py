"""A model's tables: which of its parameters are tables, what a job with tables refuses, and their gradients.

A table is the weight of a layer with sparse=True. Its gradients are sparse, and its rows lie in the arena once. Gradients go
into the slot as rows when the worker pushes; `p.grad` of a table stays the sparse tensor that autograd made, also after the
push.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fastps.errors import UnsupportedError
from fastps.job.policy import Policy
from fastps.job.update_rules import UPDATE_RULES, Rule
from fastps.store.row_slots import RowSlots, check_rows
from fastps.store.worker import Worker
from fastps.torch import foreign
from fastps.torch.gradients import Gradients, norm_of
from fastps.torch.placements.host import HostPlacement
from fastps.torch.tensors import Tensors
from fastps.torch.update_rules import hyper_of


def tables_of(tensors: Sequence[torch.Tensor], rule: Rule, modules: Sequence[torch.nn.Module]) -> frozenset[int]:
    """The numbers of the parameters that are tables: of modules with sparse=True, or all if the rule updates nothing else.

    Raises UnsupportedError for a table that is not float32.
    """
    row = None if rule.address else UPDATE_RULES.get(rule.name)  # a user's rule may have the name of another
    only_rows = row is not None and row.only_rows
    found = frozenset(range(len(tensors)) if only_rows else foreign.sparse_parameters(tensors, modules))
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


def gradients_of(placement: HostPlacement, worker: Worker, keeps: bool) -> Gradients:
    """The gradients of a worker's parameters in its slots."""
    tensors, kind = placement.tensors, placement.gradients_kind(worker)
    dense = [index for index in range(len(tensors)) if index not in worker.store.tables]
    found = kind(tensors, dense, worker.rank, keeps=keeps)
    return TableGradients(found, dense, tensors, worker.rows) if worker.store.tables else found


class TableGradients(Gradients):
    """Gradients of parameters some of which are tables; `dense` has the others', whose numbers are `places`.

    `rows`: those in this worker's slots.
    """

    def __init__(self, dense: Gradients, places: Sequence[int], tensors: Tensors, rows: RowSlots) -> None:
        self.tensors = tensors
        self._name = tensors.name  # type: ignore[method-assign]
        self._dense, self._places = dense, places
        self._place_of = {number: place for place, number in enumerate(places)}
        self._tables = tensors.store.tables
        self._rows = rows
        self._slot = 0  # of the last `collect`

    @property
    def is_apart(self) -> bool:  # type: ignore[override]
        return self._dense.is_apart

    def put(self, index: int, slot: int, tensor: torch.Tensor) -> bool:
        """Copy a dense gradient, into which autograd has just accumulated; no hook gives a sparse one."""
        return self._dense.put(self._place_of[index], slot, tensor)

    def zero(self, set_to_none: bool) -> None:
        self._dense.zero(set_to_none)
        for index in self._tables:
            gradient = self.tensors[index].grad
            if set_to_none:
                self.tensors[index].grad = None
            elif gradient is not None:
                gradient.zero_()

    def expose(self, slot: int) -> None:
        self._dense.expose(slot)

    def collect(self, slot: int) -> bytes:
        """Write all gradients that are not there yet into the slot, those of tables as rows: equal rows are summed.

        Returns the bitmap of the parameters that have a gradient. Raises UnsupportedError for a dense gradient of a table.
        """
        self._slot = slot
        self._dense.collect(slot)
        self.present = {self._places[place] for place in self._dense.present}
        for index in self._tables:
            gradient = self.tensors[index].grad
            if gradient is not None:
                self.check(index, gradient := gradient.detach())
                self._rows.put(slot, index, gradient._indices()[0].numpy(), gradient._values().numpy())
                self.present.add(index)
        return self._presence()

    def check(self, index: int, gradient: torch.Tensor) -> None:
        """Raise UnsupportedError for a table's gradient that cannot be pushed."""
        if gradient.layout is not torch.sparse_coo or gradient.sparse_dim() != 1:
            raise UnsupportedError(
                f"parameter {self._name(index)!r}: expected a sparse gradient of rows, because it is a table, found"
                f" {gradient.layout}; let nothing but a layer with sparse=True use it (no tied weights), or build it with"
                " sparse=False, and give dense parameters an optimizer of their own (Adam beside SparseAdam)"
            )

    def release(self, slot: int) -> None:
        self._dense.release(slot)

    def norm(self) -> float:
        rows = [self._rows.values(self._slot, index) for index in self._tables if index in self.present]
        return math.hypot(self._dense.norm(), norm_of([torch.from_numpy(values) for values in rows]))

    def detach(self, slot: int) -> None:
        self._dense.detach(slot)

    def clone(self) -> None:
        self._dense.clone()
