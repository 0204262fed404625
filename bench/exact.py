"""One fold in double precision from the optimizers' formulas, for checks of kernels up to their rounding.

It follows the formulas of torch.optim's documentation and not the bit-exact reference, so that an error of both would show.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from fastps.kernels.update import fold

Doubles = npt.NDArray[np.float64]


def step(
    rule: int, weight: Doubles, planes: Doubles, gradient: Doubles, hyper: tuple[float, ...], steps: int
) -> tuple[Doubles, Doubles]:
    """Return weight and planes (float64[planes, n]) after one application on a scaled gradient, after `steps` others."""
    rate, momentum, dampening, decay, beta1, beta2, epsilon, rate_decay, bits = hyper
    flags, planes = int(bits), planes.copy()
    if flags & fold.HYPER_MAXIMIZE:
        gradient = -gradient
    if flags & fold.HYPER_DECOUPLED:
        weight = weight - rate * decay * weight
    else:
        gradient = gradient + decay * weight
    if rule == fold.RULE_SGD:
        if momentum:
            planes[0] = gradient if steps == 0 else momentum * planes[0] + (1 - dampening) * gradient
            gradient = gradient + momentum * planes[0] if flags & fold.HYPER_NESTEROV else planes[0]
        return weight - rate * gradient, planes
    if rule == fold.RULE_ADAM:
        planes[0] = beta1 * planes[0] + (1 - beta1) * gradient
        planes[1] = beta2 * planes[1] + (1 - beta2) * gradient**2
        mean, square = planes[0] / (1 - beta1 ** (steps + 1)), planes[1] / (1 - beta2 ** (steps + 1))
        return weight - rate * mean / (np.sqrt(square) + epsilon), planes
    if rule == fold.RULE_ADAGRAD:
        planes[0] = planes[0] + gradient**2
        return weight - rate / (1 + steps * rate_decay) * gradient / (np.sqrt(planes[0]) + epsilon), planes
    planes[0] = beta2 * planes[0] + (1 - beta2) * gradient**2
    variance = planes[0]
    if flags & fold.HYPER_CENTERED:
        planes[2] = beta2 * planes[2] + (1 - beta2) * gradient
        variance = variance - planes[2] ** 2
    update = gradient / (np.sqrt(variance) + epsilon)
    if momentum:
        planes[1] = momentum * planes[1] + update
        update = planes[1]
    return weight - rate * update, planes


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
