"""The torch optimizers that the fold can run, and the conversion of their param_groups to hyper-parameters.

An option that the fold would compute differently raises an error that names it. This module holds no state: `entry_of` only
maps the fold's optimizer-state tensors to torch's names.
"""

import logging
import math
import operator
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from fastps.errors import UnsupportedError, UsageError
from fastps.job.layout import GradientType
from fastps.job.policy import Policy
from fastps.job.update_rules import DOUBLE_PRODUCT, UPDATE_RULES, Hyper, PythonRule, Rule, UpdateRule, folded, rule_for
from fastps.job.user_rules import UserRule
from fastps.kernels.update.fold import RULE_SGD
from fastps.torch.names import UNNAMED, of_groups
from fastps.torch.own_optimizers import RowWiseAdagradOptimizer, RuleOptimizer

logger = logging.getLogger("fastps.torch")

_WITHOUT_EFFECT = {
    "foreach": logging.INFO,
    "fused": logging.INFO,
    "capturable": logging.INFO,
    "differentiable": logging.WARNING,
}
"""Options that choose how torch runs an optimizer, and the level of the message that they change nothing here."""

_KNOWN: dict[type, str] = {getattr(torch.optim, kind): name for name, row in UPDATE_RULES.items() for kind in row.optimizers}
_KNOWN[RowWiseAdagradOptimizer] = "row_wise_adagrad"

WRAP_ANEW = (
    "in a running job every worker, after the same step, calls inner = optimizer.unwrap(), changes the parameters of inner, and"
    " wraps it again"
)
MASTER = "master"
"""The name of a half's float32 weights in its entry of torch's state."""
HALVES = (torch.float16, torch.bfloat16)
_OF_PARAMETERS = ("params", "param_names")  # a param_group's keys that describe parameters, not the rule


def rule_of(optimizer: torch.optim.Optimizer, policy: Policy) -> Rule:
    """The rule that the fold runs for a torch optimizer, a PythonRule for one whose arithmetic the fold does not know.

    Raises UnsupportedError naming the optimizer or the option.
    """
    kind = type(optimizer)
    if isinstance(optimizer, RuleOptimizer):
        return folded(optimizer.rule, policy)
    name = kind.__name__
    if kind not in _KNOWN:
        made = PythonRule(f"{kind.__module__}.{kind.__qualname__}", RULE_SGD, (), switches=_digest(optimizer.param_groups))
        return folded(made, policy)
    for option, level in _WITHOUT_EFFECT.items():
        if any(group.get(option) for group in optimizer.param_groups):
            logger.log(
                level, "%s(%s=True) has no effect: the fold updates the weights, and no gradient flows through it", name, option
            )
    rule = rule_for(_KNOWN[kind], optimizer.param_groups, optimizer.defaults)
    groups, state = optimizer.param_groups, optimizer.state
    check_scalars(rule, [(group, state.get(each, {})) for group in groups for each in group["params"]])
    return folded(rule, policy)


def _digest(groups: Sequence[Mapping[str, Any]]) -> int:
    """31 bits of the options other than the rates, of those that are numbers or text."""
    plain = [{name: value for name, value in group.items() if name != "lr" and _cannot_change(value)} for group in groups]
    return zlib.crc32(repr(plain).encode()) >> 1


def _row_of(rule: Rule) -> UpdateRule:
    """The rule's row of the table. A user's rule, and one that runs in Python, has none, and gets one here."""
    if isinstance(rule, PythonRule):
        switches = rule.switches
        return UpdateRule(lambda group: Hyper(float(group.get("lr", 0.0)), flags=switches), (), (), dict, has_steps=False)
    if not isinstance(rule, UserRule):
        return UPDATE_RULES[rule.name]

    def hyper(group: Mapping[str, Any]) -> Hyper:
        # The fold's hyper-parameter fields, in the order of the rule's names.
        values = [float(group["lr" if name == "learning_rate" else name]) for name in rule.hyper_names]
        return Hyper(*values)  # type: ignore[arg-type]

    return UpdateRule(hyper, rule.planes, (), dict)


