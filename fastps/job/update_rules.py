"""Update rules as data: the arithmetic that the fold runs, its optimizer state, and the hyper-parameters of a param_group."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from fastps.errors import UnsupportedError
from fastps.job.policy import Policy
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
    """The arithmetic of a fold: its number in the compiled core, and its optimizer-state tensors."""

    name: str
    number: int
    planes: tuple[str, ...]  # the names of the optimizer-state tensors, as in torch
    initial: tuple[float, ...] = ()  # the value that fills each of them before the first step; () if all begin at 0
    digest: str = ""  # the digest of a user rule's code; "" for a built-in rule
    address: int = field(default=0, compare=False)  # the address of that code in this process, or 0
    in_workers: bool = field(default=False, compare=False, kw_only=True)  # whether the workers keep its state, the momentum
    runs_in_python: ClassVar[bool] = False  # whether a torch optimizer's own step() is the rule, and has the state

    def initial_value(self, plane: int) -> float:
        """The value that fills an optimizer-state tensor before the first step."""
        return self.initial[plane] if self.initial else 0.0


@dataclass(frozen=True)
class PythonRule(Rule):
    """The rule of an optimizer whose arithmetic the core does not know: one process runs its step(). `name`: of its class.

    A push carries the learning rates, and `switches`: a number that differs where a worker began with other options.
    """

    runs_in_python: ClassVar[bool] = True
    switches: int = field(default=0, compare=False)


def folded(rule: Rule, policy: Policy) -> Rule:
    """The rule that the fold runs under this policy: SGD without state where the workers keep its momentum.

    Raises UnsupportedError for momentum=worker with another rule than SGD with momentum.

    >>> from fastps.job.specs import parse_policy
    >>> folded(SGD(0.1, momentum=0.9).rule, parse_policy("asp,momentum=worker")).planes
    ()
    """
    if policy.momentum != "worker":
        return rule
    if rule.number != fold.RULE_SGD or rule.runs_in_python or rule.planes != ("momentum_buffer",):
        found = f"{rule.name} without momentum" if rule.name == "sgd" else rule.name
        raise UnsupportedError(f"sync {policy.spec!r}: expected SGD with momentum, found {found}")
    return replace(rule, planes=(), in_workers=True)


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


Options = Mapping[str, Any]
"""The options of one param_group, by torch's names."""


@dataclass(frozen=True)
class UpdateRule:
    """One row of the table: a rule of the fold, by its name in kernels/update/rules.h, and the torch optimizers that it is."""

    hyper: Callable[[Options], Hyper]  # a param_group's options as hyper-parameters
    state: tuple[str, ...]  # the names of the optimizer-state tensors, as in torch
    optimizers: tuple[str, ...]  # the classes of torch.optim
    examples: Callable[[], dict[str, Update]]  # updates by name, which `fastps doctor` sizes and the checks of a GPU run
    only_with: Mapping[str, str] = field(default_factory=dict)  # the option without which a group does not use a state tensor
    squares: tuple[str, ...] = ()  # the state tensors that are never negative
    initial_option: str = ""  # the option whose value fills the state tensors before the first step
    has_steps: bool = True  # whether torch's state counts steps
    # The options that must stay the same, because state is computed from them and the count of steps.
    fixed_options: tuple[str, ...] = ()
    row_rule: str = ""  # the rule of kernels/rows/rows.h for rows of tables; "": the rule has none
    only_rows: bool = False  # whether the rule updates nothing but rows of tables
    # What torch's state has for a parameter of a group beside tensors and steps, by name, after so many steps.
    scalars: Callable[[Options, int], dict[str, float]] = lambda options, steps: {}

    def used_state(self, group: Options) -> list[str]:
        """The optimizer-state tensors that a param_group uses."""
        return [name for name in self.state if name not in self.only_with or group.get(self.only_with[name])]


def rule_for(name: str, groups: Sequence[Options], defaults: Options) -> Rule:
    """The rule with the state that any of the param_groups needs: the last used tensor, and all before it.

    >>> rule_for("rmsprop", [{"momentum": 0, "centered": True}], {}).planes
    ('square_avg', 'momentum_buffer', 'grad_avg')
    """
    row = UPDATE_RULES[name]
    used = {tensor for group in groups for tensor in row.used_state(group)}
    planes = max((index + 1 for index, tensor in enumerate(row.state) if tensor in used), default=0)
    # torch fills the state in its constructor, from the defaults: one value holds for all groups.
    initial = (float(defaults[row.initial_option]),) * planes if row.initial_option else ()
    return Rule(name, fold.RULE_SGD if row.only_rows else fold.RULES[name], row.state[:planes], initial)


