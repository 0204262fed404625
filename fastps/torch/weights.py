"""The weights of one worker between two pulls: how a model's parameters show a published buffer.

`p.data` points at the buffer that the worker has pinned; nothing is copied. It does so in a private view of the job's memory:
what a script writes to its model stays in its process until the job takes it.
"""

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastps.kernels.memory.mapping import SharedMapping
from fastps.membership.job_memory import WeightsMemory
from fastps.torch.tensor_loops import tensor_loops

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by an element's bytes: NaNs differ from themselves


class Weights:
    """The parameters `tensors` of a store. `tensors_of` makes tensors with their strides from flat views, one per parameter.

    A flat view is of the weights, or of their halves where the parameter is of that type.

    Attributes:
        view: the private mapping that the parameters show, tables left out; None: memory that other workers may write.
        own: the numbers of parameters that are memory of the script's own, and that `show` leaves alone.
        shown: the buffers, one a shard, that the parameters have shown or taken last.
    """

    def __init__(
        self,
        tensors: list[torch.Tensor],
        store: WeightsMemory,
        tensors_of: Callable[[list[Any]], list[torch.Tensor]],
        view: SharedMapping | None = None,
        own: Collection[int] = (),
    ) -> None:
        self.tensors, self.view = tensors, view
        self._are_halves = [tensor.dtype in (torch.float16, torch.bfloat16) for tensor in tensors]
        self._store = store
        self._tensors_of = tensors_of
        self.shown: list[int] = []
        self.leave_alone(own)

    def leave_alone(self, own: Collection[int]) -> None:
        """Show the job's weights as all parameters but these, from the next `show` on."""
        self.own = set(own)
        self._count = len(self.tensors) - len(self.own)
        self._made: dict[tuple[int, int], list[torch.Tensor]] = {}  # by shard and buffer
        self._of_shard: list[list[int]] = [[] for _ in range(self._store.arena.shards)]
        self._prepared: list[dict[int, Any]] = [{} for _ in self._of_shard]  # the same by buffer, as the loops take them
        for index, parameter in enumerate(self._store.parameters):
            if index not in self.own:
                self._of_shard[parameter.shard].append(index)
        self.by_shard = [[self.tensors[index] for index in indices] for indices in self._of_shard]
        self._shard_loops = [tensor_loops(self.by_shard[shard], self._uncounted(shard)) for shard in range(len(self.by_shard))]
        if len(self._shard_loops) == 1 and not self.own:  # the usual case: saves a call
            self.remember, self.changed = self._shard_loops[0].remember, self._shard_loops[0].changed  # type: ignore[method-assign]

    def _uncounted(self, shard: int) -> set[int]:
        """The places in a shard's loops of parameters whose memory is this process's own: a write to it harms nobody."""
        indices = enumerate(self._of_shard[shard]) if self.view is not None else ()
        return {place for place, index in indices if not self._store.parameters[index].is_table}

    def show(self, pulled: list[int], written: Collection[int] = ()) -> None:
        """Point every parameter at its shard's pulled buffer: no copy. If that is another, `count_writes` of `written`."""
        if pulled == self.shown:
            written = ()
        elif self.view is not None:
            self.view.renew()  # not where the same buffers are shown again: what is written there may still be taken
        are_all = len(written) >= self._count
        for shard, buffer in enumerate(pulled):
            values = self._prepared[shard].get(buffer) or self._prepare(shard, buffer)
            self._shard_loops[shard].show(values, are_all)
        if written and not are_all:
            self.count_writes(written)
        self.shown = pulled.copy()

    def _prepare(self, shard: int, buffer: int) -> Any:
        prepared = self._shard_loops[shard].prepare(self.of(shard, buffer), self.view or self._store.memory)
        self._prepared[shard][buffer] = prepared
        return prepared

    def remember(self) -> None:
        """Accept all writes to the parameters that torch counts, and their addresses, up to now."""
        for loops in self._shard_loops:
            loops.remember()

    def changed(self) -> int:
        """The number of the first parameter that was pointed elsewhere since `remember`, or -1.

        Also of one that was written to, as far as torch counts that, where the write is in memory that others read.
        """
        for loops, indices in zip(self._shard_loops, self._of_shard, strict=True):
            if (found := loops.changed()) >= 0:
                return indices[found]
        return -1

    @torch.inference_mode(mode=False)
    def of(self, shard: int, buffer: int) -> list[torch.Tensor]:
        """Tensors over the parameters of one shard in a weights buffer, as they are shown."""
        found = self._made.get((shard, buffer))
        if found is None:
            made = self._tensors_of(self._views(buffer))
            found = self._made[shard, buffer] = [made[index] for index in self._of_shard[shard]]
        return found

    def _views(self, buffers: int | Sequence[int]) -> list[Any]:
        views: list[Any] = list(self._store.pulled_views(buffers))
        if not any(self._are_halves):
            return views
        pairs = zip(views, self._store.half_views(buffers), self._are_halves, strict=True)
        return [half if is_half else each for each, half, is_half in pairs]

    @torch.inference_mode(mode=False)
    def values(self, buffers: list[int]) -> list[torch.Tensor]:
        """Tensors over all parameters in these buffers, one a shard, in the memory that all workers share."""
        return shaped_tensors(self._store, self._views(buffers), [parameter.type for parameter in self._store.parameters])

    def misfit(self) -> int:
        """The number of the first parameter of another type, shape or device than the job's, or -1.

        Also of one whose memory would not follow it: a part of a larger tensor's, or torch's shared memory.
        """
        for index, (tensor, parameter) in enumerate(zip(self.tensors, self._store.parameters, strict=True)):
            data = tensor.data
            storage = data.untyped_storage()
            follows = index in self.own or (storage.nbytes() == data.nbytes and not storage.is_shared())
            form = getattr(torch, parameter.type), parameter.shape, "cpu"
            if not follows or form != (data.dtype, data.shape, data.device.type):
                return index
        return -1

    def differing(self, among: Collection[int], buffers: list[int] | None = None) -> dict[int, torch.Tensor]:
        """Those of these parameters that have not the bits of the shown buffers, or of others, by number, with their data."""
        found = {}
        for index, value in enumerate(self.values(self.shown if buffers is None else buffers)) if among else ():
            data, bits = self.tensors[index].data, _BITS[value.element_size()]
            if index in among and not torch.equal(data.contiguous().view(bits), value.contiguous().view(bits)):
                found[index] = data
        return found

    @torch.inference_mode(mode=False)
    def write(self, buffers: list[int], written: Mapping[int, torch.Tensor]) -> None:
        """Write these parameters into these buffers: halves, and the masters of those that are another half now."""
        masters = shaped_tensors(self._store, self._store.weight_views(buffers))
        values = self.values(buffers)
        for index, data in written.items():
            masters[index].copy_(merged(masters[index], values[index], data))
            values[index].copy_(data)

    @torch.inference_mode(mode=False)
    def take(self, buffers: list[int], among: Collection[int] | None = None) -> None:
        """Copy these buffers' values into the script's own memory, of these parameters or all, where they are others."""
        values = self.values(buffers)
        with torch.no_grad():
            for index in self.differing(self.own if among is None else among, buffers):
                self.tensors[index].copy_(values[index])
        self.shown = list(buffers)

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
        if self.view is not None:
            self.view.let_write()  # arrays of the script may look into it, and the handler may be replaced from now on
        self._made.clear()
        self._prepared.clear()
        self._shard_loops.clear()


