"""One fold in double precision from the optimizers' formulas, for checks of kernels up to their rounding.

It follows the formulas of torch.optim's documentation and not the bit-exact reference, so that an error of both would show.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from fastps.job.update_rules import Hyper
from fastps.kernels.update import fold

Doubles = npt.NDArray[np.float64]


def sgd(weight: Doubles, planes: Doubles, gradient: Doubles, hyper: Hyper, steps: int) -> tuple[Doubles, Doubles]:
    """Return weight and planes after one application of SGD."""
    if hyper.momentum:
        first, undampened = steps == 0, 1 - hyper.dampening
        planes[0] = gradient if first else hyper.momentum * planes[0] + undampened * gradient
        gradient = gradient + hyper.momentum * planes[0] if hyper.flags & fold.HYPER_NESTEROV else planes[0]
    return weight - hyper.learning_rate * gradient, planes


def adam(weight: Doubles, planes: Doubles, gradient: Doubles, hyper: Hyper, steps: int) -> tuple[Doubles, Doubles]:
    """Return weight and planes after one application of Adam or AdamW."""
    planes[0] = hyper.beta1 * planes[0] + (1 - hyper.beta1) * gradient
    planes[1] = hyper.beta2 * planes[1] + (1 - hyper.beta2) * gradient**2
    power = planes[1]
    if hyper.flags & fold.HYPER_AMSGRAD:
        planes[2] = power = np.maximum(planes[2], planes[1])
    mean, square = planes[0] / (1 - hyper.beta1 ** (steps + 1)), power / (1 - hyper.beta2 ** (steps + 1))
    return weight - hyper.learning_rate * mean / (np.sqrt(square) + hyper.epsilon), planes


def adagrad(weight: Doubles, planes: Doubles, gradient: Doubles, hyper: Hyper, steps: int) -> tuple[Doubles, Doubles]:
    """Return weight and planes after one application of Adagrad."""
    planes[0] = planes[0] + gradient**2
    rate = hyper.learning_rate / (1 + steps * hyper.learning_rate_decay)
    return weight - rate * gradient / (np.sqrt(planes[0]) + hyper.epsilon), planes


def rmsprop(weight: Doubles, planes: Doubles, gradient: Doubles, hyper: Hyper, steps: int) -> tuple[Doubles, Doubles]:
    """Return weight and planes after one application of RMSprop."""
    planes[0] = hyper.beta2 * planes[0] + (1 - hyper.beta2) * gradient**2
    variance = planes[0]
    if hyper.flags & fold.HYPER_CENTERED:
        planes[2] = hyper.beta2 * planes[2] + (1 - hyper.beta2) * gradient
        variance = variance - planes[2] ** 2
    update = gradient / (np.sqrt(variance) + hyper.epsilon)
    if hyper.momentum:
        planes[1] = hyper.momentum * planes[1] + update
        update = planes[1]
    return weight - hyper.learning_rate * update, planes


def nadam(weight: Doubles, planes: Doubles, gradient: Doubles, hyper: Hyper, steps: int) -> tuple[Doubles, Doubles]:
    """Return weight and planes after one application of NAdam."""
    planes[0] = hyper.beta1 * planes[0] + (1 - hyper.beta1) * gradient
    planes[1] = hyper.beta2 * planes[1] + (1 - hyper.beta2) * gradient**2
    momenta = hyper.beta1 * (1 - 0.5 * 0.96 ** (np.arange(1, steps + 3) * hyper.learning_rate_decay))
    mean = momenta[-1] * planes[0] / (1 - momenta.prod()) + (1 - momenta[-2]) * gradient / (1 - momenta[:-1].prod())
    square = planes[1] / (1 - hyper.beta2 ** (steps + 1))
    return weight - hyper.learning_rate * mean / (np.sqrt(square) + hyper.epsilon), planes


def radam(weight: Doubles, planes: Doubles, gradient: Doubles, hyper: Hyper, steps: int) -> tuple[Doubles, Doubles]:
    """Return weight and planes after one application of RAdam."""
    planes[0] = hyper.beta1 * planes[0] + (1 - hyper.beta1) * gradient
    planes[1] = hyper.beta2 * planes[1] + (1 - hyper.beta2) * gradient**2
    step, most = steps + 1, 2 / (1 - hyper.beta2) - 1
    mean = planes[0] / (1 - hyper.beta1**step)
    length = most - 2 * step * hyper.beta2**step / (1 - hyper.beta2**step)
    if length <= 5:
        return weight - hyper.learning_rate * mean, planes
    rectified = np.sqrt((length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length))
    adaptive = np.sqrt(1 - hyper.beta2**step) / (np.sqrt(planes[1]) + hyper.epsilon)
    return weight - hyper.learning_rate * mean * rectified * adaptive, planes


def adamax(weight: Doubles, planes: Doubles, gradient: Doubles, hyper: Hyper, steps: int) -> tuple[Doubles, Doubles]:
    """Return weight and planes after one application of Adamax."""
    planes[0] = hyper.beta1 * planes[0] + (1 - hyper.beta1) * gradient
    planes[1] = np.maximum(hyper.beta2 * planes[1], np.abs(gradient) + hyper.epsilon)
    return weight - hyper.learning_rate * planes[0] / ((1 - hyper.beta1 ** (steps + 1)) * planes[1]), planes


def adadelta(weight: Doubles, planes: Doubles, gradient: Doubles, hyper: Hyper, steps: int) -> tuple[Doubles, Doubles]:
    """Return weight and planes after one application of Adadelta."""
    planes[0] = hyper.beta2 * planes[0] + (1 - hyper.beta2) * gradient**2
    change = np.sqrt(planes[1] + hyper.epsilon) / np.sqrt(planes[0] + hyper.epsilon) * gradient
    planes[1] = hyper.beta2 * planes[1] + (1 - hyper.beta2) * change**2
    return weight - hyper.learning_rate * change, planes


RULES: dict[int, Callable[..., tuple[Doubles, Doubles]]] = {
    fold.RULES[rule.__name__]: rule for rule in (sgd, adam, adagrad, rmsprop, nadam, radam, adamax, adadelta)
}
if missing := [name for name, number in fold.RULES.items() if number not in RULES]:
    raise ImportError(f"expected a formula of every rule of kernels/update/rules.h, found none of {', '.join(missing)}")


def step(
    rule: int, weight: Doubles, planes: Doubles, gradient: Doubles, hyper: tuple[float, ...], steps: int
) -> tuple[Doubles, Doubles]:
    """Return weight and planes (float64[planes, n]) after one application on a scaled gradient, after `steps` others."""
    by = Hyper._make(hyper)._replace(flags=int(hyper[8]))
    if by.flags & fold.HYPER_MAXIMIZE:
        gradient = -gradient
    if by.flags & fold.HYPER_DECOUPLED:
        weight = weight - by.learning_rate * by.weight_decay * weight
    else:
        gradient = gradient + by.weight_decay * weight
    return RULES[rule](weight, planes.copy(), gradient, by, steps)


def fold_of(
    rule: int, mode: int, pushes: Any, weights: Any, state: Any, steps: int, scale: float, ema_decay: float
) -> tuple[Doubles, Doubles]:
    """Return a parameter after a fold: pushes are (gradient, hyper, scale); with `ema_decay` the last plane is the average."""
    weight, planes = weights.astype(np.float64), state.astype(np.float64)
    average = planes[-1:] if ema_decay else planes[:0]
    planes = planes[: len(planes) - len(average)]
    if mode == fold.FOLD_SUM:
        total = sum((gradient.astype(np.float64) * own for gradient, _, own in pushes), start=np.zeros_like(weight))
        applications = [(total * scale, pushes[0][1])]
    else:
        applications = [(gradient.astype(np.float64) * own, hyper) for gradient, hyper, own in pushes]
    for gradient, hyper in applications:
        weight, planes = step(rule, weight, planes, gradient, hyper, steps)
        steps += 1
        average = ema_decay * average + (1 - ema_decay) * weight
    return weight, np.concatenate([planes, average])
