"""The weights of one worker between two pulls: how a model's parameters show a published buffer.

`p.data` points at the buffer that the worker has pinned; nothing is copied. It does so in a private view of the job's memory:
what a script writes to its model stays in its process until the job takes it.
"""

import contextlib
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from fastps.torch.tensor_loops import tensor_loops
from fastps.torch.tensors import Tensors

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by an element's bytes: NaNs differ from themselves


class Weights:
    """What a model's parameters show of their job.

    Attributes:
        own: the numbers of parameters that are memory of the script's own, and that `show` leaves alone.
        shown: the buffers, one a shard, that the parameters have shown or taken last.
    """

    def __init__(self, tensors: Tensors, own: Collection[int] = ()) -> None:
        self.tensors, self._store = tensors, tensors.store
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
        return {place for place, index in enumerate(self._of_shard[shard]) if index in self.tensors.private}

    def show(self, pulled: list[int], written: Collection[int] = ()) -> None:
        """Point every parameter at its shard's pulled buffer: no copy. If that is another, `count_writes` of `written`."""
        if pulled == self.shown:
            written = ()
        elif (view := self.tensors.view) is not None:
            view.renew()  # not where the same buffers are shown again: what is written there may still be taken
        are_all = len(written) >= self._count
        for shard, buffer in enumerate(pulled):
            values = self._prepared[shard].get(buffer) or self._prepare(shard, buffer)
            self._shard_loops[shard].show(values, are_all)
        if written and not are_all:
            self.count_writes(written)
        self.shown = pulled.copy()

    def _prepare(self, shard: int, buffer: int) -> Any:
        prepared = self._shard_loops[shard].prepare(self.of(shard, buffer), self.tensors.view or self._store.memory)
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
            made = self.tensors.shown(buffer)
            found = self._made[shard, buffer] = [made[index] for index in self._of_shard[shard]]
        return found

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
        for index, value in enumerate(self.tensors.values(self.shown if buffers is None else buffers)) if among else ():
            data, bits = self.tensors[index].data, _BITS[value.element_size()]
            if index in among and not torch.equal(data.contiguous().view(bits), value.contiguous().view(bits)):
                found[index] = data if data.stride() == value.stride() else data.clone()  # it may be the value, transposed
        return found

    @torch.inference_mode(mode=False)
    def write(self, buffers: list[int], written: Mapping[int, torch.Tensor]) -> None:
        """Write these parameters into these buffers: halves, and the masters of those that are another half now."""
        masters, values = self.tensors.weights(buffers), self.tensors.values(buffers)
        for index, data in written.items():
            masters[index].copy_(merged(masters[index], values[index], data))
            values[index].copy_(data)

    @torch.inference_mode(mode=False)
    def take(self, buffers: list[int], among: Collection[int] | None = None) -> None:
        """Copy these buffers' values into the script's own memory, of these parameters or all, where they are others."""
        values = self.tensors.values(buffers)
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
        if self.tensors.view is not None:
            self.tensors.view.let_write()  # arrays of the script may look into it, and the handler may be replaced from now on
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
