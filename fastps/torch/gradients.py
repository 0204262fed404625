"""The gradients of one worker between backward and push: how they reach its slot, and which parameters have one.

A hook copies each gradient into the slot while it is in the cache, and `p.grad` becomes a view of the slot. A script that keeps
such a tensor keeps its values: before the slot is written again, or given up, a view that the script holds moves to a copy.
Where that cannot be done (the slot's type is not the parameter's, or the loops are not compiled), `p.grad` keeps memory of its
own, and `step()` copies it into the slot.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from fastps.errors import UnsupportedError, UsageError
from fastps.store.row_slots import presence_of
from fastps.torch.foreign import write_error
from fastps.torch.tensor_loops import Place, place_of, tensor_loops
from fastps.torch.tensors import Tensors

logger = logging.getLogger("fastps.torch")

_bitmap = functools.lru_cache(presence_of)  # the steps of a script often have the same parameters


class Gradients:
    """The gradients of the parameters with these numbers in the slots of a worker. A place among these is an index here.

    `keeps`: whether p.grad may stay a view of the slot after a push, because the worker waits for the fold. `is_hooked`:
    whether hooks of backward call `put`. Without them `collect` copies all gradients at once, and p.grad stays autograd's
    tensor: on a GPU each copy is a launch.
    """

    is_hooked = True
    accumulates = False  # whether the script has said that more backwards follow before the push

    def __init__(self, of: Tensors, numbers: Sequence[int], lane: int, *, keeps: bool, is_hooked: bool = True) -> None:
        self._of, self._numbers, self._lane = of, numbers, lane
        self.tensors = tensors = [of[number] for number in numbers]
        self.is_hooked = is_hooked
        self.slots = [self._views(slot) for slot in range(of.store.arena.slots)]
        self._slot_places = [[place_of(view) for view in each] for each in self.slots]
        # The parameters that had a gradient at the last `collect`; never shrunk in place: it may be `_everything` itself.
        self.present: set[int] = set()
        self.keeps_slot = keeps
        self._dropped: set[int] = set()  # of which `release` has taken p.grad, and the script has not cleared it since
        self._is_told = False  # whether a step without a gradient was warned of
        self.is_apart = False  # whether an error ended the last step before its push was folded; see `detach`
        self._everything, self._whole = set(range(len(tensors))), _bitmap(frozenset(range(len(tensors))), len(tensors))
        self._loops = tensor_loops(tensors)
        self._prepared = [self._loops.prepare(each) for each in self.slots]
        self._is_of_one_type = all(
            view.dtype == tensor.dtype for each in self.slots for view, tensor in zip(each, tensors, strict=True)
        )
        self._lends = self._is_of_one_type and self._loops.can_own

    def _views(self, slot: int) -> list[torch.Tensor]:
        made = self._of.slot(self._lane, slot)
        return [made[number] for number in self._numbers]

    def _name(self, index: int) -> str:
        return self._of.name(self._numbers[index])

    def put(self, index: int, slot: int, tensor: torch.Tensor) -> bool:
        """Copy the gradient that autograd has just made into the slot, and point p.grad at the slot.

        Further backwards of the same step then accumulate in place, and this call copies nothing; nor does it where somebody
        else holds p.grad (a script that sets it to a tensor of its own). Returns whether p.grad is the slot's.
        """
        if self._lends and not self.is_apart and self._loops.has_new_gradient(index):
            gradient = tensor.grad
            assert gradient is not None
            try:
                tensor.grad = self._copy(index, slot, gradient)
            except RuntimeError:  # torch's, which names no parameter
                view = self.slots[slot][index]
                if (gradient.dtype, gradient.shape) == (view.dtype, view.shape):
                    raise
                raise write_error(self._name(index), has_moved=True) from None
        elif not self._lends and tensor.grad is not None:
            self._check_of_backward(index, tensor.grad)
        return tensor.grad is self.slots[slot][index]

    def _copy(self, index: int, slot: int, gradient: torch.Tensor) -> torch.Tensor:
        self._check_of_backward(index, gradient)
        return self._loops.own(self._prepared[slot], index).copy_(gradient)

    def _copy_all(self, slot: int, gradients: Mapping[int, torch.Tensor]) -> None:
        """Copy gradients, by their parameters' indices, into the slot, in few launches if they are on a GPU."""
        for index, gradient in gradients.items():
            self.check(index, gradient)
        views = [self._loops.own(self._prepared[slot], index) for index in gradients]
        with torch.no_grad():  # a script may have let p.grad require a gradient
            torch._foreach_copy_(views, list(gradients.values()))

    def check(self, index: int, gradient: torch.Tensor) -> None:
        """Raise UnsupportedError for a gradient that cannot be pushed."""
        if gradient.layout is not torch.strided:
            raise UnsupportedError(
                f"parameter {self._name(index)!r}: expected a dense gradient, found {gradient.layout}; build its layer with"
                " sparse=True before wrapping, so that fastps keeps it as a table, or give up the sparse gradient"
            )

    def _check_of_backward(self, index: int, gradient: torch.Tensor) -> None:
        self.check(index, gradient)
        if gradient.requires_grad:
            raise UnsupportedError(
                f"parameter {self._name(index)!r}: backward(create_graph=True) is not supported, because the gradient is"
                " moved into shared memory: use torch.autograd.grad(loss, parameters, create_graph=True), and backward() of"
                " what is computed from it"
            )

    def zero(self, set_to_none: bool) -> None:
        """Clear the gradients, as torch does; without `set_to_none` existing gradients become zeros."""
        dropped, self._dropped = self._dropped, set()
        if set_to_none:
            self._loops.drop_gradients()
            return
        for tensor in [self.tensors[index] for index in dropped]:
            if tensor.grad is None and tensor.requires_grad:
                with torch.inference_mode(mode=False):
                    tensor.grad = torch.zeros_like(tensor)
        for gradient in [tensor.grad for tensor in self.tensors if tensor.grad is not None]:
            if gradient.grad_fn is not None:
                gradient.detach_()
            gradient.requires_grad_(False).zero_()

    def expose(self, slot: int) -> None:
        """Point every p.grad at the slot, which keeps its old values. Raises UsageError for a slot of another type."""
        if not self._is_of_one_type:
            raise UsageError(
                "expose_gradients() needs parameters of one type, and gradients that are pushed in it: leave push_dtype out"
            )
        views = self._prepared[slot]
        if self._loops.other_gradient(views) >= 0:
            self._loops.own_all(views)
            self._loops.set_gradients(views)

    def collect(self, slot: int) -> bytes:
        """Copy gradients that did not come through the hook into the slot; skip parameters whose p.grad is None, as torch does.

        A script may also have pointed p.grad at other memory (p.grad.data = tensor), although it is the tensor over the slot,
        or at the slot in another form (p.grad.t_()).
        Returns the bitmap of the parameters that have a gradient.
        """
        self.is_apart = False
        if self._dropped:
            dropped, self._dropped = self._dropped, set()
            if self.tensors[0].grad is None and not self._is_told and all(tensor.grad is None for tensor in self.tensors):
                self._tell_of_nothing(len(dropped))
        if self._lends and self._loops.other_gradient(self._prepared[slot]) < 0:
            self.present = self._everything
            return self._whole
        self.present, apart = set(), dict[int, torch.Tensor]()
        for index, tensor in enumerate(self.tensors):
            gradient = tensor.grad
            if gradient is None:
                continue
            if gradient is not self.slots[slot][index]:
                apart[index] = gradient
            elif place_of(gradient) != self._slot_places[slot][index]:
                if gradient.data_ptr() == self._slot_places[slot][index][0]:
                    tensor.grad = gradient = gradient.clone()
                self.slots[slot][index] = self._views(slot)[index]
                self._prepared[slot] = self._loops.prepare(self.slots[slot])
                apart[index] = gradient
            self.present.add(index)
        if apart:
            self._copy_all(slot, apart)
        return self._presence()

    def _presence(self) -> bytes:
        return _bitmap(frozenset(self.present), len(self.tensors))

    def release(self, slot: int) -> None:
        """Give up the slot after its push; p.grad stays a view of it only if the step waits for the fold.

        What the script holds stays p.grad: memory of its own, or the slot's view, which then moves to a copy.
        """
        if self.keeps_slot:
            return
        if self._lends and self._loops.other_gradient(self._prepared[slot]) < 0:
            self._loops.drop_gradients()
            self._dropped = self.present
        elif self._lends:
            pairs = zip(self.tensors, self.slots[slot], strict=True)
            self._dropped = {index for index, (tensor, view) in enumerate(pairs) if tensor.grad is view}
            for index in self._dropped:
                self.tensors[index].grad = None
        for index, held in self._loops.own_all(self._prepared[slot]).items():
            if index in self._dropped:
                self.tensors[index].grad = held

    def _tell_of_nothing(self, count: int) -> None:
        self._is_told = True
        logger.warning(
            "step() pushes no gradient: the last step() took those of %d parameters, and no backward came since. Under a"
            " discipline that does not wait for the fold p.grad is None after step(): call backward() before each step()",
            count,
        )

    def clip_factor(self, most: float, scale: float) -> float:
        """The factor that clips the push's gradient, multiplied by `scale`, to a norm of at most `most`, as torch clips.

        The norm spans all shards. It travels as this factor, so a fold clips each push without a separate pass.
        """
        return min(1.0, most / (self.norm() * scale + 1e-6)) if self.present else 1.0

    def norm(self) -> float:
        """The norm of the push's gradient over all parameters that have one."""
        gradients = [self.tensors[index].grad for index in sorted(self.present)]
        return norm_of([gradient for gradient in gradients if gradient is not None])

    def multiply(self, factor: float) -> None:
        """Multiply each p.grad that is still set, after its push has been folded."""
        for tensor in self.tensors:
            if tensor.grad is not None:
                tensor.grad.detach().mul_(factor)

    def detach(self, slot: int) -> None:
        """Separate p.grad from the slot until the next `collect`: a fold may still read the slot while the worker goes on."""
        self.release(slot)
        self.clone()
        self.is_apart = True

    def clone(self) -> None:
        """Make every p.grad that is a view of a slot, and everything else that shares its memory, a copy of its own."""
        for views in self._prepared:
            self._loops.own_all(views)


