"""User rules: an elementwise Python function becomes an update rule that the fold runs as fast as a built-in one.

The compiler is imported when the first rule is made, because importing Numba is slow.
"""

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import numpy as np
import numpy.typing as npt

from fastps.job.update_rules import Hyper, Rule, Update
from fastps.kernels.cuda import users_rule
from fastps.kernels.update import fold

_MAX_HYPERS = len(Hyper._fields) - 1  # the flags are not available to a user rule


@dataclass(frozen=True)
class UserRule(Rule):
    """A rule made from a user's function. Call it with hyper-parameters to get an Update for `Store.create`."""

    hyper_names: tuple[str, ...] = ()
    takes_step: bool = False
    sums: int = 0
    function: Callable[..., Any] = field(default=lambda: None, compare=False)
    terms: Callable[..., Any] | None = field(default=None, compare=False)
    machine_code: object = field(default=None, compare=False, repr=False)
    source: Callable[..., Any] = field(default=lambda: None, compare=False, repr=False)
    terms_source: Callable[..., Any] | None = field(default=None, compare=False, repr=False)
    cuda: str = field(default="", repr=False)

    def device_text(self) -> str:
        """The text of the rule for the kernels of a GPU. Only a rule with `cuda` has one."""
        return users_rule.text_of(self.name, self.planes, self.hyper_names, self.takes_step, self.cuda)

    def __reduce__(self) -> tuple[Callable[..., "UserRule"], tuple[Any, ...]]:
        """Pickle the functions and not their machine code, which has an address in this process; unpickling compiles them."""
        names = (*self.hyper_names, *(("step",) if self.takes_step else ()))
        options = {"state": self.planes, "hyper": names, "initial": self.initial, "sums": self.terms_source, "cuda": self.cuda}
        return _made_again, (self.source, options)

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
        """Apply the function in Python, element by element, to a whole parameter. Tests compare the compiled rule with this."""
        numbers = [np.float32(learning_rate), *(np.float32(value) for value in hyper[1 : len(self.hyper_names)])]
        if self.takes_step:
            numbers.append(np.float32(steps + 1))
        elements = list(zip(weight, gradient, *state, strict=True))
        if self.terms is not None:
            terms = np.array([self.terms(*element, *numbers) for element in elements], np.float32)
            numbers += [np.float32(total) for total in _sums(terms.reshape(len(weight), self.sums))]
        out = np.empty((1 + len(state), len(weight)), np.float32)
        for index, element in enumerate(elements):
            out[:, index] = self.function(*element, *numbers)
        return out[0], list(out[1:])


