"""Tensors as the addresses and numbers that a collective takes, with a clear refusal of those that it does not.

A collective reads and writes contiguous memory of the CPU. A tensor that is not contiguous gets a contiguous copy, and a
result is copied back.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from fastps.collectives.group import Collective
from fastps.errors import UnsupportedError
from fastps.kernels.collectives.exchange import ELEMENTS, KINDS, NO_REDUCTION, REDUCTIONS, can_reduce

_NAMES = {getattr(torch, name): name for name in ELEMENTS} | {torch.bool: "uint8"}
# Types that are moved and not reduced have numbers of their own, so that ranks notice if theirs differ.
_MOVED = (
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    *(getattr(torch, name) for name in ("uint16", "uint32", "uint64") if hasattr(torch, name)),
)
_REDUCTION_NAMES = {
    ReduceOp.SUM: "sum", ReduceOp.AVG: "average", ReduceOp.PRODUCT: "product", ReduceOp.MIN: "min", ReduceOp.MAX: "max",
    ReduceOp.BAND: "and", ReduceOp.BOR: "or", ReduceOp.BXOR: "xor",
}  # fmt: skip
_OF_BOOLS = {"sum": "max", "max": "max", "or": "max", "product": "min", "min": "min", "and": "min", "xor": "xor"}


def check(tensor: torch.Tensor, what: str) -> None:
    """Raise UnsupportedError for a tensor that is sparse, quantized or not in the memory of the CPU."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_quantized:
        found = f"on {tensor.device}" if tensor.device.type != "cpu" else "sparse or quantized"
        raise UnsupportedError(
            f"{what} of the backend fastps takes dense tensors of the CPU, found one that is {found}: copy it, or use another"
            " backend for it"
        )


def moved_element(dtype: torch.dtype, what: str) -> int:
    """The number of a type in a collective that reduces nothing."""
    if dtype in _MOVED:
        return 128 + _MOVED.index(dtype)
    if dtype in _NAMES:
        return ELEMENTS[_NAMES[dtype]]
    raise UnsupportedError(f"{what} of the backend fastps does not take {dtype}: use another type")


def reduction_of(op: Any, dtype: torch.dtype, what: str) -> tuple[int, int]:
    """The numbers of an element type and a reduction. Raises UnsupportedError."""
    kind = getattr(op, "op", op)
    name = _REDUCTION_NAMES.get(kind)
    if name is not None and dtype == torch.bool:
        name = _OF_BOOLS.get(name)
    element = ELEMENTS.get(_NAMES.get(dtype, ""))
    if name is None or element is None or not can_reduce(element, REDUCTIONS[name]):
        raise UnsupportedError(
            f"{what} of the backend fastps does not reduce {dtype} by {kind}: it has SUM, PRODUCT, MIN and MAX of floats and"
            " integers, AVG of floats, and BAND, BOR and BXOR of integers"
        )
    return element, REDUCTIONS[name]


class Memory:
    """The contiguous memory of the tensors of one collective, and the copies that go back when it is done."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._backs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.keeps: list[torch.Tensor] = []

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor with these values."""
        check(tensor, self._what)
        self.keeps.append(tensor.detach().contiguous())
        return self.keeps[-1]

    def written(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor whose values `finish` brings into this one; it begins with the tensor's own values."""
        made = self.read(tensor)
        if not tensor.is_contiguous():
            self._backs.append((tensor.detach(), made))
        return made

    def read_all(self, tensors: Sequence[torch.Tensor], like: torch.Tensor) -> list[torch.Tensor]:
        """`read` for tensors of the size and the type of one."""
        same_size(tensors, like, self._what)
        return [self.read(tensor) for tensor in tensors]

    def written_all(self, tensors: Sequence[torch.Tensor], like: torch.Tensor) -> list[torch.Tensor]:
        """`written` for tensors of the size and the type of one."""
        same_size(tensors, like, self._what)
        return [self.written(tensor) for tensor in tensors]

    def collective(
        self, like: torch.Tensor, inputs: list[torch.Tensor], outputs: list[torch.Tensor], *, root: int = 0, op: Any = None
    ) -> Collective:
        """The collective over contiguous tensors. `like` has the size and the type of what one rank gives another."""
        element, reduction = (
            reduction_of(op, like.dtype, self._what)
            if op is not None
            else (moved_element(like.dtype, self._what), NO_REDUCTION)
        )
        here, there = ([tensor.data_ptr() for tensor in tensors] for tensors in (inputs, outputs))
        return Collective(KINDS[self._what], element, reduction, root, like.nbytes, here, there)

    def finish(self) -> Callable[[], None] | None:
        """What copies results back; None if nothing has to be copied."""
        return self._copy_back if self._backs else None

    def _copy_back(self) -> None:
        for tensor, copy in self._backs:
            tensor.copy_(copy)


def same_size(tensors: Sequence[torch.Tensor], like: torch.Tensor, what: str) -> None:
    """Raise UnsupportedError unless all tensors have the type and the number of elements of one."""
    for tensor in tensors:
        if tensor.dtype != like.dtype or tensor.numel() != like.numel():
            raise UnsupportedError(
                f"{what} of the backend fastps takes tensors of one type and size, found {tensor.numel():,} of {tensor.dtype}"
                f" beside {like.numel():,} of {like.dtype}"
            )