class CountedGradients(Gradients):
    """Gradients whose copies into slots are queued during backward; `p.grad` is never a view of the slot.

    The version counter and the place of a gradient tell whether it was changed after backward (clipped by hand, say); such a
    gradient is copied again. A write through `.data`, which torch does not count, is not noticed.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # The gradient in the slot, its version and its place.
        self._put: list[tuple[torch.Tensor, int, Place] | None] = [None] * len(self.tensors)

    def put(self, index: int, slot: int, tensor: torch.Tensor) -> bool:
        """Queue a copy of `p.grad`, into which autograd has just accumulated, into the slot. Returns whether it did."""
        if tensor.grad is None or self.is_apart:
            return False
        self._check_of_backward(index, tensor.grad)
        self._queue_copy(index, slot, tensor.grad)
        return True

    def _queue_copy(self, index: int, slot: int, gradient: torch.Tensor) -> None:
        self.check(index, gradient)
        self.slots[slot][index].copy_(gradient.detach(), non_blocking=True)
        self._put[index] = gradient, gradient._version, place_of(gradient)

    def expose(self, slot: int) -> None:
        """Raise UsageError: p.grad is never a view of the slot."""
        raise UsageError("expose_gradients() needs p.grad to be a view of the slot: set p.grad, and step() copies it")

    def collect(self, slot: int) -> bytes:
        """Copy gradients that were changed or set since the hook; parameters whose p.grad is None are not pushed."""
        self.is_apart, self.present = False, set()
        for index, tensor in enumerate(self.tensors):
            gradient, put = tensor.grad, self._put[index]
            if gradient is None:
                continue
            self.present.add(index)
            if put is None or put[0] is not gradient or put[1:] != (gradient._version, place_of(gradient)):
                self._queue_copy(index, slot, gradient)
        return self._presence()

    def release(self, slot: int) -> None:
        """Forget which gradients are in the slot: the next push begins empty."""
        self._put = [None] * len(self.tensors)


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


OF_A_SCALER = ("grad_scale", "found_inf")
"""What a GradScaler sets on an optimizer for one step."""


def loss_scaling(left: Mapping[str, Any]) -> tuple[float, bool]:
    """What a GradScaler set on an optimizer: the factor that undoes its scale, and whether it found infs (a null push)."""
    found_inf, grad_scale = left.get("found_inf"), left.get("grad_scale")
    return 1.0 if grad_scale is None else 1.0 / float(grad_scale), found_inf is not None and bool(found_inf)