def _update(name: str, arguments: dict[str, Any]) -> Update:
    """The update of a function below, by its arguments, whose names are torch's but for `decoupled`."""
    options = {"decoupled_weight_decay" if key == "decoupled" else key: value for key, value in arguments.items()}
    return Update(rule_for(name, [options], options), UPDATE_RULES[name].hyper(options))


def _hyper(options: Options, flags: int = 0, **others: float) -> Hyper:
    """Hyper-parameters with the learning rate, the decay and the flags that every rule has."""
    flags |= fold.HYPER_MAXIMIZE if options.get("maximize") else 0
    return Hyper(float(options["lr"]), weight_decay=float(options.get("weight_decay", 0.0)), flags=flags, **others)


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
    return _update("sgd", locals())


def _sgd_hyper(options: Options) -> Hyper:
    flags = fold.HYPER_NESTEROV if options["nesterov"] else 0
    return _hyper(options, flags, momentum=options["momentum"], dampening=options["dampening"])


def Adam(  # noqa: N802
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = False,
    maximize: bool = False,
    amsgrad: bool = False,
) -> Update:
    """Adam as torch.optim.Adam defines it; `decoupled=True` is AdamW's weight decay.

    >>> Adam(amsgrad=True).rule.planes
    ('exp_avg', 'exp_avg_sq', 'max_exp_avg_sq')
    """
    return _update("adam", locals())


def _adam_hyper(options: Options) -> Hyper:
    flags = fold.HYPER_DECOUPLED if options.get("decoupled_weight_decay") else 0
    flags |= fold.HYPER_AMSGRAD if options.get("amsgrad") else 0
    beta1, beta2 = map(float, options["betas"])
    return _hyper(options, flags, beta1=beta1, beta2=beta2, epsilon=options["eps"])


def NAdam(  # noqa: N802
    lr: float = 2e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum_decay: float = 4e-3,
    decoupled: bool = False,
    maximize: bool = False,
) -> Update:
    """NAdam as torch.optim.NAdam defines it; `momentum_decay` is sent as the learning rate's decay.

    >>> NAdam().rule.planes
    ('exp_avg', 'exp_avg_sq')
    """
    return _update("nadam", locals())


def _nadam_hyper(options: Options) -> Hyper:
    hyper = _adam_hyper(options)._replace(learning_rate_decay=float(options["momentum_decay"]))
    return hyper._replace(flags=hyper.flags | fold.HYPER_DOUBLE_PRODUCT) if options.get(DOUBLE_PRODUCT) else hyper


DOUBLE_PRODUCT = "double_product"
"""An option of NAdam beside torch's: whether the product of momenta is in double precision, as torch's default type may be."""


def _mu_product(options: Options, steps: int) -> dict[str, float]:
    """NAdam's product of momenta after `steps` steps, by torch's products of floats in single precision, or of doubles.

    >>> _mu_product({"betas": (0.5, 0.999), "momentum_decay": 0.0}, 2)
    {'mu_product': 0.0625}
    """
    beta1, decay = float(options["betas"][0]), float(options["momentum_decay"])
    return {"mu_product": fold.mu_product(beta1, decay, steps, bool(options.get(DOUBLE_PRODUCT)))}


def RAdam(  # noqa: N802
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = False,
    maximize: bool = False,
) -> Update:
    """RAdam as torch.optim.RAdam defines it.

    >>> RAdam().rule.planes
    ('exp_avg', 'exp_avg_sq')
    """
    return _update("radam", locals())


