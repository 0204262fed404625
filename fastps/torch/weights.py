"""The weights of one worker between two pulls: how a model's parameters show a published buffer.

`p.data` points at the buffer that the worker has pinned; nothing is copied.
"""

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastps.membership.job_memory import WeightsMemory
from fastps.torch.tensor_loops import tensor_loops

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by an element's bytes: NaNs differ from themselves


class Weights:
    """The parameters `tensors` of a store. `tensors_of` makes tensors with their strides from flat views, one per parameter.

    A view is of the weights, or of their halves where the parameter is of that type.
    """

    def __init__(
        self, tensors: list[torch.Tensor], store: WeightsMemory, tensors_of: Callable[[list[Any]], list[torch.Tensor]]
    ) -> None:
        self.tensors, self._count = tensors, len(tensors)
        self._are_halves = [tensor.dtype in (torch.float16, torch.bfloat16) for tensor in tensors]
        self._store = store
        self._tensors_of = tensors_of
        self._made: dict[tuple[int, int], list[torch.Tensor]] = {}  # by shard and buffer
        self._prepared: dict[tuple[int, int], Any] = {}  # the same tensors in the form that the loops take
        self._of_shard: list[list[int]] = [[] for _ in range(store.arena.shards)]
        for index, parameter in enumerate(store.parameters):
            self._of_shard[parameter.shard].append(index)
        self.by_shard = [[tensors[index] for index in indices] for indices in self._of_shard]
        self._shard_loops = [tensor_loops(of_shard) for of_shard in self.by_shard]
        if len(self._shard_loops) == 1:  # the usual case: saves a call
            self.remember, self.changed = self._shard_loops[0].remember, self._shard_loops[0].changed  # type: ignore[method-assign]

    def show(self, pulled: list[int], written: Collection[int] = ()) -> None:
        """Point every parameter at its shard's pulled buffer: no copy. `written`: those for `count_writes`."""
        are_all = len(written) == self._count
        for place in enumerate(pulled):
            loops = self._shard_loops[place[0]]
            values = self._prepared.get(place)
            if values is None:
                values = self._prepared[place] = loops.prepare(self.of(*place), self._store.memory)
            loops.show(values, are_all)
        if written and not are_all:
            self.count_writes(written)

    def remember(self) -> None:
        """Accept all writes to the parameters, and their addresses, up to now."""
        for loops in self._shard_loops:
            loops.remember()

    def changed(self) -> int:
        """The index of the first parameter that was written to or pointed elsewhere since `remember`, or -1."""
        for loops, indices in zip(self._shard_loops, self._of_shard, strict=True):
            if (found := loops.changed()) >= 0:
                return indices[found]
        return -1

    def has_moved(self, index: int) -> bool:
        """Whether that parameter was pointed at other memory since `remember`."""
        shard = self._store.parameters[index].shard
        return self._shard_loops[shard].has_moved(self._of_shard[shard].index(index))

    @torch.inference_mode(mode=False)
    def of(self, shard: int, buffer: int) -> list[torch.Tensor]:
        """Tensors over the parameters of one shard in a weights buffer."""
        found = self._made.get((shard, buffer))
        if found is None:
            views: list[Any] = list(self._store.pulled_views(buffer))
            if any(self._are_halves):
                pairs = zip(views, self._store.half_views(buffer), self._are_halves, strict=True)
                views = [half if is_half else each for each, half, is_half in pairs]
            made = self._tensors_of(views)
            found = self._made[shard, buffer] = [made[index] for index in self._of_shard[shard]]
        return found

    def _pairs(self, buffers: list[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for shard, buffer in enumerate(buffers):
            yield from zip((tensor.data for tensor in self.by_shard[shard]), self.of(shard, buffer), strict=True)

    def misfit(self, buffers: list[int]) -> int:
        """The index of the first parameter that has not the type, shape or device of these buffers' values, or -1."""
        indices = itertools.chain.from_iterable(self._of_shard)
        for index, (tensor, value) in zip(indices, self._pairs(buffers), strict=True):
            if (tensor.dtype, tensor.shape, tensor.device) != (value.dtype, value.shape, value.device):
                return index
        return -1

    def are(self, buffers: list[int]) -> bool:
        """Whether every parameter has the bits of these buffers, one a shard."""
        pairs = ((_BITS[tensor.element_size()], tensor, value) for tensor, value in self._pairs(buffers))
        return all(torch.equal(tensor.view(bits), value.view(bits)) for bits, tensor, value in pairs)

    @torch.inference_mode(mode=False)
    def write(self, buffers: list[int]) -> None:
        """Write every parameter into these buffers."""
        for tensor, value in self._pairs(buffers):
            value.copy_(tensor)

    @torch.inference_mode(mode=False)
    def show_copies(self) -> None:
        """Replace the memory of every parameter by a private copy."""
        for loops in self._shard_loops:
            loops.show_copies()

    def count_writes(self, written: Collection[int]) -> None:
        """Let autograd refuse a backward through a graph of these parameters' earlier values, as after a step of torch's."""
        for loops, indices in zip(self._shard_loops, self._of_shard, strict=True):
            loops.count_writes([self.tensors[index] for index in indices if index in written])

    def leave(self) -> None:
        """Drop all tensors over the store's memory, because it is about to be unmapped."""
        self._made.clear()
        self._prepared.clear()
        self._shard_loops.clear()


def shaped_tensors(
    store: WeightsMemory, views: Sequence[npt.NDArray[Any]], dtypes: str | Sequence[str] | None = None
) -> list[torch.Tensor]:
    """Tensors over flat views of the store's memory, each with a storage of its exact size and the parameter's strides.

    `dtypes` names the tensors' types, or the type of all, because NumPy has no bfloat16; default: those of the views. The
    memory stays mapped as long as one of them lives. A table's view may be empty (its gradient), or have one value for each row
    (state of row-wise rules), and is then a column.
    """
    begin = np.frombuffer(store.memory, np.uint8).ctypes.data
    names = [view.dtype.name for view in views] if dtypes is None else dtypes
    names = [names] * len(views) if isinstance(names, str) else names
    made = []
    for view, parameter, dtype in zip(views, store.parameters, names, strict=True):
        shape, stride = parameter.shape, parameter.stride
        if parameter.is_table and view.size != parameter.size:
            shape, stride = (view.size, 1), (1, 1)
        place = view.ctypes.data - begin if view.size else 0
        made.append(torch.utils.dlpack.from_dlpack(store.memory.tensor(place, shape, stride, dtype)))
    return made


def check_shapes(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Raise ValueError unless there is a value for each tensor, of its shape."""
    if [value.shape for value in values] != [tensor.shape for tensor in tensors]:
        raise ValueError(
            f"expected a tensor for each of {len(tensors)} parameters, in their order and shapes, found"
            f" {[tuple(value.shape) for value in values]}"
        )


@contextlib.contextmanager
def shown(tensors: list[torch.Tensor], values: list[torch.Tensor]) -> Iterator[None]:
    """Show `values`, converted to the parameters' type and device, as these parameters inside the block; restore them then.

    No other worker may use the memory of `values`. Raises ValueError for other shapes.
    """
    check_shapes(tensors, values)
    kept = [tensor.data for tensor in tensors]
    try:
        for tensor, value in zip(tensors, values, strict=True):
            tensor.data = value.to(tensor.device, tensor.dtype)
        yield
    finally:
        for tensor, value in zip(tensors, kept, strict=True):
            tensor.data = value
