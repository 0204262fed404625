"""The gradients of one worker between backward and push: how they get into its slot, and which parameters have one.

A hook puts each gradient into the slot while it is in the cache. In single precision `p.grad` then is the slot; in half
precision it stays the user's own, and the slot holds what it rounds to. Refuses to know when a push is made, and by whom it
is read.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fastps.errors import UnsupportedError, UsageError
from fastps.store.worker import presence_of
from fastps.torch.tensor_loops import tensor_loops


class Gradients:
    """The gradients of `tensors`, whose `name(index)` is for errors, in `slots`: for each slot, a tensor a parameter.

    `keeps`: whether a slot may still be read after its push, since its worker waits for the fold.

    Attributes:
        present: the parameters that have a gradient in the slot.
        is_apart: whether the last push may still have to be read although its step was left by an error; see `part`.
    """

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
        self.present: set[int] = set()  # replaced where it shrinks, for it may be `_everything` itself
        self._keeps = keeps
        self.is_apart = False
        self._name = name
        self._everything = set(range(len(tensors)))
        self._presences: dict[frozenset[int], bytes] = {}
        self._loops = tensor_loops(tensors)
        self._prepared = [self._loops.prepare(views) for views in slots]

    def put(self, index: int, slot: int, tensor: torch.Tensor) -> None:
        """For the hook: autograd has just accumulated into `p.grad`; put it into the slot, and let p.grad be the slot.

        Further backwards of the same step then accumulate in place, and this finds nothing to do.
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
                f"parameter {self._name(index)!r}: expected a dense gradient, found {gradient.layout}; build the embedding"
                " with sparse=False"
            )
        if gradient.requires_grad:
            raise UnsupportedError(
                f"parameter {self._name(index)!r}: backward(create_graph=True) is not supported, for the gradient is moved"
                " into shared memory"
            )

    def zero(self, slot: int, set_to_none: bool) -> None:
        """Forget the gradients, as torch does; without `set_to_none` those that there are become zeros."""
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
        """Let every p.grad be the slot, with whatever was left there."""
        views = self._prepared[slot]
        if self._loops.other_gradient(views) >= 0:
            self._loops.set_gradients(views)

    def adopt(self, slot: int) -> bytes | None:
        """Gradients that did not come through the hook (set by hand, or unset) count as torch would count them.

        Returns the bitmap of the parameters that have a gradient; None: all.
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
        """The slot belongs to the server now. Where the step waits for the fold, it may still be read afterwards."""
        if not self._keeps:
            self._loops.drop_gradients()
        self.present = set()

    def clip_factor(self, slot: int, most: float, scale: float) -> float:
        """What the push's gradient, which goes with `scale`, is multiplied by for a norm of at most `most`, as torch clips.

        The norm is over all shards, and travels as this factor, so that a fold clips each push without a pass of its own.
        """
        if not self.present:
            return 1.0
        values = [self._values(slot, index) for index in sorted(self.present)]
        norm = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(values))))
        return min(1.0, most / (norm * scale + 1e-6))

    def _values(self, slot: int, index: int) -> torch.Tensor:
        return self.slots[slot][index]

    def leave(self) -> None:
        """These slots are about to go, and with them every p.grad that is one."""
        self._loops.drop_gradients()

    def part(self) -> None:
        """The slot may still have to be read, and its worker goes on: p.grad is no slot any more until the next `adopt`."""
        self.release()
        self.keep()
        self.is_apart = True

    def keep(self) -> None:
        """At the end: a p.grad that is a slot becomes a copy of its own."""
        for index, tensor in enumerate(self.tensors):
            if tensor.grad is not None and any(tensor.grad is views[index] for views in self.slots):
                tensor.grad = tensor.grad.clone(memory_format=torch.preserve_format)


class HalfGradients(Gradients):
    """The same where slots are in half precision: `p.grad` is never the slot, and stays as it was after the push.

    A gradient that was changed after backward (clipped by hand, say) is known by its version counter, and put again.
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
        """For the hook: autograd has just accumulated into `p.grad`; put what that rounds to into the slot."""
        gradient = tensor.grad
        if gradient is not None and not self.is_apart:
            self.check(index, gradient)
            self._put_into(slot, index, gradient)

    def _put_into(self, slot: int, index: int, gradient: torch.Tensor) -> None:
        self.slots[slot][index].copy_(gradient)
        self._put[index] = gradient, gradient._version
        self.present.add(index)

    def zero(self, slot: int, set_to_none: bool) -> None:
        """Forget the gradients, as torch does."""
        self.present = set()
        if set_to_none:
            self._loops.drop_gradients()
            return
        for tensor in self.tensors:
            if tensor.grad is not None:
                tensor.grad.zero_()

    def expose(self, slot: int) -> None:
        """Refused: p.grad cannot be a slot in half precision."""
        raise UsageError("expose_gradients() needs gradients that are pushed in single precision: leave push_dtype out")

    def adopt(self, slot: int) -> bytes | None:
        """Put what was changed or set since the hook; what has no gradient now is not pushed."""
        self.is_apart = False
        for index, tensor in enumerate(self.tensors):
            gradient, put = tensor.grad, self._put[index]
            if gradient is None:
                self.present.discard(index)
            elif index not in self.present or put is None or put[0] is not gradient or put[1] != gradient._version:
                self._put_into(slot, index, gradient)
        return self._presence()

    def release(self) -> None:
        """The next push begins with nothing in its slot."""
        self._put = [None] * len(self.tensors)
        self.present = set()

    def leave(self) -> None:
        """No p.grad is a slot."""

    def _values(self, slot: int, index: int) -> torch.Tensor:
        gradient = self.tensors[index].grad
        assert gradient is not None
        return gradient


def loss_scaling(left: Mapping[str, Any]) -> tuple[float, bool]:
    """What a GradScaler left at an optimizer: the factor that undoes its scale, and whether it found infs: a null push."""
    found_inf, grad_scale = left.get("found_inf"), left.get("grad_scale")
    return 1.0 if grad_scale is None else 1.0 / float(grad_scale), found_inf is not None and bool(found_inf)
