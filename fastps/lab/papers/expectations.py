"""A row's expectations of its numbers, as values: near, in order, at least, at most."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan, nextafter
from typing import Any, Protocol

Numbers = Mapping[str, float]


class Expectation(Protocol):
    """An expectation of the numbers that a row measures."""

    @property
    def expected(self) -> Any:
        """The paper's numbers in a form that JSON can hold."""

    @property
    def tolerance(self) -> str:
        """The tolerance, as text."""

    def misses(self, measured: Numbers) -> list[str]:
        """Return a sentence for each number that violates the expectation."""

    def contradictions(self) -> "list[Expectation]":
        """Return expectations of one number each that no numbers meet that meet this one: a check that it can fail."""


@dataclass(frozen=True)
class Near:
    """Each number is within `by` of the expected one, or with `relative` within that share of it.

    >>> Near({"bsp": 2.0}, 0.1).misses({"bsp": 2.2})
    ['bsp: expected 2, found 2.2']
    >>> Near({"bsp": 2.0}, 0.1, relative=True).misses({"bsp": 2.2})
    []
    """

    numbers: Numbers
    by: float
    relative: bool = False

    @property
    def expected(self) -> Any:
        """The numbers."""
        return dict(self.numbers)

    @property
    def tolerance(self) -> str:
        """Such as "±10 %"."""
        return f"±{100 * self.by:g} %" if self.relative else f"±{self.by:g}"

    def misses(self, measured: Numbers) -> list[str]:
        """Return the numbers that are too far off, missing or NaN."""
        return [
            f"{name}: expected {short(number)}, found {short(_of(measured, name))}"
            for name, number in self.numbers.items()
            if not abs(_of(measured, name) - number) <= (abs(number) if self.relative else 1.0) * self.by * (1 + 1e-9)
        ]

    def contradictions(self) -> list[Expectation]:
        """Return each number moved up and down by more than twice the tolerance.

        >>> Near({"r": 3.0}, 0).contradictions()[0].misses({"r": 3.0})
        ['r: expected 3, found 3']
        """
        moved = []
        for name, number in self.numbers.items():
            by = self.by * abs(number) if self.relative else self.by
            far = 2.1 * by + 1e-6 * abs(number) + 1e-9
            moved += [Near({name: number + far}, by), Near({name: number - far}, by)]
        return list(moved)


@dataclass(frozen=True)
class InOrder:
    """The numbers rise in this order; for ties, each may be below the one before by the share `slack` of it.

    With `margin`, each is below the next by more than this share of it.

    >>> InOrder(("r2sp", "asp", "bsp")).misses({"r2sp": 0.7, "asp": 0.9, "bsp": 0.8})
    ['expected asp (0.9) < bsp (0.8)']
    """

    names: Sequence[str]
    slack: float = 0.0
    margin: float = 0.0

    @property
    def expected(self) -> Any:
        """The names with "<" between them, or "<~" where ties are allowed."""
        return (" <~ " if self.slack else " < ").join(self.names)

    @property
    def tolerance(self) -> str:
        """Such as "order, ties within 1 %"."""
        if self.margin:
            return f"order, apart by more than {100 * self.margin:g} %"
        return f"order, ties within {100 * self.slack:g} %" if self.slack else "order"

    def misses(self, measured: Numbers) -> list[str]:
        """Return the neighbors in the wrong order."""
        found = []
        for one, next_ in zip(self.names, self.names[1:], strict=False):
            low, high = _of(measured, one), _of(measured, next_)
            if not (low < high * (1 - self.margin) or (self.slack and high >= low * (1 - self.slack))):
                found.append(f"expected {one} ({short(low)}) < {next_} ({short(high)})")
        return found

    def contradictions(self) -> list[Expectation]:
        """Return each pair of neighbors the other way round, apart by more than a tie.

        >>> [each.expected for each in InOrder(("r2sp", "asp", "bsp")).contradictions()]
        ['asp < r2sp', 'bsp < asp']
        """
        pairs = zip(self.names, self.names[1:], strict=False)
        return [InOrder((next_, one), margin=self.slack) for one, next_ in pairs]


@dataclass(frozen=True)
class Between:
    """Each number lies in (least, most), ends included.

    >>> Between({"b": (2, 6)}).misses({"b": 7})
    ['b: expected 2 to 6, found 7']
    """

    ranges: Mapping[str, tuple[float, float]]

    @property
    def expected(self) -> Any:
        """Name to "least to most", or with an open end to "at most" or "at least"."""
        return {name: _range(*ends) for name, ends in self.ranges.items()}

    @property
    def tolerance(self) -> str:
        """Empty: a range is its own tolerance."""
        return "range"

    def misses(self, measured: Numbers) -> list[str]:
        """Return the numbers outside their range."""
        return [
            f"{name}: expected {_range(*ends)}, found {short(_of(measured, name))}"
            for name, ends in self.ranges.items()
            if not ends[0] <= _of(measured, name) <= ends[1]
        ]

    def contradictions(self) -> list[Expectation]:
        """Return the values above each range and those below it.

        >>> [each.expected for each in Between({"b": (2, float("inf"))}).contradictions()]
        [{'b': 'at most 2'}]
        """
        beyond: list[Expectation] = []
        for name, (least, most) in self.ranges.items():
            beyond += [Between({name: (nextafter(most, inf), inf)})] if most < inf else []
            beyond += [Between({name: (-inf, nextafter(least, -inf))})] if least > -inf else []
        return beyond


def _of(measured: Numbers, name: str) -> float:
    return measured.get(name, float("nan"))


def _range(least: float, most: float) -> str:
    if least == float("-inf"):
        return f"at most {short(most)}"
    return f"at least {short(least)}" if most == float("inf") else f"{short(least)} to {short(most)}"


def short(number: float) -> str:
    """Format a number for a table: four digits, "-" for none.

    >>> short(0.123456), short(1500.0), short(float("nan"))
    ('0.1235', '1500', '-')
    """
    return "-" if isnan(number) else f"{number:.4g}"
