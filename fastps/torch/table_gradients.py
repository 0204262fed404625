"""The gradients of a model with tables: sparse ones go into the slot as rows when the worker pushes, dense ones as ever.

`p.grad` of a table stays the sparse tensor that autograd made, also after the push.
"""

import math
from collections.abc import Callable, Sequence

import torch

from fastps.errors import UnsupportedError
from fastps.store.row_slots import RowSlots
from fastps.torch.gradients import Gradients, norm_of


class TableGradients(Gradients):
    """Gradients of `tensors`, of which those with the numbers `tables` are tables; `dense` has the others', in their order.

    `rows`: those in this worker's slots. `name` gives a parameter's name for errors.
    """

    def __init__(
        self, dense: Gradients, tensors: list[torch.Tensor], tables: Sequence[int], rows: RowSlots, name: Callable[[int], str]
    ) -> None:
        self.tensors = tensors
        self._dense = dense
        self._tables = sorted(tables)
        self._places = [index for index in range(len(tensors)) if index not in tables]  # the number of each dense tensor
        self._numbers = {number: place for place, number in enumerate(self._places)}
        self._rows = rows
        self._name = name
        self._slot = 0  # of the last `collect`

    @property
    def is_apart(self) -> bool:  # type: ignore[override]
        return self._dense.is_apart

    def put(self, index: int, slot: int, tensor: torch.Tensor) -> bool:
        """Copy a dense gradient, into which autograd has just accumulated; no hook gives a sparse one."""
        return self._dense.put(self._numbers[index], slot, tensor)

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
