"""The fold of a job whose optimizer the compiled core does not know: it calls the optimizer's own `step()`.

The sum of the pushes is the parameters' gradient, and while `step()` runs they show the buffer that is published next.
"""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fastps.errors import UnsupportedError
from fastps.kernels.combining.fold_call import FoldCall, FoldedPush
from fastps.kernels.update import fold
from fastps.torch.any_optimizer.rebuilt import PushedRates
from fastps.torch.tensors import Tensors

Gradients = list[torch.Tensor | None]
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def inside(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that an optimizer has as attributes: Lookahead and SAM are around another."""
    return [each for each in vars(optimizer).values() if isinstance(each, torch.optim.Optimizer)]


class TorchFold:
    """Runs `step()` of a torch optimizer as a fold. `tensors`: its parameters, in the layout's order.

    `rates`: those that pushes carry; None: the param_groups are the script's own.

    Attributes:
        optimizer: the optimizer.
        lock: held during a fold, in which the optimizer's state changes.
        is_stepping: whether the optimizer's own `step()` runs.
        closure: the argument of the next `step()`, which takes it; None without one.
        result: what the last `step()` returned.
    """

    is_stepping = False
    closure: Callable[[], Any] | None = None
    result: Any = None

    def __init__(self, optimizer: torch.optim.Optimizer, tensors: Tensors, rates: PushedRates | None = None) -> None:
        self._store, self.optimizer, self._tensors = tensors.store, optimizer, tensors
        self._rates_pushed = rates
        self.lock = threading.Lock()
        self._checks = self._store.layout.faults.nonfinite != "allow"
        self._is_alone = self._store.layout.steps_alone
        self._frozen: set[int] = set()
        self._has_failed = False  # whether the push that is folded next is one whose step() has failed
        self._made: dict[tuple[int, ...], list[torch.Tensor]] = {}

    def fold(self, call: FoldCall) -> list[int] | None:
        """Make the next version; the function given to Lane.fold_with. Returns a non-finite parameter, or -1, of each push.

        An error of `step()` is the fold's. The optimizer's state may have changed by then, and no version is published.
        """
        with self.lock:
            self._in_script = torch.is_grad_enabled()
            return self._fold(call)

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def _fold(self, call: FoldCall) -> list[int] | None:
        if self._frozen != self._store.frozen:
            self._frozen = set(self._store.frozen)
            self._made.clear()
        pushes = call.pushes  # in order: of a sum those of each lane as it posted them, else as they make versions
        if self._has_failed:
            self._has_failed, pushes = False, []
        if self._checks and self.closure is None:  # which makes its gradients later
            found = {push: self._nonfinite(push) for push in pushes}
            if max(found.values(), default=-1) >= 0:
                return [found[push] for push in call.pushes]
        weights = self._weights(call.weights_out)
        for source, target in zip(self._weights(call.weights_in), weights, strict=True):
            if source.data_ptr() != target.data_ptr():  # a frozen parameter lies in memory once
                target.copy_(source)
        if self._is_alone:  # those are the script's own memory
            weights = [self._tensors[index].data if index in self._frozen else each for index, each in enumerate(weights)]
        steps, steps_out = self._store.all_steps(call.state_in), self._store.all_steps(call.state_out)
        steps_out[:] = steps
        is_each = call.mode == fold.FOLD_EACH
        average = self._average(call)
        for some in [[push] for push in pushes] if is_each else [pushes] if pushes else []:
            scale = 1.0 if is_each else call.scale
            is_plain = self._is_alone and (len(pushes), scale, some[0].scale) == (1, 1.0, 1.0)
            gradients = None if is_plain else self._sum(some, scale)  # else p.grad is what was pushed, with its graph
            if self._rates_pushed is not None:
                self._rates_pushed.take([self._store.slot_words(push.lane, push.slot)[0] for push in some])
            rate = call.rate_scale * sum(push.rate_scale for push in some) / len(some)
            steps_out += self._step(weights, gradients, rate)
            for mean, weight in zip(average, weights, strict=True) if average else ():
                if mean.numel():
                    mean.lerp_(weight.to(mean.dtype), 1 - self._store.layout.policy.ema)
        self._store.write_halves(call.weights_out)
        return None

    def _weights(self, buffer: int) -> list[torch.Tensor]:
        if (buffer,) not in self._made:
            self._store.reserve_weights(buffer)
            self._made[buffer,] = self._tensors.weights(buffer)
        return self._made[buffer,]

    def _pushed(self, push: FoldedPush) -> Iterator[tuple[int, torch.Tensor]]:
        """The number and the gradient of each parameter that a push has."""
        place = push.lane, push.slot
        if place not in self._made:
            self._made[place] = self._tensors.slot(*place)
        _, present = self._store.slot_words(*place)
        return ((index, self._made[place][index]) for index in present.nonzero()[0].tolist())

    def _nonfinite(self, push: FoldedPush) -> int:
        """The first parameter whose gradient is not finite in a push, or -1."""
        pushed = list(self._pushed(push))
        norms = torch._foreach_norm([gradient for _, gradient in pushed], float("inf")) if pushed else ()
        finite = [bool(norm.isfinite()) for norm in norms]
        return next((index for (index, _), is_finite in zip(pushed, finite, strict=True) if not is_finite), -1)

    def _sum(self, pushes: Sequence[FoldedPush], scale: float) -> Gradients:
        """The sum of what these pushes have of each parameter, in their order, times `scale`; None where none has one."""
        total: Gradients = [None] * len(self._tensors)
        for push in pushes:
            for index, gradient in self._pushed(push):
                kind, so_far = self._weights(0)[index].dtype, total[index]
                value = gradient.to(kind) if gradient.dtype != kind else gradient
                if so_far is None:
                    total[index] = value * push.scale  # a copy: the optimizer may write to it
                else:
                    so_far.add_(value, alpha=push.scale)
        if scale != 1.0:
            torch._foreach_mul_([value for value in total if value is not None], scale)
        return total

    def _average(self, call: FoldCall) -> list[torch.Tensor]:
        """The moving average of the weights in the new version, as a copy of the old one; empty without `ema`."""
        layout = self._store.layout
        if not layout.policy.ema:
            return []
        old, new = (self._tensors.planes(buffer, layout.planes - 1) for buffer in (call.state_in, call.state_out))
        torch._foreach_copy_(new, old)
        return new

    def _step(self, weights: Sequence[torch.Tensor], gradients: Gradients | None, rate: float) -> list[bool]:
        """Call the class's step() on these weights and gradients, with the learning rates times `rate`.

        Without `gradients` they are the parameters' own. Returns for each parameter whether it had one in the end.
        """
        step: Any = type(self.optimizer).step
        step = step.__wrapped__ if getattr(step, "hooked", False) else step  # without hooks, which this step() has run
        closure, self.closure = self.closure, None
        self._has_failed = self._is_alone  # until step() ends; the script may go on without that push
        with self._shown(weights, gradients), self._unhooked(), self._rates(rate):
            with torch.set_grad_enabled(self._in_script), self._explained():
                self.result = step(self.optimizer) if closure is None else step(self.optimizer, closure)
            for tensor, weight in zip(self._tensors, weights, strict=True):
                if tensor.data_ptr() != weight.data_ptr():  # a step() that sets p.data
                    weight.copy_(tensor.data)
            self._has_failed = False
            return [tensor.grad is not None for tensor in self._tensors]

    @contextlib.contextmanager
    def _shown(self, weights: Sequence[torch.Tensor], gradients: Gradients | None) -> Iterator[None]:
        """Show these weights as the parameters inside the block, and these gradients if there are some."""
        kept = [tensor.data for tensor in self._tensors], [tensor.grad for tensor in self._tensors]
        try:
            self._show(weights, gradients)
            yield
        finally:
            self._show(kept[0], None if gradients is None else kept[1])

    def _show(self, weights: Sequence[torch.Tensor], gradients: Gradients | None) -> None:
        for index, (tensor, weight) in enumerate(zip(self._tensors, weights, strict=True)):
            if gradients is not None:
                tensor.grad = None  # one of another type does not fit
            tensor.data = weight
            if gradients is not None:
                tensor.grad = gradients[index]

    @contextlib.contextmanager
    def _unhooked(self) -> Iterator[None]:
        """Take away the hooks of the wrapped optimizer inside the block: the wrapper has run them, and one refuses step()."""
        kept = {name: getattr(self.optimizer, name) for name in _HOOKS}
        self.optimizer.__dict__.update({name: OrderedDict() for name in _HOOKS})
        self.is_stepping = True
        try:
            yield
        finally:
            self.is_stepping = False
            self.optimizer.__dict__.update(kept)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Say of an optimizer around another that fails for want of a closure (SAM) what several workers do instead."""
        try:
            yield
        except Exception as error:  # of any kind: the optimizer is the script's
            if self._is_alone or not inside(self.optimizer):
                raise
            name = type(self.optimizer).__name__
            raise UnsupportedError(
                f"{name}: {type(error).__name__}: {error}; step() of a job of several workers has no closure, which was called"
                f" before the push: wrap the optimizer inside, and make {name} around it"
            ) from error

    @contextlib.contextmanager
    def _rates(self, rate: float) -> Iterator[None]:
        """Multiply the learning rates inside the block: a discipline scales them by staleness or by samples."""
        groups = self.optimizer.param_groups if rate != 1.0 else []
        kept = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * rate
        try:
            yield
        finally:
            for group, old in zip(groups, kept, strict=False):
                group["lr"] = old
