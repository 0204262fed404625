"""An optimizer in another process: the job's server gets class and attributes by value, and parameters by number."""

import io
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numba import cloudpickle

from fastps.errors import UnsupportedError
from fastps.job.update_rules import Hyper, PythonRule

Numbers = Sequence[Sequence[Hyper]]
_LEFT_OUT = {"step", "_zero_grad_profile_name"}  # of this process: a step() that a scheduler has patched, a profiler's name


@dataclass(frozen=True)
class OptimizerOrder:
    """What the server is told of the optimizer: its pickle, and where modules of the script are found."""

    pickled: bytes
    path: tuple[str, ...]

    @staticmethod
    def of(optimizer: torch.optim.Optimizer, tensors: Sequence[torch.Tensor]) -> "OptimizerOrder":
        """Raises UnsupportedError for an optimizer that cannot be rebuilt from its attributes."""
        numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        name = type(optimizer).__name__

        class Pickler(cloudpickle.CloudPickler):
            def persistent_id(self, value: object) -> int | None:
                if isinstance(value, torch.nn.Parameter) and id(value) not in numbers:
                    raise UnsupportedError(
                        f"{name} refers to a parameter of shape {tuple(value.shape)} that is in none of its param_groups: the"
                        " job's server runs its step(), and would have a copy; expected all in its param_groups"
                    )
                return numbers.get(id(value))

        kept = {key: value for key, value in optimizer.__dict__.items() if key not in _LEFT_OUT and not key.endswith("_hooks")}
        try:
            with io.BytesIO() as out:
                pickler: Any = Pickler(out)  # type: ignore[no-untyped-call]
                pickler.dump((type(optimizer), kept))
                return OptimizerOrder(out.getvalue(), tuple(sys.path))
        except UnsupportedError:
            raise
        except Exception as error:  # of any kind: the attributes are the script's
            raise UnsupportedError(
                f"{name}: the job's server runs its step(): expected attributes that pickle, found {type(error).__name__}:"
                f" {error}"
            ) from error

    def make(self, tensors: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        """The optimizer, with these parameters. Raises UnsupportedError."""
        sys.path[:] = [*self.path, *(folder for folder in sys.path if folder not in self.path)]

        class Unpickler(pickle.Unpickler):
            def persistent_load(self, number: Any) -> Any:
                return tensors[number]

        try:
            kind, attributes = Unpickler(io.BytesIO(self.pickled)).load()  # our own parent's
            made: torch.optim.Optimizer = object.__new__(kind)
            made.__setstate__(attributes)
        except Exception as error:  # of any kind: the class is the script's
            raise UnsupportedError(
                f"the optimizer cannot be made again in the job's server: {type(error).__name__}: {error}; expected its class"
                " in the script, or in a module that the server can import"
            ) from error
        return made


class PushedOptions:
    """The options that pushes carry: what a script or a scheduler changes in its param_groups reaches the server with a push.

    An option that no worker changes stays the optimizer's own, which may count in it.
    """

    def __init__(self, rule: PythonRule, groups: Sequence[dict[str, Any]]) -> None:
        self._rule = rule
        self._groups = groups
        self._last = [list(rule.numbers_of(group)) for group in groups]

    def take(self, pushed: Numbers, rates: Sequence[float]) -> float:
        """Set what has changed in the pushes of a step. Returns the factor of the learning rates, from those of the pushes."""
        for number, (group, last) in enumerate(zip(self._groups, self._last, strict=True)):
            for place, (name, index) in enumerate(self._rule.options):
                values = [hypers[number][place] for hypers in pushed]
                value = sum(values) / len(values) if name == "lr" and len(set(values)) > 1 else values[0]
                if value != last[place]:
                    last[place] = value
                    group[name] = _changed(group[name], index, value)
        return sum(rates) / len(rates)


def _changed(old: Any, index: int, value: float) -> Any:
    """An option with a new value, of the type that it had."""
    if index >= 0:
        return tuple(value if place == index else each for place, each in enumerate(old))
    if isinstance(old, torch.Tensor):
        return old.fill_(value)
    return int(value) if isinstance(old, int) and value.is_integer() else value


def options_of(group: Mapping[str, Any], most: int) -> tuple[tuple[str, int], ...]:
    """The options that fit into a push, by name, and their places in a tuple or -1: the learning rate first.

    >>> options_of({"params": [], "momentum": 0.9, "lr": 0.1, "betas": (0.9, 0.99), "nesterov": True, "mode": "x"}, 8)
    (('lr', -1), ('momentum', -1), ('betas', 0), ('betas', 1))
    """
    found: list[tuple[str, int]] = []
    for name in sorted(group, key=lambda name: name != "lr"):
        value = group[name]
        if isinstance(value, tuple) and all(isinstance(each, int | float) for each in value):
            found += [(name, place) for place in range(len(value))]
        elif _is_number(value):
            found.append((name, -1))
    return tuple(found[:most])


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)