def hyper_of(group: dict[str, Any], rule: Rule) -> Hyper:
    """A param_group's current hyper-parameters; a learning rate that is a tensor is read."""
    row = _row_of(rule)
    for plane, option in row.only_with.items():
        if group.get(option) and plane not in rule.planes and not rule.in_workers:
            raise UnsupportedError(
                f"{option} was off when the optimizer was wrapped and is not now: set it before wrapping; in a running job"
                " every worker, after the same step, calls inner = optimizer.unwrap(), sets it, and wraps inner again"
            )
    return row.hyper(_with_precision(group, [tensor.dtype for tensor in group["params"]]))


def _with_precision(group: Mapping[str, Any], dtypes: Sequence[torch.dtype]) -> Mapping[str, Any]:
    """A param_group whose parameters have these types, with the precision in which torch multiplies NAdam's momenta.

    It is that of torch's default type. A float32 job multiplies them in single precision whatever that is.
    """
    is_double = torch.get_default_dtype() == torch.float64 and torch.float64 in dtypes
    return {**group, DOUBLE_PRODUCT: True} if is_double else group


class Hypers:
    """The hyper-parameters of all param_groups, recomputed only after one of them has changed.

    >>> group = {"params": [], "lr": 0.5, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False}
    >>> hypers = Hypers(rule_for("sgd", [group], {}))
    >>> hypers.of([group]) is hypers.of([group])
    True
    >>> group["lr"] = 0.25
    >>> hypers.of([group])[0].learning_rate
    0.25
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._groups: list[dict[str, Any]] | None = None  # the last groups; None if they cannot be compared
        self._made: tuple[Hyper, ...] = ()
        self._numbers: list[tuple[int, int, torch.Tensor]] = []  # the group, the place and the parameter, of one number each
        self._first: list[tuple[list[torch.Tensor], dict[str, Any]]] = []  # each group's parameters, and options that must stay

    def of(self, groups: list[dict[str, Any]]) -> tuple[Hyper, ...]:
        """The current hyper-parameters, one per group."""
        try:
            are_same = groups == self._groups
        except Exception:  # of any kind: values that cannot be compared (tensors of several numbers, arrays) are not the same
            are_same = False
        if not are_same or (self._numbers and self._are_exchanged(groups)):
            self._check_same(groups)
            self._made = tuple([hyper_of(group, self._rule) for group in groups])
            options = [value for group in groups for key, value in group.items() if key not in _OF_PARAMETERS]
            # A comparison of lists looks into no tensor that is the same object in both. Others of one number can be equal.
            kept = [{**group, "params": list(group["params"])} for group in groups]
            self._groups = kept if all(map(_cannot_change, options)) else None
            places = [(group, index, each) for group, of in enumerate(kept) for index, each in enumerate(of["params"])]
            self._numbers = [place for place in places if place[2].numel() == 1]
        return self._made

    def _are_exchanged(self, groups: list[dict[str, Any]]) -> bool:
        """Whether another parameter is in the place of one of a single number, to which it can be equal."""
        return any(groups[group]["params"][index] is not each for group, index, each in self._numbers)

    def _check_same(self, groups: list[dict[str, Any]]) -> None:
        """Raise UsageError if a group has other parameters than at the first call, for which the arena has no place.

        Raises UnsupportedError for another value of an option that must stay. The push refuses another number of groups.
        """
        names = _row_of(self._rule).fixed_options
        now = [(list(group["params"]), {name: group[name] for name in names}) for group in groups]
        self._first = self._first or now
        for index, ((old, fixed), (new, options)) in enumerate(zip(self._first, now, strict=False)):
            if changed := [name for name in names if fixed[name] != options[name]]:
                raise UnsupportedError(
                    f"{changed[0]} changed after the first step, and {self._rule.name} computes state from it and the number of"
                    " steps: keep it as it is (OneCycleLR and CyclicLR: cycle_momentum=False)"
                )
            if len(old) != len(new) or any(map(operator.is_not, old, new)):
                raise UsageError(
                    f"param_groups[{index}]: expected the {len(old)} parameters that it had when it was wrapped, found"
                    f" {len(new)}, or others in their place; {WRAP_ANEW}"
                )


def _cannot_change(value: object) -> bool:
    """Whether a value is immutable: a tensor or a list can change while it stays the same object."""
    return (
        value is None
        or isinstance(value, int | float | str)
        or (isinstance(value, tuple) and all(isinstance(part, int | float) for part in value))
    )


def entry_of(group: Mapping[str, Any], rule: Rule, steps: int, plane: Callable[[str], torch.Tensor]) -> dict[str, Any] | None:
    """A parameter's entry in torch's state after `steps` steps; `plane` maps a name to its tensor. None if torch keeps none."""
    row = _row_of(rule)
    # What torch keeps for a parameter of this group; the fold may keep more, for other groups.
    names = [] if rule.in_workers else row.used_state(group)
    if not names or (not steps and rule.name != "adagrad"):  # torch's Adagrad alone has state before its first step
        return None
    # torch counts in single precision also where the default type is a half, which ends at 256 or 2048.
    count = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    entry: dict[str, Any] = {"step": torch.tensor(float(steps), dtype=count)} if row.has_steps else {}
    planes = {name: plane(name) for name in names}
    precise = _with_precision(group, [tensor.dtype for tensor in planes.values()])
    dtype = torch.float64 if DOUBLE_PRODUCT in precise else torch.float32
    scalars = {name: torch.tensor(value, dtype=dtype) for name, value in row.scalars(precise, steps).items()}
    return entry | scalars | planes


def round_state(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """A hook before steps of a torch optimizer whose job has ended: torch computes in halves, and has no masters."""
    for tensor, entry in optimizer.state.items():
        if isinstance(tensor, torch.Tensor) and tensor.dtype in HALVES and entry.pop(MASTER, None) is not None:
            for name in UPDATE_RULES[_KNOWN[type(optimizer)]].state:
                if name in entry:
                    entry[name] = entry[name].to(tensor.device, tensor.dtype)


def names_of(rule: Rule, groups: Sequence[Mapping[str, Any]]) -> set[str]:
    """The names that entries of torch's state have for this rule, and `MASTER` if there are halves. Others are a script's own.

    >>> group = {"params": [torch.zeros(1)], "momentum": 0.9}
    >>> names_of(rule_for("sgd", [group], {}), [group])
    {'momentum_buffer'}
    """
    row = _row_of(rule)
    are_halves = any(tensor.dtype in HALVES for group in groups for tensor in group["params"])
    extra = [name for name, is_used in (("step", row.has_steps), (MASTER, are_halves)) if is_used]
    return {*extra, *rule.planes, *row.scalars(groups[0], 0)}


def check_scalars(rule: Rule, entries: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> None:
    """Check the scalars in parameters' entries of torch's state, each after its param_group: the fold computes them itself.

    Raises UnsupportedError for one that the fold would compute differently, and ValueError for steps that nobody can count.
    """
    row = _row_of(rule)
    for group, entry in entries:
        if not row.has_steps or "step" not in entry:
            continue
        if not (float(entry["step"]).is_integer() and entry["step"] >= 0):
            raise ValueError(f"optimizer.state: expected a whole number in 'step', 0 or more, found {float(entry['step']):g}")
        for name, value in row.scalars(group, int(entry["step"])).items():
            if name in entry and not math.isclose(float(entry[name]), value, rel_tol=1e-4, abs_tol=1e-30):
                raise UnsupportedError(
                    f"expected {name} {value:g} after {int(entry['step'])} steps with these {' and '.join(row.fixed_options)},"
                    f" found {float(entry[name]):g}: they changed while torch trained, which {rule.name} does not support here"
                )


PARAMETER_TYPES: dict[torch.dtype, GradientType] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float64: "float64",
}
"""The types of parameters, and of pushed gradients, by the names that a layout has for them."""


def pushed_type(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """The type in which gradients are pushed unless the script says: that of the parameters if all have one, else float32.

    >>> pushed_type([torch.zeros(1, dtype=torch.bfloat16)])
    torch.bfloat16
    """
    types = {tensor.dtype for tensor in tensors}
    return types.pop() if len(types) == 1 and types <= PARAMETER_TYPES.keys() else torch.float32


def left_out(groups: list[dict[str, Any]]) -> dict[int, str]:
    """The frozen parameters that a job does not hold, by id, and why: torch skips them, too, while they have no gradient.

    >>> constant = torch.nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
    >>> list(left_out([{"params": [torch.nn.Parameter(torch.zeros(1)), constant]}]).values())
    ['expected float32, float64, bfloat16 or float16, found int8, which the fold does not compute in']
    """
    tensors = [tensor for group in groups for tensor in group["params"]]
    trained = {tensor.dtype for tensor in tensors if tensor.requires_grad}
    found = {}
    for tensor in tensors:
        if tensor.requires_grad or not trained:
            continue
        if why := _why_not(tensor):
            found[id(tensor)] = why
        elif tensor.dtype not in trained:
            types = " and ".join(map(str, trained))
            found[id(tensor)] = f"expected a type of those that trained, {types}, found {tensor.dtype}"
    return found


def without(groups: list[dict[str, Any]], ids: Collection[int]) -> list[dict[str, Any]]:
    """These param_groups without some parameters."""
    return [{**group, "params": [each for each in group["params"] if id(each) not in ids]} for group in groups]


def rows_of(
    groups: list[dict[str, Any]],
    model: torch.nn.Module | None,
    ids: Collection[int] = (),
    modules: Sequence[torch.nn.Module] = (),
) -> list[tuple[str, tuple[int, ...], tuple[int, ...], int]]:
    """The name, shape, stride and param_group of each parameter of all param_groups but those with these `ids`, in order.

    `model` gives the names, else the optimizer, unless another parameter has the name: torch lets two networks' parameters have
    the same; else the smallest of `modules` that holds them all, else their place. Raises UsageError if there are none,
    UnsupportedError for a parameter that cannot be in the arena.

    >>> rows_of([{"params": [torch.zeros(2, 3)]}], None)
    [('param_groups[0][0]', (2, 3), (3, 1), 0)]
    """
    names, given = of_groups(groups, model, modules)
    rows, taken = [], set(names.values())
    for group_index, group in enumerate(groups):
        for index, tensor in enumerate(group["params"]):
            if id(tensor) in ids:
                continue
            place = f"{UNNAMED}{group_index}][{index}]"
            other = given.get(id(tensor), place)
            name = names.get(id(tensor)) or (other if other not in taken else place)
            taken.add(name)
            check_parameter(name, tensor)
            rows.append((name, tuple(tensor.shape), tuple(tensor.stride()), group_index))
    if not rows:
        raise UsageError("expected an optimizer with at least one parameter, found none")
    return rows


def check_parameter(name: str, parameter: torch.Tensor) -> None:
    """Raise UnsupportedError for a parameter that cannot be in the arena."""
    if why := _why_not(parameter):
        raise UnsupportedError(f"parameter {name!r}: {why}")


def _why_not(parameter: torch.Tensor) -> str:
    """Why a parameter cannot be in the arena: its dtype, its layout, its device, or gaps; "" if it can."""
    if torch.nn.parameter.is_lazy(parameter):
        return "expected a shape, found a lazy layer that has none yet: run the model once (a forward pass) before wrapping"
    if parameter.layout is not torch.strided:
        return f"expected a dense tensor, found {parameter.layout}; sparse is not supported"
    if parameter.dtype not in PARAMETER_TYPES:
        found = str(parameter.dtype).removeprefix("torch.")
        cure = ": train its torch.view_as_real, and use torch.view_as_complex of that" if parameter.is_complex() else ""
        return f"expected float32, float64, bfloat16 or float16, found {found}, which the fold does not compute in{cure}"
    if parameter.device.type not in ("cpu", "cuda"):
        return f"expected a tensor on the CPU or a CUDA GPU, found one on {parameter.device}"
    if parameter.numel() and not _is_dense(parameter):
        return (
            f"expected a tensor without gaps or overlaps, found shape {tuple(parameter.shape)} with stride"
            f" {tuple(parameter.stride())}; set p.data = p.data.contiguous() before wrapping"
        )
    return ""


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory exactly once, in some order of the dimensions (channels_last does)."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True
