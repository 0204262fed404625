"""User rules: an elementwise Python function becomes an update rule that the fold runs as fast as a built-in one.

The compiler is imported when the first rule is made, because importing Numba is slow.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import numpy as np
import numpy.typing as npt

from fastps.job.update_rules import Hyper, Rule, Update
from fastps.kernels.update import fold

_MAX_HYPERS = len(Hyper._fields) - 1  # the flags are not available to a user rule


@dataclass(frozen=True)
class UserRule(Rule):
    """A rule made from a user's function. Call it with hyper-parameters to get an Update for `Store.create`."""

    hyper_names: tuple[str, ...] = ()
    takes_step: bool = False
    function: Callable[..., Any] = field(default=lambda: None, compare=False)
    machine_code: object = field(default=None, compare=False, repr=False)
    source: Callable[..., Any] = field(default=lambda: None, compare=False, repr=False)

    def __reduce__(self) -> tuple[Callable[..., "UserRule"], tuple[Any, ...]]:
        """Pickle the function instead of its machine code, which has an address in this process; unpickling compiles it."""
        names = (*self.hyper_names, *(("step",) if self.takes_step else ()))
        return _made_again, (self.source, self.planes, names, self.initial)

    def __call__(self, **hyper: float) -> Update:
        """The rule with its hyper-parameters, given by name. Raises TypeError unless all are given and no others."""
        if set(hyper) != set(self.hyper_names):
            raise TypeError(
                f"rule {self.name!r}: expected the hyper-parameters {', '.join(self.hyper_names)}, found"
                f" {', '.join(hyper) or 'none'}"
            )
        places = Hyper._fields[: len(self.hyper_names)]  # the rule's names map to the fold's fields, in order
        return Update(self, Hyper(**{place: float(hyper[name]) for place, name in zip(places, self.hyper_names, strict=True)}))  # type: ignore[arg-type]

    def reference(
        self,
        weight: npt.NDArray[np.float32],
        state: Sequence[npt.NDArray[np.float32]],
        gradient: npt.NDArray[np.float32],
        hyper: Sequence[float],
        learning_rate: float,
        steps: int,
    ) -> tuple[npt.NDArray[np.float32], list[npt.NDArray[np.float32]]]:
        """Apply the function in Python, element by element. Tests compare the compiled rule with this."""
        numbers = [np.float32(learning_rate), *(np.float32(value) for value in hyper[1 : len(self.hyper_names)])]
        if self.takes_step:
            numbers.append(np.float32(steps + 1))
        out = np.empty((1 + len(state), len(weight)), np.float32)
        for index in range(len(weight)):
            out[:, index] = self.function(weight[index], gradient[index], *(plane[index] for plane in state), *numbers)
        return out[0], list(out[1:])


def rule(
    *, state: Sequence[str] = (), hyper: Sequence[str] = ("learning_rate",), initial: Sequence[float] = ()
) -> Callable[[Callable[..., Any]], UserRule]:
    """Make an update rule from a function of one element: `(weight, gradient, *state, *hyper) -> (weight, *state)`.

    The function takes and returns float32 numbers, and may use arithmetic, `if` and the functions of `math`. It is compiled at
    once; numbers that it uses from outside are compiled in. The gradient arrives summed and scaled, and `learning_rate` scaled
    if the discipline scales it. If the last hyper-parameter is named `step`, it is the number of times that the rule was
    applied to the parameter, from 1.

    >>> @rule(hyper=("learning_rate", "decay"))
    ... def shrinking(weight, gradient, learning_rate, decay):
    ...     return weight * (1 - decay) - learning_rate * gradient
    >>> shrinking(learning_rate=0.1, decay=0.01).hyper.learning_rate
    0.1

    Args:
        state: names of the state floats of each weight; at most 8.
        hyper: names of the hyper-parameters, `learning_rate` first; at most 8, not counting `step`.
        initial: the initial value of each state; zeros if omitted.

    Raises ValueError for a function that cannot be a rule.
    """

    def decorate(function: Callable[..., Any]) -> UserRule:
        if not isinstance(function, FunctionType):
            raise ValueError(f"expected a plain function to make a rule of, found {type(function).__name__}")
        planes, names = tuple(state), tuple(hyper)
        takes_step = names[-1:] == ("step",)
        numbers = names[:-1] if takes_step else names
        _check(function, planes, names, numbers, initial)
        from fastps.kernels.update import jit

        compiled = jit.compile_rule(function, len(planes), len(numbers), takes_step)
        return UserRule(
            function.__name__,
            fold.RULE_USER,
            planes,
            tuple(float(value) for value in initial),
            compiled.digest,
            compiled.address,
            numbers,
            takes_step,
            compiled.function,
            compiled,
            function,
        )

    return decorate


def _made_again(
    function: Callable[..., Any], state: tuple[str, ...], hyper: tuple[str, ...], initial: tuple[float, ...]
) -> UserRule:
    return rule(state=state, hyper=hyper, initial=initial)(function)


def _check(
    function: FunctionType, planes: tuple[str, ...], names: tuple[str, ...], numbers: tuple[str, ...], initial: Sequence[float]
) -> None:
    name = function.__name__
    if numbers[:1] != ("learning_rate",) or len(numbers) > _MAX_HYPERS or len(planes) > fold.MAX_USER_PLANES:
        raise ValueError(
            f"rule {name!r}: expected learning_rate as the first of at most {_MAX_HYPERS} hyper-parameters, and at most"
            f" {fold.MAX_USER_PLANES} states, found {', '.join(names) or 'none'} and {len(planes)} states"
        )
    if len(initial) not in (0, len(planes)):
        raise ValueError(f"rule {name!r}: expected an initial value for each of {len(planes)} states, found {len(initial)}")
    expected = ("weight", "gradient", *planes, *names)
    parameters = inspect.signature(function).parameters.values()
    if tuple(each.name for each in parameters) != expected or any(
        each.kind is not each.POSITIONAL_OR_KEYWORD or each.default is not each.empty for each in parameters
    ):
        raise ValueError(
            f"rule {name!r}: expected the parameters ({', '.join(expected)}), without defaults, found"
            f" {inspect.signature(function)}"
        )
