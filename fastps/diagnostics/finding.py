"""One line of the report of `fastps doctor`, as a value."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of the report: `value` for programs (bytes, a number or a text), `shown` for people."""

    name: str
    value: int | float | str | None
    shown: str
    ok: bool = True
