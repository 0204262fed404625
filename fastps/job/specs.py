"""Specs: the text form of policies, such as "dssp:3,15" or "ssp:3,pull=0.75,shards=4".

A spec is a discipline's name, its numbers and its options, followed by modifiers that any discipline accepts.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from fastps.errors import PolicyError
from fastps.job.disciplines import DISCIPLINES, Discipline
from fastps.job.policy import DEFAULT_SHARDS, Policy

_LONGEST = 500  # characters
_SCALE_NAMES = {"1/sigma": "staleness", "1/n": "divisor", "sqrt": "square-root"}
_NAMES = "|".join(re.escape(name) for name in DISCIPLINES)
_NEXT_SPEC = re.compile(rf",(?=\s*(?:{_NAMES})\s*(?:[:,]|$))", re.IGNORECASE)


def _scale(policy: Policy, value: str) -> dict[str, Any]:
    return {"scale": _SCALE_NAMES.get(value, value)}


def _pull(policy: Policy, value: str) -> dict[str, Any]:
    return {"pull": float(value), **({} if policy.shards > 1 else {"shards": DEFAULT_SHARDS})}


def _stagger(policy: Policy, value: str) -> dict[str, Any]:
    return {"grant": "round-robin", "relax": float(value)}


# Modifiers that any discipline accepts: the usage, and the function that returns the values that the modifier changes.
MODIFIERS: dict[str, tuple[str, Callable[[Policy, str], dict[str, Any]]]] = {
    "scale": ("1/sigma|1/n|mean|linear|one: how a step is scaled", _scale),
    "pull": ("f: a step waits for a fraction f of the shards", _pull),
    "pull_timeout": ("S: and up to S seconds for the rest", lambda policy, value: {"pull_timeout": float(value)}),
    "shards": ("K: parts of the model with versions of their own", lambda policy, value: {"shards": _value(value)}),
    "stagger": ("r: grants in a fixed order, r T/N apart", _stagger),
    "ema": ("d: keep a moving average of the weights", lambda policy, value: {"ema": float(value)}),
    "clip": ("g: clip each push to a global norm of g", lambda policy, value: {"clip": float(value)}),
    "combine": ("true: fold pushes that are found together as one sum", lambda policy, value: {"combine": _value(value)}),
}


def parse_policy(spec: "str | Policy") -> Policy:
    """Parse one spec, such as "ssp:3". A Policy is returned unchanged. Raises PolicyError that says what was expected.

    >>> parse_policy("dssp:3,15").high
    15
    >>> parse_policy("ssp:3,pull=0.75").shards
    4
    """
    if isinstance(spec, Policy):
        return spec
    if len(spec) > _LONGEST:
        raise PolicyError(f"expected a spec of at most {_LONGEST} characters, found {len(spec):,}: {spec[:40]!r}...")
    name, colon, rest = spec.strip().partition(":")
    if not colon and "," in name:
        name, _, rest = name.partition(",")
        colon = ":"
    discipline = DISCIPLINES.get(name.strip().lower())
    if discipline is None:
        known = ", ".join(row.usage for row in DISCIPLINES.values())
        raise PolicyError(f"unknown synchronization {spec!r}: expected one of {known}")
    parts = [part.strip() for part in rest.split(",")] if colon else []
    numbers = [part for part in parts if "=" not in part]
    pairs = [_split(part) for part in parts if "=" in part]
    options = dict(pairs)
    if len(options) < len(pairs):
        raise PolicyError(f"{spec!r}: expected each option once, found one of {', '.join(options)} again")
    own = {key: options.pop(key) for key in list(options) if key in discipline.options}
    unknown = next((key for key in options if key not in MODIFIERS), None)
    if unknown is not None:
        known = ", ".join(dict.fromkeys([*discipline.options, *MODIFIERS]))
        raise PolicyError(f"{spec!r}: expected {discipline.usage} with the options {known}, found the option {unknown!r}")
    policy = _build(spec, discipline, _numbers(spec, numbers, discipline), own)
    if not options:
        return policy
    # All modifiers apply together, because some are valid only with another. shards= is read last, so it overrides a default.
    values: dict[str, Any] = {}
    for key, text in sorted(options.items(), key=lambda pair: pair[0] == "shards"):
        values |= _read(spec, key, text, partial(MODIFIERS[key][1], policy))
    return policy.with_options(",".join(f"{key}={text}" for key, text in options.items()), **values)


def parse_policies(specs: str) -> list[Policy]:
    """Parse a list of specs. A comma begins a new spec only if the name of a discipline follows it.

    >>> [policy.spec for policy in parse_policies("bsp,asp,ssp:3,dssp:3,15,adv*:1,psp:3,0.75")]
    ['bsp', 'asp', 'ssp:3', 'dssp:3,15', 'adv*:1', 'psp:3,0.75']
    """
    return [parse_policy(spec) for spec in _NEXT_SPEC.split(specs)]


def _numbers(spec: str, found: list[str], discipline: Discipline) -> list[Any]:
    least = len(discipline.numbers) - discipline.defaults
    if not least <= len(found) <= len(discipline.numbers):
        raise PolicyError(f"{spec!r}: expected {discipline.usage}, found {len(found)} of {len(discipline.numbers)} numbers")
    numbers = []
    for kind, text in zip(discipline.numbers, found, strict=False):
        try:
            numbers.append(kind(text))
        except ValueError:
            whole = "whole numbers" if kind is int else "numbers"
            raise PolicyError(f"{spec!r}: expected {discipline.usage} with {whole}, found {text!r}") from None
    return numbers


def _build(spec: str, discipline: Discipline, numbers: list[Any], options: dict[str, str]) -> Policy:
    read = {key: _read(spec, key, text, _value) for key, text in options.items()}
    try:
        return discipline.build(*numbers, **read)
    except TypeError:
        raise PolicyError(f"{spec!r}: expected {discipline.usage}; some of it is missing or of the wrong kind") from None


def _split(part: str) -> tuple[str, str]:
    key, _, value = (piece.strip() for piece in part.partition("="))
    return key, value


def _read(spec: str, key: str, text: str, read: Callable[[str], Any]) -> Any:
    try:
        return read(text)
    except PolicyError:
        raise
    except ValueError:
        raise PolicyError(f"{spec!r}: expected a number for {key}, found {text!r}") from None


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
