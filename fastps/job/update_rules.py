"""Update rules as data: the arithmetic that the fold runs, its optimizer state, and the hyper-parameters of a param_group."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fastps.kernels.update import fold


class Hyper(NamedTuple):
    """The hyper-parameters of one param_group, sent with each push. Names as in torch.optim."""

    learning_rate: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0
    epsilon: float = 0.0
    learning_rate_decay: float = 0.0
    flags: int = 0


@dataclass(frozen=True)
class Rule:
    """The arithmetic of a fold: its number in the compiled core, and its optimizer-state tensors.

    Attributes:
        planes: the names of the optimizer-state tensors, as in torch.
        initial: the value that fills each of them before the first step; () if all begin at 0.
        digest: the digest of a user rule's code; "" for a built-in rule.
        address: the address of that code in this process, or 0.
    """

    name: str
    number: int
    planes: tuple[str, ...]
    initial: tuple[float, ...] = ()
    digest: str = ""
    address: int = field(default=0, compare=False)

    def initial_value(self, plane: int) -> float:
        """The value that fills an optimizer-state tensor before the first step."""
        return self.initial[plane] if self.initial else 0.0


SGD_RULE = Rule("sgd", fold.RULE_SGD, ())
MOMENTUM_RULE = Rule("sgd", fold.RULE_SGD, ("momentum_buffer",))
ADAM_RULE = Rule("adam", fold.RULE_ADAM, ("exp_avg", "exp_avg_sq"))


def adagrad_rule(initial_accumulator_value: float = 0.0) -> Rule:
    """The rule of Adagrad. Its sum of squares may begin above 0."""
    return Rule("adagrad", fold.RULE_ADAGRAD, ("sum",), (float(initial_accumulator_value),))


def rmsprop_rule(momentum: bool, centered: bool) -> Rule:
    """The rule of RMSprop, with the state that any param_group needs. `centered` always includes the momentum buffer."""
    planes = ("square_avg", "momentum_buffer", "grad_avg")
    return Rule("rmsprop", fold.RULE_RMSPROP, planes[: 3 if centered else 1 + momentum])


def write_initial_state(rule: Rule, plane_views: Callable[[int], list[npt.NDArray[np.float32]]]) -> None:
    """Fill the optimizer-state tensors that do not begin at 0, the value of fresh memory.

    `plane_views` returns one view per parameter of an optimizer-state tensor.
    """
    for plane in range(len(rule.planes)):
        if rule.initial_value(plane):
            for view in plane_views(plane):
                view[:] = rule.initial_value(plane)


@dataclass(frozen=True)
class Update:
    """A rule with the hyper-parameters of one param_group, for a store without torch."""

    rule: Rule
    hyper: Hyper


def SGD(  # noqa: N802 - torch's names
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> Update:
    """Stochastic gradient descent, as torch.optim.SGD defines it.

    >>> SGD(0.1, momentum=0.9).rule.planes
    ('momentum_buffer',)
    """
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError("Nesterov momentum requires a momentum and zero dampening")
    flags = fold.HYPER_NESTEROV * nesterov | fold.HYPER_MAXIMIZE * maximize
    return Update(MOMENTUM_RULE if momentum else SGD_RULE, Hyper(lr, momentum, dampening, weight_decay, flags=flags))


def Adam(  # noqa: N802
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = False,
    maximize: bool = False,
) -> Update:
    """Adam as torch.optim.Adam defines it; `decoupled=True` is AdamW's weight decay."""
    flags = fold.HYPER_DECOUPLED * decoupled | fold.HYPER_MAXIMIZE * maximize
    return Update(ADAM_RULE, Hyper(lr, 0.0, 0.0, weight_decay, betas[0], betas[1], eps, flags=flags))


def Adagrad(  # noqa: N802
    lr: float = 1e-2,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
    maximize: bool = False,
) -> Update:
    """Adagrad as torch.optim.Adagrad defines it.

    >>> Adagrad(initial_accumulator_value=0.5).rule.initial
    (0.5,)
    """
    if initial_accumulator_value < 0:
        raise ValueError(f"expected an initial accumulator value of 0 or more, found {initial_accumulator_value}")
    hyper = Hyper(lr, 0.0, 0.0, weight_decay, 0.0, 0.0, eps, lr_decay, fold.HYPER_MAXIMIZE * maximize)
    return Update(adagrad_rule(initial_accumulator_value), hyper)


def RMSProp(  # noqa: N802
    lr: float = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
    maximize: bool = False,
) -> Update:
    """RMSprop as torch.optim.RMSprop defines it; `alpha` is sent as beta2.

    >>> RMSProp(centered=True).rule.planes
    ('square_avg', 'momentum_buffer', 'grad_avg')
    """
    flags = fold.HYPER_CENTERED * centered | fold.HYPER_MAXIMIZE * maximize
    hyper = Hyper(lr, momentum, 0.0, weight_decay, 0.0, alpha, eps, 0.0, flags)
    return Update(rmsprop_rule(momentum > 0, centered), hyper)
