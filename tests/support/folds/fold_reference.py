"""The fold's oracle: the compiled fold's results, bit for bit, in plain NumPy that can be read beside torch.optim.

It favors clarity over speed: one function a rule and one operation a line, in the precision of the weights, single or double.
The only trick is the fused multiply-add, which NumPy lacks and which is emulated exactly.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastps.kernels.update.fold import (
    BFLOAT16,
    FLOAT32,
    FLOAT64,
    FOLD_EACH,
    HYPER_AMSGRAD,
    HYPER_CENTERED,
    HYPER_DECOUPLED,
    HYPER_DOUBLE_PRODUCT,
    HYPER_MAXIMIZE,
    HYPER_NESTEROV,
)
from fastps.kernels.update.fold import RULES as NUMBERS

Floats = npt.NDArray[Any]
"""An array of float32 or of float64."""
Planes = Sequence[Floats]
"""A parameter's optimizer-state tensors, as the rule's docstring names them."""
Applied = tuple[Floats, Planes]
"""The weight and the state after one application of a rule."""
Apply = Callable[..., Applied]


class Hyper(NamedTuple):
    """The hyper-parameters of one param_group, named as in torch.optim; `flags` are the HYPER_ bits."""

    learning_rate: float
    momentum: float
    dampening: float
    weight_decay: float
    beta1: float
    beta2: float
    epsilon: float
    learning_rate_decay: float = 0.0
    flags: int = 0


class Push(NamedTuple):
    """One push: `gradient` of n numbers, a Hyper a group, a presence bit a parameter, and the scales of gradient and rates."""

    gradient: Floats
    hypers: Sequence[Hyper]
    presence: Sequence[bool]
    scale: float
    rate_scale: float = 1.0

    def rate(self, group: int) -> float:
        """Return the learning rate of a group in this push."""
        return self.hypers[group].learning_rate * self.rate_scale


def fused_multiply_add(a: Any, b: Any, c: Any) -> Floats:
    """Return a * b + c with one rounding, elementwise, in the precision of the array among them.

    Of floats the product is exact in double. Of doubles it is a sum of two (Dekker's product), of which the addend takes the
    small part first, and the error so far is the addend of the rest. Either way the last sum is made once, from terms that lose
    nothing: its small term is rounded to odd, so that rounding again equals one rounding (Boldo and Melquiond, "Emulation of
    FMA and correctly rounded sums", IEEE Transactions on Computers 57(4), 2008).
    """
    if np.result_type(a, b, c) == np.float32:
        product, addend = np.broadcast_arrays(np.multiply(a, b, dtype=np.float64), np.asarray(c, np.float64))
        return _sum_to_odd(product, addend).astype(np.float32)
    product, error = _two_product(*np.broadcast_arrays(np.asarray(a, np.float64), np.asarray(b, np.float64)))
    low, low_error = _two_sum(np.asarray(c, np.float64), error)
    high, high_error = _two_sum(product, low)
    return high + _sum_to_odd(low_error, high_error)


def _two_sum(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """Return a + b and its rounding error (Knuth)."""
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def _two_product(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """Return a * b and its rounding error, from halves of 26 bits (Dekker and Veltkamp)."""
    product = a * b
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _halves(values: Floats) -> tuple[Floats, Floats]:
    far = values * 134217729.0  # 2^27 + 1
    high = far - (far - values)
    return high, values - high


def _sum_to_odd(a: Floats, b: Floats) -> Floats:
    """Return the sum of two arrays of doubles, rounded to odd: an inexact sum has a last bit of 1."""
    total, error = _two_sum(a, b)
    total = np.atleast_1d(total)
    bits = total.view(np.int64)
    is_inexact_and_even = ((error > 0) | (error < 0)) & (bits & 1 == 0)
    bits += np.where(is_inexact_and_even, np.where((error > 0) == (total > 0), 1, -1), 0)
    return total


def sgd(weight: Floats, state: Planes, gradient: Floats, hyper: Hyper, learning_rate: float, steps: int) -> Applied:
    """Apply torch.optim.SGD once, as its single-tensor form does; state: [momentum buffer], or [] without one.

    Without momentum the state stays unchanged. At a parameter's first step the buffer is the gradient, undampened.
    """
    real = weight.dtype.type
    weight, step = decayed(weight, gradient, hyper, learning_rate)
    state = list(state)
    if hyper.momentum:
        buffer = step
        if steps:
            buffer = fused_multiply_add(step, real(1 - hyper.dampening), state[0] * real(hyper.momentum))
        step = fused_multiply_add(buffer, real(hyper.momentum), step) if hyper.flags & HYPER_NESTEROV else buffer
        state[0] = buffer
    return fused_multiply_add(step, real(-learning_rate), weight), state


def adam(weight: Floats, state: Planes, gradient: Floats, hyper: Hyper, learning_rate: float, steps: int) -> Applied:
    """Apply torch.optim.Adam (AdamW under HYPER_DECOUPLED) once, as its single-tensor form does.

    State: [mean, square], and the largest square so far for HYPER_AMSGRAD; without it that tensor stays unchanged.
    """
    real = weight.dtype.type
    weight, step = decayed(weight, gradient, hyper, learning_rate)
    mean, square = means(state, step, hyper)
    state, power = [mean, square, *state[2:]], square
    if hyper.flags & HYPER_AMSGRAD:
        state[2] = power = maximum(state[2], square)
    step_size = learning_rate / (1 - hyper.beta1 ** (steps + 1))
    root_correction = real(math.sqrt(1 - hyper.beta2 ** (steps + 1)))
    denominator = np.divide(np.sqrt(power), root_correction) + real(hyper.epsilon)
    weight = weight + np.divide(mean * real(-step_size), denominator)
    return weight, state


def decayed(weight: Floats, gradient: Floats, hyper: Hyper, learning_rate: float) -> tuple[Floats, Floats]:
    """Return weight and gradient after weight decay: under HYPER_DECOUPLED of the weight, else added to the gradient."""
    real = weight.dtype.type
    if hyper.weight_decay and hyper.flags & HYPER_DECOUPLED:
        return weight * real(1 - learning_rate * hyper.weight_decay), gradient
    if hyper.weight_decay:
        return weight, fused_multiply_add(weight, real(hyper.weight_decay), gradient)
    return weight, gradient


def means(state: Planes, step: Floats, hyper: Hyper) -> tuple[Floats, Floats]:
    """Return the means of gradients and of their squares, moved towards this step's."""
    real = step.dtype.type
    mean = lerp(state[0], step, real(1 - hyper.beta1))
    square = fused_multiply_add(real(1 - hyper.beta2) * step, step, state[1] * real(hyper.beta2))
    return mean, square


def maximum(a: Floats, b: Floats) -> Floats:
    """Return the larger of two elementwise, as torch.maximum does: a NaN if either is one."""
    return np.where((a > b) | np.isnan(a), a, b)


def lerp(start: Floats, end: Floats, fraction: Any) -> Floats:
    """Interpolate from start to end as torch.lerp does: from the nearer end."""
    real = start.dtype.type
    if abs(fraction) < real(0.5):
        return fused_multiply_add(fraction, end - start, start)
    return fused_multiply_add(fraction - real(1), end - start, end)


def adagrad(weight: Floats, state: Planes, gradient: Floats, hyper: Hyper, learning_rate: float, steps: int) -> Applied:
    """Apply torch.optim.Adagrad once, as its single-tensor form does; state: [sum of squares]."""
    real = weight.dtype.type
    weight, step = decayed(weight, gradient, hyper, learning_rate)
    total = fused_multiply_add(step, step, state[0])
    rate = learning_rate / (1 + steps * hyper.learning_rate_decay)
    weight = weight + np.divide(step * real(-rate), np.sqrt(total) + real(hyper.epsilon))
    return weight, [total]


def rmsprop(weight: Floats, state: Planes, gradient: Floats, hyper: Hyper, learning_rate: float, steps: int) -> Applied:
    """Apply torch.optim.RMSprop once, as its single-tensor form does; its alpha is beta2.

    State: [square average], [.., momentum buffer] or [.., .., gradient average]; tensors that a group does not use stay
    unchanged.
    """
    real = weight.dtype.type
    state = list(state)
    weight, step = decayed(weight, gradient, hyper, learning_rate)
    state[0] = fused_multiply_add(real(1 - hyper.beta2) * step, step, state[0] * real(hyper.beta2))
    variance = state[0]
    if hyper.flags & HYPER_CENTERED:
        state[2] = lerp(state[2], step, real(1 - hyper.beta2))
        variance = fused_multiply_add(-state[2], state[2], variance)
    root = np.sqrt(variance) + real(hyper.epsilon)
    if not hyper.momentum:
        return weight + np.divide(step * real(-learning_rate), root), state
    state[1] = state[1] * real(hyper.momentum) + np.divide(step, root)
    return fused_multiply_add(state[1], real(-learning_rate), weight), state


def mu_product(beta1: float, decay: float, steps: int, real: type[Any] = np.float32) -> float:
    """Return NAdam's product of the momenta of the first `steps` steps, each factor and product of the type `real`."""
    product = real(1)
    for step in range(1, steps + 1):
        product = product * real(momentum(beta1, decay, step))
    return float(product)


def momentum(beta1: float, decay: float, step: int) -> float:
    """Return NAdam's momentum in a step, from 1."""
    return beta1 * (1.0 - 0.5 * math.pow(0.96, step * decay))


def nadam(weight: Floats, state: Planes, gradient: Floats, hyper: Hyper, learning_rate: float, steps: int) -> Applied:
    """Apply torch.optim.NAdam once, as its single-tensor form does; its momentum decay is the learning rate's.

    State: [mean, square].
    """
    real = weight.dtype.type
    weight, step = decayed(weight, gradient, hyper, learning_rate)
    mean, square = means(state, step, hyper)
    decay = hyper.learning_rate_decay
    now, following = (momentum(hyper.beta1, decay, steps + more) for more in (1, 2))
    product_type = np.float64 if hyper.flags & HYPER_DOUBLE_PRODUCT else np.float32
    product = mu_product(hyper.beta1, decay, steps + 1, product_type)
    root = np.sqrt(np.divide(square, real(1 - hyper.beta2 ** (steps + 1)))) + real(hyper.epsilon)
    gradient_rate = real(-learning_rate * (1 - now) / (1 - product))
    mean_rate = real(-learning_rate * following / (1 - product * following))
    weight = weight + np.divide(step * gradient_rate, root)
    return weight + np.divide(mean * mean_rate, root), [mean, square]


def radam(weight: Floats, state: Planes, gradient: Floats, hyper: Hyper, learning_rate: float, steps: int) -> Applied:
    """Apply torch.optim.RAdam once, as its single-tensor form does; state: [mean, square]."""
    real = weight.dtype.type
    weight, step = decayed(weight, gradient, hyper, learning_rate)
    mean, square = means(state, step, hyper)
    power = hyper.beta2 ** (steps + 1)
    rho_inf = 2 / (1 - hyper.beta2) - 1
    rho = rho_inf - 2 * (steps + 1) * power / (1 - power)
    update = np.divide(mean, real(1 - hyper.beta1 ** (steps + 1))) * real(learning_rate)
    if rho > 5:
        root = np.sqrt(square) + real(hyper.epsilon)
        rectification = math.sqrt((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho))
        adaptive = np.divide(real(1), root) * real(math.sqrt(1 - power))
        update = update * adaptive * real(rectification)
    return weight - update, [mean, square]


def adamax(weight: Floats, state: Planes, gradient: Floats, hyper: Hyper, learning_rate: float, steps: int) -> Applied:
    """Apply torch.optim.Adamax once, as its single-tensor form does; state: [mean, decayed maximum]."""
    real = weight.dtype.type
    weight, step = decayed(weight, gradient, hyper, learning_rate)
    mean = lerp(state[0], step, real(1 - hyper.beta1))
    most = maximum(state[1] * real(hyper.beta2), abs(step) + real(hyper.epsilon))
    step_size = learning_rate / (1 - hyper.beta1 ** (steps + 1))
    return weight + np.divide(mean * real(-step_size), most), [mean, most]


def adadelta(weight: Floats, state: Planes, gradient: Floats, hyper: Hyper, learning_rate: float, steps: int) -> Applied:
    """Apply torch.optim.Adadelta once, as its single-tensor form does; its rho is beta2.

    State: [mean of the gradients' squares, mean of the changes' squares].
    """
    real = weight.dtype.type
    weight, step = decayed(weight, gradient, hyper, learning_rate)
    kept, added, epsilon = real(hyper.beta2), real(1 - hyper.beta2), real(hyper.epsilon)
    square = fused_multiply_add(added * step, step, state[0] * kept)
    change = np.divide(np.sqrt(state[1] + epsilon), np.sqrt(square + epsilon)) * step
    changes = fused_multiply_add(added * change, change, state[1] * kept)
    return fused_multiply_add(change, real(-learning_rate), weight), [square, changes]


RULES: dict[int, Apply] = {
    NUMBERS[rule.__name__]: rule for rule in (sgd, adam, adagrad, rmsprop, nadam, radam, adamax, adadelta)
}
if missing := [name for name, number in NUMBERS.items() if number not in RULES]:
    raise ImportError(f"expected a reference of every rule of kernels/update/rules.h, found none of {', '.join(missing)}")


def mean_rate(rates: Sequence[float]) -> float:
    """Return the mean learning rate of the pushes: the exact common rate if all are equal."""
    return rates[0] if len(set(rates)) == 1 else sum(rates[1:], rates[0]) / len(rates)


def scaled(gradient: Floats, scale: float, hyper: Hyper) -> Floats:
    """Multiply a gradient by its scale in its own precision, and negate it to maximize."""
    real = gradient.dtype.type
    product: Floats = gradient * real(-scale if hyper.flags & HYPER_MAXIMIZE else scale)
    return product


def widened(gradient: npt.ArrayLike, gradient_type: int) -> Floats:
    """Return a gradient in full precision: float64[n], float32[n], float16[n], or the bits of bfloat16 as uint16[n]."""
    if gradient_type == FLOAT64:
        return np.asarray(gradient, np.float64)
    if gradient_type == BFLOAT16:
        return (np.asarray(gradient, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.asarray(gradient).astype(np.float32)


def total_gradient(gradients: Sequence[Floats], scales: Sequence[float]) -> tuple[Floats, float]:
    """Sum gradients in order; return the sum and the scale to apply to it.

    A scale common to all pushes is applied once, to the sum; otherwise each gradient is scaled first.
    """
    is_common = len(set(scales)) == 1
    terms = gradients if is_common else [each * each.dtype.type(scale) for each, scale in zip(gradients, scales, strict=True)]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total, scales[0] if is_common else 1.0


class Parameter(NamedTuple):
    """One parameter's values: weights, the rule's state planes, the moving average of the weights, and steps."""

    weight: Floats
    planes: Planes
    average: Floats | None
    steps: int

    def applied(self, rule: Apply, gradient: Floats, hyper: Hyper, learning_rate: float) -> "Parameter":
        """Return it after one application of the rule on a scaled gradient."""
        weight, planes = rule(self.weight, self.planes, gradient, hyper, learning_rate, self.steps)
        return Parameter(weight, planes, self.average, self.steps + 1)

    def averaged(self, decay: float) -> "Parameter":
        """Return it with its average, if it has one, moved towards its weights."""
        if self.average is None:
            return self
        return self._replace(average=lerp(self.average, self.weight, self.weight.dtype.type(1 - decay)))


class Place(NamedTuple):
    """A parameter's place: its number, its floats, and its param_group."""

    number: int
    span: slice
    group: int


def fold_each(rule: Apply, parameter: Parameter, place: Place, pushes: Sequence[Push], ema_decay: float) -> Parameter:
    """Apply the rule push by push; the average moves after every push, also without a gradient for the parameter."""
    for push in pushes:
        if push.presence[place.number]:
            hyper = push.hypers[place.group]
            gradient = scaled(push.gradient[place.span], push.scale, hyper)
            parameter = parameter.applied(rule, gradient, hyper, push.rate(place.group))
        parameter = parameter.averaged(ema_decay)
    return parameter


def fold_sum(
    rule: Apply,
    parameter: Parameter,
    place: Place,
    pushes: Sequence[Push],
    ema_decay: float,
    scale: float,
    rate_scale: float,
) -> Parameter:
    """Apply the rule once, on the sum of the pushes that have a gradient for the parameter; the average moves once."""
    present = [push for push in pushes if push.presence[place.number]]
    if present:
        hyper = present[0].hypers[place.group]
        total, common_scale = total_gradient([push.gradient[place.span] for push in present], [push.scale for push in present])
        rate = mean_rate([push.rate(place.group) for push in present]) * rate_scale
        parameter = parameter.applied(rule, scaled(total, scale * common_scale, hyper), hyper, rate)
    return parameter.averaged(ema_decay) if pushes else parameter


def fold(
    rule: int,
    mode: int,
    segments: Sequence[tuple[int, int, int]],
    pushes: Sequence[tuple[Any, ...]],
    weights: Floats,
    state: Floats,
    steps: npt.NDArray[np.int64],
    *,
    scale: float = 1.0,
    rate_scale: float = 1.0,
    ema_plane: int = -1,
    ema_decay: float = 0.0,
    user_rule: Apply | None = None,
    gradient_type: int = FLOAT32,
) -> tuple[Floats, Floats, npt.NDArray[np.int64]]:
    """Fold pushes into copies of weights (float32[n]), state (float32[planes, n]) and steps (int64[parameters]).

    With gradients of FLOAT64 weights and state are float64. Arguments and result are those of
    fastps.kernels.update.fold.fold, of a job that it accepts; under FOLD_SUM the hyper-parameters are those of the first push
    that has the parameter, with the pushes' mean learning rate. Floats outside all segments are 0 in the result. `user_rule` is
    a function like the rules here.
    """
    apply = RULES[rule] if user_rule is None else user_rule
    named = [
        Push(widened(gradient, gradient_type), [Hyper(*group) for group in groups], presence, *scales)
        for gradient, groups, presence, *scales in pushes
    ]
    has_average = ema_plane >= 0
    weights_out, state_out, steps_out = np.zeros_like(weights), np.zeros_like(state), np.zeros_like(steps)
    for index, (offset, length, group) in enumerate(segments):
        place = Place(index, slice(offset, offset + length), group)
        planes = list(state[:, place.span])
        average = planes.pop() if has_average else None
        parameter = Parameter(weights[place.span], planes, average, int(steps[index]))
        if mode == FOLD_EACH:
            parameter = fold_each(apply, parameter, place, named, ema_decay)
        else:
            parameter = fold_sum(apply, parameter, place, named, ema_decay, scale, rate_scale)
        weights_out[place.span], steps_out[index] = parameter.weight, parameter.steps
        planes_out = [*parameter.planes] if parameter.average is None else [*parameter.planes, parameter.average]
        for plane, values in zip(state_out, planes_out, strict=True):
            plane[place.span] = values
    return weights_out, state_out, steps_out
