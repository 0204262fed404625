"""One line of what `fastps doctor` found. Refuses to be more than a value: doctor.py and doctor_gpu.py look."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of the report: `value` is for programs (bytes, a number or a text), `shown` for people."""

    name: str
    value: int | float | str | None
    shown: str
    ok: bool = True
