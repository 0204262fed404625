"""Update rules as data: which arithmetic the fold runs, how much state it keeps, and a param_group's hyper-parameters.

Refuses to compute: kernels/fold.pyx does, and kernels/reference.py is its oracle.
"""

from dataclasses import dataclass
from typing import NamedTuple

from fastps.kernels import fold


class Hyper(NamedTuple):
    """The hyper-parameters of one param_group, as they travel with a push. Names as in torch.optim."""

    learning_rate: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0
    epsilon: float = 0.0
    flags: int = 0


@dataclass(frozen=True)
class Rule:
    """The arithmetic of a fold: its number in the compiled core and the names of the planes of state that it keeps."""

    name: str
    number: int
    planes: tuple[str, ...]


SGD_RULE = Rule("sgd", fold.RULE_SGD, ())
MOMENTUM_RULE = Rule("sgd", fold.RULE_SGD, ("momentum_buffer",))
ADAM_RULE = Rule("adam", fold.RULE_ADAM, ("exp_avg", "exp_avg_sq"))


@dataclass(frozen=True)
class Update:
    """A rule with its hyper-parameters, for a store without torch: one param_group."""

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
    return Update(ADAM_RULE, Hyper(lr, 0.0, 0.0, weight_decay, betas[0], betas[1], eps, flags))
