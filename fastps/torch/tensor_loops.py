"""The loops over a model's tensors that each step makes: compiled against torch's C++ tensors, or over Python's attributes.

Both have the same effect; the first is faster (`fastps bench step --against attributes`). It needs the very torch that it was
built against, so another one gets the second, and so does who sets FASTPS_TENSOR_LOOPS=attributes; `why_not_compiled` says it.
Refuses to know when a step makes which loop.
"""

import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Protocol

import torch

from fastps.errors import UsageError
from fastps.kernels.tensors.attributes import Attribute

_compiled: ModuleType | None = None
try:
    from fastps.kernels.tensors import torch_tensors

    _compiled = torch_tensors
except ImportError as _error:  # not built, or for a torch whose symbols are others
    _not_there = str(_error)

INSTALLED = torch.__version__.partition("+")[0]


class TensorLoops(Protocol):
    """Loops over a list of tensors that stays as it is; what they give them is prepared once."""

    def prepare(self, values: list[torch.Tensor], memory: object = None) -> Any:
        """These tensors, a value a tensor, as the other loops take them; they stay as they are.

        memory: the one object that all of them are views of, if there is one. Values of the same memory are shown faster: a
        tensor keeps one storage then, whose pointer moves, and so whatever else shares it (`detach()`) shows the same.
        Raises ValueError where there are not as many values as tensors.
        """
        ...

    def show(self, values: Any) -> None:
        """Let `data` of each tensor be that of its of `values`: no copy, and no write as version counters count them."""
        ...

    def remember(self) -> None:
        """What was written to the tensors up to now, and where they were pointed, is no change."""
        ...

    def changed(self) -> int:
        """The index of the first tensor that was written to or pointed elsewhere since `remember`, or -1; `show` is neither."""
        ...

    def has_moved(self, index: int) -> bool:
        """Whether a tensor was pointed at other memory since `remember`, and not by `show`."""
        ...

    def set_gradients(self, gradients: Any) -> None:
        """Let `grad` of each tensor be its of `gradients`."""
        ...

    def drop_gradients(self) -> None:
        """Let `grad` of each tensor be None."""
        ...

    def other_gradient(self, gradients: Any) -> int:
        """The index of the first tensor whose `grad` is not the very one of `gradients`, or -1."""
        ...


class PlainLoops:
    """The loops over Python's attributes, for any torch; see TensorLoops."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._data = Attribute("data", tensors)
        self._grad = Attribute("grad", tensors)
        self._counters = Attribute("_version", tensors)
        self.remember()

    def prepare(self, values: list[torch.Tensor], memory: object = None) -> list[torch.Tensor]:
        """See TensorLoops."""
        if len(values) != len(self._tensors):
            raise ValueError(f"expected {len(self._tensors)} tensors, found {len(values)}")
        return list(values)

    def show(self, values: list[torch.Tensor]) -> None:
        """See TensorLoops."""
        self._data.set(self._tensors, values)
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]

    def remember(self) -> None:
        """See TensorLoops."""
        self._remembered: list[int] = self._counters.get(self._tensors)
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]

    def changed(self) -> int:
        """See TensorLoops."""
        written = self._counters.are(self._tensors, self._remembered)
        if written >= 0:
            return written
        return next((index for index in range(len(self._tensors)) if self.has_moved(index)), -1)

    def has_moved(self, index: int) -> bool:
        """See TensorLoops."""
        return self._tensors[index].data_ptr() != self._addresses[index]

    def set_gradients(self, gradients: list[torch.Tensor]) -> None:
        """See TensorLoops."""
        self._grad.set(self._tensors, gradients)

    def drop_gradients(self) -> None:
        """See TensorLoops."""
        self._grad.set_all(self._tensors, None)

    def other_gradient(self, gradients: list[torch.Tensor]) -> int:
        """See TensorLoops."""
        return self._grad.are(self._tensors, gradients)


def why_not_compiled() -> str | None:
    """Why loops are made over attributes, and what to do about it; None: they are not.

    Raises UsageError where FASTPS_TENSOR_LOOPS is neither "auto" nor "attributes".
    """
    wanted = os.environ.get("FASTPS_TENSOR_LOOPS", "auto")
    if wanted not in ("auto", "attributes"):
        raise UsageError(f"FASTPS_TENSOR_LOOPS: expected auto or attributes, found {wanted!r}")
    if wanted == "attributes":
        return "loops over Python's attributes, for FASTPS_TENSOR_LOOPS says so"
    advice = "for faster steps install fastps again, beside this torch (pip install --force-reinstall --no-deps)"
    if _compiled is None:
        return f"the compiled loops over tensors are not there ({_not_there}): {advice}"
    if _compiled.BUILT_FOR != INSTALLED:
        return f"the compiled loops over tensors are for torch {_compiled.BUILT_FOR}, and this is {INSTALLED}: {advice}"
    return None


def tensor_loops(tensors: Sequence[Any]) -> TensorLoops:
    """Loops over these tensors, as this installation makes them. Raises UsageError as `why_not_compiled`.

    >>> parameter = torch.nn.Parameter(torch.zeros(2))
    >>> loops = tensor_loops([parameter])
    >>> loops.show(loops.prepare([torch.ones(2)]))
    >>> parameter.tolist(), loops.changed()
    ([1.0, 1.0], -1)
    """
    if _compiled is None or why_not_compiled():
        return PlainLoops(list(tensors))
    loops: TensorLoops = _compiled.CompiledLoops(list(tensors))
    return loops