def digest_of(written: Mapping[int, torch.Tensor]) -> int:
    """48 bits that tell these values, by number of their parameters, from others; never 0.

    >>> digest_of({0: torch.zeros(2)}) == digest_of({0: torch.zeros(2)}) != digest_of({1: torch.zeros(2)})
    True
    """
    found = hashlib.blake2b(digest_size=6)
    for index in sorted(written):
        found.update(index.to_bytes(8, "little"))
        found.update(written[index].detach().reshape(-1).view(torch.uint8).numpy())
    return int.from_bytes(found.digest(), "little") or 1


def merged(master: torch.Tensor, half: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
    """The weights `written` in full precision: the digits of `master` stay where the half that it shows is written unchanged.

    >>> merged(torch.tensor([0.1, 0.1]), torch.tensor([0.1, 0.1]).half(), torch.tensor([0.1, 2.0]).half()).tolist()
    [0.10000000149011612, 2.0]
    """
    if written.dtype == master.dtype:
        return written
    bits = _BITS[half.element_size()]
    return torch.where(written.view(bits) == half.view(bits), master, written.to(master.dtype))


def shaped_tensors(
    store: WeightsMemory,
    views: Sequence[npt.NDArray[Any]],
    dtypes: str | Sequence[str] | None = None,
    memory: SharedMapping | None = None,
) -> list[torch.Tensor]:
    """Tensors over flat views of the store's memory, each with a storage of its exact size and the parameter's strides.

    `memory`: another mapping of the same, in which the tensors lie instead.
    `dtypes` names the tensors' types, or the type of all, because NumPy has no bfloat16; default: those of the views. The
    memory stays mapped as long as one of them lives. A view may be empty (a table's gradient, a frozen parameter's state), or
    have one value for each row (state of row-wise rules), and is then a column.
    """
    begin = np.frombuffer(store.memory, np.uint8).ctypes.data
    names = [view.dtype.name for view in views] if dtypes is None else dtypes
    names = [names] * len(views) if isinstance(names, str) else names
    made = []
    for view, parameter, dtype in zip(views, store.parameters, names, strict=True):
        shape, stride = parameter.shape, parameter.stride
        if view.size != parameter.size:
            shape, stride = (view.size, 1), (1, 1)
        place = view.ctypes.data - begin if view.size else 0
        made.append(torch.utils.dlpack.from_dlpack((memory or store.memory).tensor(place, shape, stride, dtype)))
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