def Adamax(  # noqa: N802
    lr: float = 2e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> Update:
    """Adamax as torch.optim.Adamax defines it.

    >>> Adamax().rule.planes
    ('exp_avg', 'exp_inf')
    """
    return _update("adamax", locals())


def Adadelta(  # noqa: N802
    lr: float = 1.0, rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0.0, maximize: bool = False
) -> Update:
    """Adadelta as torch.optim.Adadelta defines it; `rho` is sent as beta2.

    >>> Adadelta().rule.planes
    ('square_avg', 'acc_delta')
    """
    return _update("adadelta", locals())


def _adadelta_hyper(options: Options) -> Hyper:
    return _hyper(options, beta2=float(options["rho"]), epsilon=options["eps"])


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
    return _update("adagrad", locals())


def _adagrad_hyper(options: Options) -> Hyper:
    return _hyper(options, epsilon=options["eps"], learning_rate_decay=float(options.get("lr_decay", 0.0)))


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
    return _update("rmsprop", locals())


def _rmsprop_hyper(options: Options) -> Hyper:
    flags = fold.HYPER_CENTERED if options["centered"] else 0
    return _hyper(options, flags, momentum=options["momentum"], beta2=float(options["alpha"]), epsilon=options["eps"])


def SparseAdam(  # noqa: N802
    lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, maximize: bool = False
) -> Update:
    """Adam on the rows that a push has, as torch.optim.SparseAdam defines it. All parameters must be tables.

    >>> SparseAdam().rule.planes
    ('exp_avg', 'exp_avg_sq')
    """
    return _update("sparse_adam", locals())


def RowWiseAdagrad(lr: float = 1e-2, eps: float = 1e-10, maximize: bool = False) -> Update:  # noqa: N802
    """Adagrad with one accumulator for each row: it adds the mean of the row's squares. All parameters must be tables.

    >>> RowWiseAdagrad().rule.planes
    ('sum',)
    """
    return _update("row_wise_adagrad", locals())


UPDATE_RULES = {
    "sgd": UpdateRule(
        hyper=_sgd_hyper,
        state=("momentum_buffer",),
        optimizers=("SGD",),
        examples=lambda: {
            "sgd": SGD(0.1, weight_decay=0.01, maximize=True),
            "momentum": SGD(0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
            "nesterov": SGD(0.1, momentum=0.9, nesterov=True),
        },
        only_with={"momentum_buffer": "momentum"},
        has_steps=False,
        row_rule="sgd",
    ),
    "adam": UpdateRule(
        hyper=_adam_hyper,
        state=("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
        optimizers=("Adam", "AdamW"),
        examples=lambda: {
            "adam": Adam(0.01, weight_decay=0.1),
            "adamw": Adam(0.01, betas=(0.3, 0.999), weight_decay=0.1, decoupled=True),
            "amsgrad": Adam(0.01, weight_decay=0.1, amsgrad=True),
        },
        only_with={"max_exp_avg_sq": "amsgrad"},
        squares=("exp_avg_sq", "max_exp_avg_sq"),
    ),
    "adagrad": UpdateRule(
        hyper=_adagrad_hyper,
        state=("sum",),
        optimizers=("Adagrad",),
        examples=lambda: {"adagrad": Adagrad(0.05, lr_decay=0.05, weight_decay=0.01)},
        squares=("sum",),
        initial_option="initial_accumulator_value",
        row_rule="adagrad",
    ),
    "rmsprop": UpdateRule(
        hyper=_rmsprop_hyper,
        state=("square_avg", "momentum_buffer", "grad_avg"),
        optimizers=("RMSprop",),
        examples=lambda: {
            "rmsprop": RMSProp(weight_decay=0.01),
            "rmsprop-momentum": RMSProp(momentum=0.9),
            "rmsprop-centered": RMSProp(momentum=0.9, centered=True),
        },
        only_with={"momentum_buffer": "momentum", "grad_avg": "centered"},
        squares=("square_avg",),
    ),
    "nadam": UpdateRule(
        hyper=_nadam_hyper,
        state=("exp_avg", "exp_avg_sq"),
        optimizers=("NAdam",),
        examples=lambda: {
            "nadam": NAdam(0.01, weight_decay=0.1),
            "nadamw": NAdam(0.01, betas=(0.3, 0.999), weight_decay=0.1, decoupled=True),
        },
        squares=("exp_avg_sq",),
        fixed_options=("betas", "momentum_decay"),
        scalars=_mu_product,
    ),
    "radam": UpdateRule(
        hyper=_adam_hyper,
        state=("exp_avg", "exp_avg_sq"),
        optimizers=("RAdam",),
        examples=lambda: {
            "radam": RAdam(0.01, weight_decay=0.1),
            "radam-rectified": RAdam(0.01, betas=(0.3, 0.8), weight_decay=0.1, decoupled=True),
        },
        squares=("exp_avg_sq",),
    ),
    "adamax": UpdateRule(
        hyper=_adam_hyper,
        state=("exp_avg", "exp_inf"),
        optimizers=("Adamax",),
        examples=lambda: {"adamax": Adamax(0.01, weight_decay=0.1)},
        squares=("exp_inf",),
    ),
    "adadelta": UpdateRule(
        hyper=_adadelta_hyper,
        state=("square_avg", "acc_delta"),
        optimizers=("Adadelta",),
        examples=lambda: {"adadelta": Adadelta(0.5, weight_decay=0.01)},
        squares=("square_avg", "acc_delta"),
    ),
    "sparse_adam": UpdateRule(
        hyper=_adam_hyper,
        state=("exp_avg", "exp_avg_sq"),
        optimizers=("SparseAdam",),
        examples=dict,
        squares=("exp_avg_sq",),
        row_rule="sparse_adam",
        only_rows=True,
    ),
    "row_wise_adagrad": UpdateRule(
        hyper=_adagrad_hyper,
        state=("sum",),
        optimizers=(),
        examples=dict,
        squares=("sum",),
        row_rule="row_wise_adagrad",
        only_rows=True,
    ),
}


def examples() -> dict[str, Update]:
    """Updates by name: the examples of all rules."""
    return {name: update for row in UPDATE_RULES.values() for name, update in row.examples().items()}
