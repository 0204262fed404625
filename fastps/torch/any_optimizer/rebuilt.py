"""An optimizer in another process: the job's server gets class and attributes by value, and parameters by number."""

import io
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numba import cloudpickle

from fastps.errors import UnsupportedError
from fastps.job.update_rules import Hyper

_LEFT_OUT = {"step", "_zero_grad_profile_name"}  # of this process: a step() that a scheduler has patched, a profiler's name
_APART = 0x9E3779B9  # from the script's seed, whose numbers are drawn in the workers


@dataclass(frozen=True)
class OptimizerOrder:
    """What the server is told of the optimizer: its pickle, where modules of the script are found, and torch's seed."""

    pickled: bytes
    path: tuple[str, ...]
    seed: int = 0

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
                return OptimizerOrder(out.getvalue(), tuple(sys.path), (torch.initial_seed() + _APART) % (1 << 63))
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


class PushedRates:
    """The learning rates that pushes carry, which schedulers change: those of a step are the mean of its pushes'.

    A rate that no worker changes stays the optimizer's own.
    """

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self._groups = groups
        self._last = [float(group.get("lr", 0.0)) for group in groups]

    def take(self, pushed: Sequence[Sequence[Hyper]]) -> None:
        """Set the rates that have changed. `pushed`: of each push those of all groups."""
        for number, group in enumerate(self._groups):
            rates = [hypers[number].learning_rate for hypers in pushed]
            rate = rates[0] if len(set(rates)) == 1 else sum(rates) / len(rates)
            if rate != self._last[number]:
                self._last[number] = rate
                group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], torch.Tensor) else rate
