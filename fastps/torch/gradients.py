"""The gradients of one worker between backward and push: how they reach its slot, and which parameters have one.

A hook copies each gradient into the slot while it is in the cache. `p.grad` then becomes a view of the slot, if the slot's type
is that of all parameters. Otherwise `p.grad` keeps memory of its own, and the slot holds the converted values.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from fastps.errors import UnsupportedError, UsageError
from fastps.store.presence import presence_of
from fastps.torch.tensor_loops import tensor_loops


class Gradients:
    """The gradients of `tensors` in `slots`, which has one tensor per parameter for each slot.

    Args:
        tensors: the parameters.
        slots: for each slot, the tensors over it.
        keeps: whether p.grad may stay a view of the slot after a push, because the worker waits for the fold.
        name: gives a parameter's name for errors.

    Attributes:
        present: the parameters that have a gradient in the slot.
        is_apart: whether an error ended the last step before its push was folded; see `detach`.
        accumulates: whether the script has said that more backwards follow before the push.
    """

    accumulates = False

    def __init__(
        self,
        tensors: list[torch.Tensor],
        slots: Sequence[list[torch.Tensor]],
        *,
        keeps: bool,
        name: Callable[[int], str],
    ) -> None:
        self.tensors = tensors
        self.slots = slots
        self.present: set[int] = set()  # never shrunk in place: it may be `_everything` itself
        self._keeps = keeps
        self.is_apart = False
        self._name = name
        self._everything = set(range(len(tensors)))
        self._presences: dict[frozenset[int], bytes] = {}
        self._loops = tensor_loops(tensors)
        self._prepared = [self._loops.prepare(views) for views in slots]

    def put(self, index: int, slot: int, tensor: torch.Tensor) -> None:
        """Copy `p.grad`, into which autograd has just accumulated, into the slot, and point p.grad at the slot.

        Further backwards of the same step then accumulate in place, and this call copies nothing.
        """
        gradient = tensor.grad
        view = self.slots[slot][index]
        if gradient is view:
            self.present.add(index)
        elif gradient is not None and not self.is_apart:
            self.check(index, gradient)
            view.copy_(gradient)
            tensor.grad = view
            self.present.add(index)

    def check(self, index: int, gradient: torch.Tensor) -> None:
        """Raise UnsupportedError for a gradient that cannot be pushed."""
        if gradient.layout is not torch.strided:
            raise UnsupportedError(
                f"parameter {self._name(index)!r}: expected a dense gradient, found {gradient.layout}; build its layer with"
                " sparse=True before wrapping, so that fastps keeps it as a table, or give up the sparse gradient"
            )
        if gradient.requires_grad:
            raise UnsupportedError(
                f"parameter {self._name(index)!r}: backward(create_graph=True) is not supported, because the gradient is"
                " moved into shared memory"
            )

    def zero(self, slot: int, set_to_none: bool) -> None:
        """Clear the gradients, as torch does; without `set_to_none` existing gradients become zeros."""
        self.present = set()
        if set_to_none:
            self._loops.drop_gradients()
            return
        for index, tensor in enumerate(self.tensors):
            if tensor.grad is not None and self.is_apart:
                tensor.grad.zero_()
            elif tensor.grad is not None:
                tensor.grad = self.slots[slot][index].zero_()
                self.present.add(index)

    def expose(self, slot: int) -> None:
        """Point every p.grad at the slot, which keeps its old values."""
        views = self._prepared[slot]
        if self._loops.other_gradient(views) >= 0:
            self._loops.set_gradients(views)

    def collect(self, slot: int) -> bytes | None:
        """Copy gradients that did not come through the hook into the slot; skip parameters whose p.grad is None, as torch does.

        Returns the bitmap of the parameters that have a gradient; None if all have one.
        """
        self.is_apart = False
        if self._loops.other_gradient(self._prepared[slot]) < 0:
            self.present = self._everything
            return None
        self.present = set()
        views = self.slots[slot]
        for index, tensor in enumerate(self.tensors):
            gradient = tensor.grad
            if gradient is None:
                continue
            if gradient is not views[index]:
                self.check(index, gradient)
                views[index].copy_(gradient)
            self.present.add(index)
        return self._presence()

    def _presence(self) -> bytes | None:
        if len(self.present) == len(self.tensors):
            return None
        present = frozenset(self.present)
        bits = self._presences.get(present)
        if bits is None:
            bits = self._presences[present] = presence_of(sorted(present), len(self.tensors))
        return bits

    def release(self) -> None:
        """Give up the slot after its push; p.grad stays only if the step waits for the fold."""
        if not self._keeps:
            self._loops.drop_gradients()
        self.present = set()

    def clip_factor(self, slot: int, most: float, scale: float) -> float:
        """The factor that clips the push's gradient, multiplied by `scale`, to a norm of at most `most`, as torch clips.

        The norm spans all shards. It travels as this factor, so a fold clips each push without a separate pass.
        """
        return min(1.0, most / (self.norm(slot) * scale + 1e-6)) if self.present else 1.0

    def norm(self, slot: int) -> float:
        """The norm of the push's gradient over all parameters that have one."""
        return norm_of([self._values(slot, index) for index in sorted(self.present)])

    def _values(self, slot: int, index: int) -> torch.Tensor:
        return self.slots[slot][index]

    def unbind(self) -> None:
        """Drop every p.grad that is a view of these slots, because the slots are about to be unmapped."""
        self._loops.drop_gradients()

    def detach(self) -> None:
        """Separate p.grad from the slot until the next `collect`: a fold may still read the slot while the worker goes on."""
        self.release()
        self.clone()
        self.is_apart = True

    def clone(self) -> None:
        """Replace every p.grad that is a view of a slot by a copy of its own."""
        for index, tensor in enumerate(self.tensors):
            if tensor.grad is not None and any(tensor.grad is views[index] for views in self.slots):
                tensor.grad = tensor.grad.clone(memory_format=torch.preserve_format)


