"""Policies: when gradients are folded, when a worker may go on, what a pull waits for, how a step is scaled.

A policy is data: four small values and the bounds they need. The named disciplines are rows of one table, `DISCIPLINES`; the
store and the simulator read the values and know no names. Refuses to decide anything: kernels/scheduler.pyx does.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from fastps.errors import PolicyError

MAX_BOUND = 1_000_000  # larger bounds than anyone needs; keeps the controller's range (high - low) finite


@dataclass(frozen=True)
class Policy:
    """One synchronization scheme, as values.

    Attributes:
        spec: the canonical text, as `parse_policy` reads it.
        fold: "each" push when it arrives, or "all" live workers' pushes of one version together.
        grant: a worker goes on "at-once", with the "next-version", or while "bounded" ahead of the slowest.
        low, high: the bound in steps (s of SSP: low == high; s_L and s_U of DSSP).
        release: how a waiting worker is released (DSSP, Algorithm 1, line 17): "next-push" or "printed".
        hard_bound: never grant a step to a worker that is more than `high` ahead (DSSP, Theorem 2).
        pull: what a pull brings: "all" shards.
        scale: how the folded gradient is scaled: "mean" of the pushes of one version, or "one".
    """

    spec: str
    fold: str
    grant: str
    low: int = 0
    high: int = 0
    release: str = "printed"
    hard_bound: bool = False
    pull: str = "all"
    scale: str = "one"

    @property
    def waits_for_fold(self) -> bool:
        """Whether a grant implies that the worker's own push is folded."""
        return self.grant == "next-version"

    @property
    def at_once(self) -> bool:
        """Whether a worker goes on without waiting for anything."""
        return self.grant == "at-once"


def BSP() -> Policy:  # noqa: N802 - the papers' names
    """Bulk synchronous parallel: all workers of a version, their mean, then all go on (DSSP paper, section I.A.1).

    >>> BSP().spec
    'bsp'
    """
    return Policy("bsp", fold="all", grant="next-version", scale="mean")


def ASP() -> Policy:  # noqa: N802
    """Asynchronous parallel: every push is folded when it arrives, nobody waits (DSSP paper, section I.A.2)."""
    return Policy("asp", fold="each", grant="at-once")


def SSP(s: int) -> Policy:  # noqa: N802
    """Stale synchronous parallel: a worker goes on while it is not more than `s` pushes ahead of the slowest.

    The bound is on grants, as line 8 of DSSP's Algorithm 1 tests it: the gap just after the next push may be s + 1.
    Raises PolicyError unless 0 <= s <= 1,000,000.

    >>> SSP(3).spec
    'ssp:3'
    """
    _check_bound("ssp", "s", s)
    return Policy(f"ssp:{s}", fold="each", grant="bounded", low=s, high=s)


def DSSP(low: int, high: int, *, release: str = "next-push", hard_bound: bool = False) -> Policy:  # noqa: N802
    """Dynamic SSP: beyond `low` the fastest worker gets as many extra steps, up to `high - low`, as the controller predicts.

    Algorithm 1's line 17 has two readings. As "printed", a worker without credit waits until it is within `low` again.
    With "next-push" it is released at the slowest worker's next push, the instant whose wait the controller minimizes; this
    is the default, for it alone always gives Table I's throughput (DSSP as fast as ASP, SSP half as fast). With two workers of
    speeds 3.1 : 1 and dssp:3,15 (tests/kernels/test_scheduler.py), next-push does ASP's 1.32 steps per unit; printed does
    anything from SSP's 0.65 to ASP's 1.32, depending on range, phase and jitter. In neither reading is the gap bounded by
    `high`; `hard_bound=True` caps the credit so that no worker is granted a step while more than `high` ahead, which Theorem 2
    needs, and costs the speed (0.65). As printed (line 14), r* = 3 lets a worker begin four steps; this is kept.

    Raises PolicyError unless 0 <= low <= high and release is one of the two.

    >>> DSSP(3, 15).spec
    'dssp:3,15'
    >>> DSSP(3, 15, release="printed", hard_bound=True).spec
    'dssp:3,15,release=printed,hard_bound=true'
    """
    _check_bound("dssp", "lo", low)
    _check_bound("dssp", "hi", high)
    if high < low:
        raise PolicyError(f"dssp:{low},{high}: expected lo <= hi, found lo={low} and hi={high}; write dssp:{high},{low}?")
    if release not in ("next-push", "printed"):
        raise PolicyError(f"dssp: expected release=next-push or release=printed, found release={release}")
    spec = f"dssp:{low},{high}"
    spec += "" if release == "next-push" else f",release={release}"
    spec += ",hard_bound=true" if hard_bound else ""
    return Policy(spec, fold="each", grant="bounded", low=low, high=high, release=release, hard_bound=hard_bound)


