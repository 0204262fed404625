"""Specs: the text form of policies, such as "dssp:3,15" or "backup:1,pull=0.75,shards=4".

A spec is a discipline's name, its numbers and its options, followed by modifiers that any discipline accepts.
"""

import re
from typing import Any

from fastps.errors import PolicyError
from fastps.job.disciplines import DISCIPLINES
from fastps.job.policy import DEFAULT_SHARDS, Policy

_LONGEST = 500  # characters
_SCALE_NAMES = {"1/sigma": "staleness", "1/n": "divisor", "sqrt": "square-root"}
_NAMES = "|".join(re.escape(name) for name in DISCIPLINES)
_NEXT_SPEC = re.compile(rf",(?=\s*(?:{_NAMES})\s*(?:[:,]|$))", re.IGNORECASE)


def _modified(policy: Policy, key: str, value: Any) -> dict[str, Any]:
    if key == "scale":
        return {"scale": _SCALE_NAMES.get(value, value)}
    if key == "stagger":
        return {"grant": "round-robin", "relax": value}
    return {key: value} | ({"shards": DEFAULT_SHARDS} if key == "pull" and policy.shards == 1 else {})


# Modifiers that any discipline accepts, and what each does.
MODIFIERS = {
    "scale": "1/sigma|1/n|mean|linear|one: how a step is scaled",
    "pull": "f: a step waits for a fraction f of the shards",
    "pull_timeout": "S: and up to S seconds for the rest",
    "shards": "K: parts of the model with versions of their own",
    "stagger": "r: grants in a fixed order, r T/N apart",
    "ema": "d: keep a moving average of the weights",
    "clip": "g: clip each push to a global norm of g",
    "combine": "true: fold pushes that are found together as one sum",
    "momentum": "worker: each worker keeps the momentum of its own gradients",
}


def parse_policy(spec: "str | Policy") -> Policy:
    """Parse one spec, such as "ssp:3". A Policy is returned unchanged. Raises PolicyError that says what was expected.

    >>> parse_policy("dssp:3,15").high
    15
    >>> parse_policy("backup:1,pull=0.75").shards
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
    numbers = [_value(part) for part in parts if "=" not in part]
    pairs = [part.partition("=") for part in parts if "=" in part]
    options = {key.strip(): text.strip() for key, _, text in pairs}
    if len(options) < len(pairs):
        raise PolicyError(f"{spec!r}: expected each option once, found one of {', '.join(options)} again")
    own = {key: _value(options.pop(key)) for key in list(options) if key in discipline.options}
    unknown = next((key for key in options if key not in MODIFIERS), None)
    if unknown is not None:
        known = ", ".join(dict.fromkeys([*discipline.options, *MODIFIERS]))
        raise PolicyError(f"{spec!r}: expected {discipline.usage} with the options {known}, found the option {unknown!r}")
    most = len(set(discipline.numbers.values()))
    if not most - discipline.defaults <= len(numbers) <= most:
        words = [number for number in numbers if isinstance(number, str) and number]
        unknown = f"; no discipline is called {words[0]!r}" if words else ""
        raise PolicyError(
            f"{spec!r}: expected {discipline.usage}, found {', '.join(map(str, numbers)) or 'no numbers'}{unknown}"
        )
    try:
        policy = discipline.build(*numbers, **own)
    except TypeError:
        raise PolicyError(f"{spec!r}: expected {discipline.usage}; some of it is missing or of the wrong kind") from None
    if not options:
        return policy
    # All modifiers apply together, because some are valid only with another. shards= is read last, so it overrides a default.
    values: dict[str, Any] = {}
    for key, text in sorted(options.items(), key=lambda pair: pair[0] == "shards"):
        values |= _modified(policy, key, _value(text))
    return policy.with_options(",".join(f"{key}={text}" for key, text in options.items()), **values)


def parse_policies(specs: str) -> list[Policy]:
    """Parse a list of specs. A comma begins a new spec only if the name of a discipline follows it.

    >>> [policy.spec for policy in parse_policies("bsp,asp,ssp:3,dssp:3,15,adv*:1,psp:3,0.75")]
    ['bsp', 'asp', 'ssp:3', 'dssp:3,15', 'adv*:1', 'psp:3,0.75']
    """
    return [parse_policy(spec) for spec in _NEXT_SPEC.split(specs)]


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
