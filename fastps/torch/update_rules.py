"""The torch optimizers that the fold can run, and the conversion of their param_groups to hyper-parameters.

An option that the fold would compute differently raises an error that names it. This module holds no state: `entry_of` only
maps the fold's optimizer-state tensors to torch's names.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fastps.errors import UnsupportedError, UsageError
from fastps.job.update_rules import UPDATE_RULES, Hyper, Rule, rule_for
from fastps.job.user_rules import UserRule
from fastps.torch.rule_optimizer import RuleOptimizer

_REFUSED_OPTIONS = ("amsgrad", "differentiable", "capturable")
_KNOWN = {getattr(torch.optim, kind): name for name, row in UPDATE_RULES.items() for kind in row.optimizers}

_OF_PARAMETERS = ("params", "param_names")  # a param_group's keys that describe parameters, not the rule


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """The rule of a torch optimizer. Raises UnsupportedError naming the optimizer or the option."""
    kind = type(optimizer)
    if isinstance(optimizer, RuleOptimizer):
        return optimizer.rule
    if kind not in _KNOWN:
        raise UnsupportedError(
            f"expected torch.optim.{', '.join(known.__name__ for known in _KNOWN)} or a fastps.RuleOptimizer, found"
            f" {kind.__module__}.{kind.__qualname__}: the fold does not know its arithmetic"
        )
    for group in optimizer.param_groups:
        for option in _REFUSED_OPTIONS:
            if group.get(option):
                raise UnsupportedError(f"{kind.__name__}({option}=True) is not supported: create the optimizer without it")
    return rule_for(_KNOWN[kind], optimizer.param_groups, optimizer.defaults)


def hyper_of(group: dict[str, Any], rule: Rule) -> Hyper:
    """A param_group's current hyper-parameters; a learning rate that is a tensor is read."""
    if isinstance(rule, UserRule):
        # A user's rule gets the fold's hyper-parameter fields in the order of its names.
        values = [float(group["lr" if name == "learning_rate" else name]) for name in rule.hyper_names]
        return Hyper(*values)  # type: ignore[arg-type]
    row = UPDATE_RULES[rule.name]
    for plane, option in row.only_with.items():
        if group.get(option) and plane not in rule.planes:
            raise UnsupportedError(f"{option} was off when the optimizer was wrapped and is not now: set it before wrapping")
    return row.hyper(group)


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
        self._made: list[Hyper] = []

    def of(self, groups: list[dict[str, Any]]) -> list[Hyper]:
        """The current hyper-parameters, one per group. The caller must not change the list."""
        if self._groups is None or self._groups != groups:
            self._made = [hyper_of(group, self._rule) for group in groups]
            options = [value for group in groups for key, value in group.items() if key not in _OF_PARAMETERS]
            # "params" holds the same list object, so the comparison does not look into it.
            self._groups = [dict(group) for group in groups] if all(map(_cannot_change, options)) else None
        return self._made


def _cannot_change(value: object) -> bool:
    """Whether a value is immutable: a tensor or a list can change while it stays the same object."""
    return (
        value is None
        or isinstance(value, int | float | str)
        or (isinstance(value, tuple) and all(isinstance(part, int | float) for part in value))
    )


def entry_of(group: Mapping[str, Any], rule: Rule, steps: int, plane: Callable[[str], torch.Tensor]) -> dict[str, Any] | None:
    """A parameter's entry in torch's state after `steps` steps; `plane` maps a name to its tensor. None if torch keeps none."""
    if isinstance(rule, UserRule):
        names, has_steps = list(rule.planes), True
    else:
        # Those that torch keeps for a parameter of this group; the fold may keep more, for other groups.
        names, has_steps = UPDATE_RULES[rule.name].used_state(group), UPDATE_RULES[rule.name].has_steps
    if not steps or not names:
        return None
    entry: dict[str, Any] = {"step": torch.tensor(float(steps))} if has_steps else {}
    return entry | {name: plane(name) for name in names}


Row = tuple[str, tuple[int, ...], tuple[int, ...], int]
"""A parameter's name, shape, stride and param_group."""


def rows_of(groups: list[dict[str, Any]], model: torch.nn.Module | None) -> list[Row]:
    """The parameters of all param_groups, in order, with the names that `model` gives them.

    Raises UsageError if there are none, UnsupportedError for a parameter that cannot be in the arena.

    >>> rows_of([{"params": [torch.zeros(2, 3)]}], None)
    [('param_groups[0][0]', (2, 3), (3, 1), 0)]
    """
    names = {id(tensor): name for name, tensor in model.named_parameters()} if model is not None else {}
    rows = []
    for group_index, group in enumerate(groups):
        for index, tensor in enumerate(group["params"]):
            given = group.get("param_names")
            name = names.get(id(tensor)) or (given[index] if given else f"param_groups[{group_index}][{index}]")
            check_parameter(name, tensor)
            rows.append((name, tuple(tensor.shape), tuple(tensor.stride()), group_index))
    if not rows:
        raise UsageError("expected an optimizer with at least one parameter, found none")
    return rows


def check_parameter(name: str, parameter: torch.Tensor) -> None:
    """Raise UnsupportedError for a parameter that cannot be in the arena: another dtype, layout or device, or with gaps."""
    if parameter.layout is not torch.strided:
        raise UnsupportedError(
            f"parameter {name!r}: expected a dense tensor, found {parameter.layout}; sparse is not supported"
        )
    if parameter.dtype is not torch.float32:
        raise UnsupportedError(f"parameter {name!r}: expected float32, found {parameter.dtype}; use model.float()")
    if parameter.device.type not in ("cpu", "cuda"):
        raise UnsupportedError(
            f"parameter {name!r}: expected a tensor on the CPU or a CUDA GPU, found one on {parameter.device}"
        )
    if parameter.numel() and not _is_dense(parameter):
        raise UnsupportedError(
            f"parameter {name!r}: expected a tensor without gaps or overlaps, found shape {tuple(parameter.shape)} with stride"
            f" {tuple(parameter.stride())}; use .contiguous() before wrapping"
        )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory exactly once, in some order of the dimensions (channels_last does)."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True