def _sums(terms: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """The sum of each column in double precision, in the order of the compiled rule: a tile in eight lanes, then its lanes."""
    total = np.zeros(terms.shape[1])
    for first in range(0, len(terms), fold.TILE):
        tile = np.zeros((-(-min(fold.TILE, len(terms) - first) // 8) * 8, terms.shape[1]))
        tile[: len(terms) - first] = terms[first : first + fold.TILE]
        lanes = np.add.accumulate(tile.reshape(-1, 8, terms.shape[1]))[-1]
        while len(lanes) > 1:
            lanes = lanes[::2] + lanes[1::2]
        total += lanes[0]
    return total


def rule(
    *,
    state: Sequence[str] = (),
    hyper: Sequence[str] = ("learning_rate",),
    initial: Sequence[float] = (),
    sums: Callable[..., Any] | None = None,
    cuda: str = "",
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

    A rule that needs a norm, such as LAMB, reads sums over a whole parameter. `sums` is a second function of one element: its
    results are added up over the parameter, in double precision and always in the same order. The rule takes the sums behind
    its hyper-parameters, under any names:

    >>> def squares(weight, gradient, learning_rate):
    ...     return weight * weight, gradient * gradient
    >>> @rule(sums=squares)
    ... def lars(weight, gradient, learning_rate, weights, gradients):
    ...     return weight - learning_rate * (weights / gradients) ** 0.5 * gradient
    >>> lars.sums
    2

    To run where shards are on a GPU, a rule is written a second time, as statements of C, with the same names. They assign the
    new weight and the new states:

    >>> @rule(cuda="weight = weight - learning_rate * gradient;")
    ... def plain(weight, gradient, learning_rate):
    ...     return weight - learning_rate * gradient
    >>> plain.cuda
    'weight = weight - learning_rate * gradient;'

    Args:
        state: names of the state floats of each weight; at most 8.
        hyper: names of the hyper-parameters, `learning_rate` first; at most 8, not counting `step`.
        initial: the initial value of each state; zeros if omitted.
        sums: `(weight, gradient, *state, *hyper) -> term, ...`: what one element adds to each sum; at most 7 sums.
        cuda: the same rule in C, for GPUs. A job compares it with the function, and all its workers must have the same text.

    Raises ValueError for a function that cannot be a rule.
    """

    def decorate(function: Callable[..., Any]) -> UserRule:
        if not isinstance(function, FunctionType):
            raise ValueError(f"expected a plain function to make a rule of, found {type(function).__name__}")
        planes, names = tuple(state), tuple(hyper)
        takes_step = names[-1:] == ("step",)
        numbers = names[:-1] if takes_step else names
        _check(function.__name__, planes, names, numbers, initial)
        arguments = ("weight", "gradient", *planes, *names)
        if sums is not None and not isinstance(sums, FunctionType):
            raise ValueError(f"rule {function.__name__!r}: expected sums= to be a plain function, found {type(sums).__name__}")
        count = _count_sums(function, arguments) if sums is not None else 0
        _check_arguments(function, arguments, count)
        if cuda and sums is not None:
            raise ValueError(f"rule {function.__name__!r}: expected no cuda= beside sums=, which no kernel adds up")
        users_rule.check_body(function.__name__, cuda)
        if sums is not None:
            _check_arguments(sums, arguments, 0)
        from fastps.kernels.update import jit

        compiled = jit.compile_rule(function, len(planes), len(numbers), takes_step, sums, count)
        return UserRule(
            function.__name__,
            fold.RULE_SUMMING if count else fold.RULE_USER,
            planes,
            tuple(float(value) for value in initial),
            hashlib.sha256(f"{compiled.digest} {cuda}".encode()).hexdigest() if cuda else compiled.digest,
            compiled.address,
            numbers,
            takes_step,
            count,
            compiled.function,
            compiled.terms,
            compiled,
            function,
            sums,
            cuda,
        )

    return decorate


def _made_again(function: Callable[..., Any], options: Mapping[str, Any]) -> UserRule:
    return rule(**options)(function)


def _check(
    name: str, planes: tuple[str, ...], names: tuple[str, ...], numbers: tuple[str, ...], initial: Sequence[float]
) -> None:
    if numbers[:1] != ("learning_rate",) or len(numbers) > _MAX_HYPERS or len(planes) > fold.MAX_USER_PLANES:
        raise ValueError(
            f"rule {name!r}: expected learning_rate as the first of at most {_MAX_HYPERS} hyper-parameters, and at most"
            f" {fold.MAX_USER_PLANES} states, found {', '.join(names) or 'none'} and {len(planes)} states"
        )
    if len(initial) not in (0, len(planes)):
        raise ValueError(f"rule {name!r}: expected an initial value for each of {len(planes)} states, found {len(initial)}")


def _count_sums(function: FunctionType, arguments: tuple[str, ...]) -> int:
    """The number of a rule's parameters for sums, which come last."""
    count = len(inspect.signature(function).parameters) - len(arguments)
    if not 0 < count <= fold.MAX_SUMS:
        raise ValueError(
            f"rule {function.__name__!r}: expected the parameters ({', '.join(arguments)}) and then 1 to {fold.MAX_SUMS} for"
            f" the sums, found {inspect.signature(function)}"
        )
    return count


def _check_arguments(function: FunctionType, arguments: tuple[str, ...], more: int) -> None:
    parameters = list(inspect.signature(function).parameters.values())
    expected = (*arguments, *(each.name for each in parameters[len(arguments) :][:more]))
    if tuple(each.name for each in parameters) != expected or any(
        each.kind is not each.POSITIONAL_OR_KEYWORD or each.default is not each.empty for each in parameters
    ):
        raise ValueError(
            f"rule {function.__name__!r}: expected the parameters ({', '.join(expected)}), without defaults, found"
            f" {inspect.signature(function)}"
        )