class HalfGradients(Gradients):
    """Gradients in slots of another type than `p.grad`, which is never a view of the slot, and stays unchanged after the push.

    The version counter of a gradient tells whether it was changed after backward (clipped by hand, say); such a gradient is
    copied again.
    """

    def __init__(
        self,
        tensors: list[torch.Tensor],
        slots: Sequence[list[torch.Tensor]],
        *,
        keeps: bool,
        name: Callable[[int], str],
    ) -> None:
        super().__init__(tensors, slots, keeps=keeps, name=name)
        self._put: list[tuple[torch.Tensor, int] | None] = [None] * len(tensors)  # the gradient and its version in the slot

    def put(self, index: int, slot: int, tensor: torch.Tensor) -> None:
        """Round `p.grad`, into which autograd has just accumulated, into the slot."""
        gradient = tensor.grad
        if gradient is not None and not self.is_apart:
            self.check(index, gradient)
            self._put_into(slot, index, gradient)

    def _put_into(self, slot: int, index: int, gradient: torch.Tensor) -> None:
        self.slots[slot][index].copy_(gradient)
        self._put[index] = gradient, gradient._version
        self.present.add(index)

    def zero(self, slot: int, set_to_none: bool) -> None:
        """Clear the gradients, as torch does."""
        self.present = set()
        if set_to_none:
            self._loops.drop_gradients()
            return
        for tensor in self.tensors:
            if tensor.grad is not None:
                tensor.grad.zero_()

    def expose(self, slot: int) -> None:
        """Raise UsageError: p.grad cannot be a view of a slot of another type."""
        raise UsageError(
            "expose_gradients() needs parameters of one type, and gradients that are pushed in it: leave push_dtype out"
        )

    def collect(self, slot: int) -> bytes | None:
        """Copy gradients that were changed or set since the hook; parameters whose p.grad is None are not pushed."""
        self.is_apart = False
        for index, tensor in enumerate(self.tensors):
            gradient, put = tensor.grad, self._put[index]
            if gradient is None:
                self.present.discard(index)
            elif index not in self.present or put is None or put[0] is not gradient or put[1] != gradient._version:
                self.check(index, gradient)
                self._put_into(slot, index, gradient)
        return self._presence()

    def release(self) -> None:
        """Forget which gradients are in the slot: the next push begins empty."""
        self._put = [None] * len(self.tensors)
        self.present = set()

    def unbind(self) -> None:
        """Do nothing: no p.grad is a view of a slot."""

    def _values(self, slot: int, index: int) -> torch.Tensor:
        gradient = self.tensors[index].grad
        assert gradient is not None
        return gradient


def norm_of(tensors: list[torch.Tensor]) -> float:
    """The norm of all values of these tensors.

    >>> norm_of([torch.tensor([3.0]), torch.tensor([0.0, 4.0])])
    5.0
    """
    if not tensors:
        return 0.0
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors, dtype=dtype))))


def hooked(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Let autograd call `hook` after it has accumulated into `tensor.grad`, also once a parameter that is frozen now trains."""
    trains = tensor.requires_grad
    try:
        tensor.requires_grad_(True)  # torch refuses to hook into a frozen one
        handle: RemovableHandle = tensor.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return handle
    finally:
        tensor.requires_grad_(trains)


def loss_scaling(left: Mapping[str, Any]) -> tuple[float, bool]:
    """What a GradScaler set on an optimizer: the factor that undoes its scale, and whether it found infs (a null push)."""
    found_inf, grad_scale = left.get("found_inf"), left.get("grad_scale")
    return 1.0 if grad_scale is None else 1.0 / float(grad_scale), found_inf is not None and bool(found_inf)