def _check_bound(name: str, what: str, value: int) -> None:
    if not 0 <= value <= MAX_BOUND:
        raise PolicyError(f"{name}: expected {what} from 0 to {MAX_BOUND}, found {value}")


@dataclass(frozen=True)
class Discipline:
    """A row of the table: how the spec is written, and what makes the policy of its arguments."""

    usage: str
    build: Callable[..., Policy]
    numbers: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


DISCIPLINES: dict[str, Discipline] = {
    "bsp": Discipline("bsp", BSP),
    "asp": Discipline("asp", ASP),
    "ssp": Discipline("ssp:s", SSP, ("s",)),
    "dssp": Discipline(
        "dssp:lo,hi[,release=next-push|printed][,hard_bound=true]", DSSP, ("lo", "hi"), ("release", "hard_bound")
    ),
}
_NEXT_SPEC = re.compile(r",(?=\s*(?:" + "|".join(DISCIPLINES) + r")\b(?!\s*=))")


def parse_policy(spec: "str | Policy") -> Policy:
    """Read one spec, such as "ssp:3"; a Policy is returned as it is. Raises PolicyError with what was expected.

    >>> parse_policy("dssp:3,15").high
    15
    """
    if isinstance(spec, Policy):
        return spec
    name, colon, rest = spec.strip().partition(":")
    discipline = DISCIPLINES.get(name.strip().lower())
    if discipline is None:
        known = ", ".join(row.usage for row in DISCIPLINES.values())
        raise PolicyError(f"unknown synchronization {spec!r}: expected one of {known}")
    parts = [part.strip() for part in rest.split(",")] if colon else []
    numbers = [_number(spec, part, discipline) for part in parts if "=" not in part]
    if len(numbers) != len(discipline.numbers):
        raise PolicyError(f"{spec!r}: expected {discipline.usage}, found {len(numbers)} of {len(discipline.numbers)} numbers")
    options = dict(_option(spec, part, discipline) for part in parts if "=" in part)
    return discipline.build(*numbers, **options)


def parse_policies(specs: str) -> list[Policy]:
    """Read a list of specs; a comma begins a new spec only where the name of a discipline follows it.

    >>> [policy.spec for policy in parse_policies("bsp,asp,ssp:3,dssp:3,15")]
    ['bsp', 'asp', 'ssp:3', 'dssp:3,15']
    """
    return [parse_policy(spec) for spec in _NEXT_SPEC.split(specs)]


def _number(spec: str, part: str, discipline: Discipline) -> int:
    try:
        return int(part)
    except ValueError:
        raise PolicyError(f"{spec!r}: expected {discipline.usage} with whole numbers, found {part!r}") from None


def _option(spec: str, part: str, discipline: Discipline) -> tuple[str, str | bool]:
    key, _, value = (piece.strip() for piece in part.partition("="))
    if key not in discipline.options:
        raise PolicyError(f"{spec!r}: expected {discipline.usage}, found the option {key!r}")
    if value.lower() in ("true", "false"):
        return key, value.lower() == "true"
    return key, value
