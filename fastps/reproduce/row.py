"""One row: what a paper says, what is measured, and whether the two agree. Refuses to know any paper."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from fastps.reproduce.expectations import Expectation, Numbers


@dataclass(frozen=True)
class Effort:
    """How much is spent on a row: `quick` has fewer steps and seeds, on the same expectations."""

    quick: bool = False

    def choose(self, full: int, quick: int) -> int:
        """One of the two."""
        return quick if self.quick else full


@dataclass(frozen=True)
class Verdict:
    """What came of a row; `as_json` has the keys that every program may rely on."""

    row: "Row"
    measured: Numbers
    ok: bool
    note: str
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """id, paper, claim, expected, measured, tolerance, ok, note; also source, seconds."""
        expected = [expectation.expected for expectation in self.row.expect]
        return {
            "id": self.row.id,
            "paper": self.row.paper,
            "source": self.row.source,
            "claim": self.row.claim,
            "expected": expected[0] if len(expected) == 1 else expected,
            "measured": {name: number if isfinite(number) else None for name, number in self.measured.items()},
            "tolerance": "; ".join(expectation.tolerance for expectation in self.row.expect),
            "ok": self.ok,
            "note": self.note,
            "seconds": self.seconds,
        }


@dataclass(frozen=True, kw_only=True)
class Row:
    """A claim of a paper and how it is measured.

    Attributes:
        id: "paper/what", which `fastps reproduce` takes.
        source: the table or figure.
        claim: what the paper says, in a sentence.
        measure: the numbers, for an effort.
        expect: what is expected of them; all must hold.
        learns: whether gradients are computed, which takes much longer than virtual time alone.
        assumed: parameters that the paper's text does not give, with the reason for each.
        why_not: why a row that is known not to hold does not; shown only where it does not.
    """

    id: str
    source: str
    claim: str
    measure: Callable[[Effort], Numbers]
    expect: Sequence[Expectation]
    learns: bool = False
    assumed: str = ""
    why_not: str = ""

    @property
    def paper(self) -> str:
        """The part of the id before the stroke."""
        return self.id.partition("/")[0]

    def judge(self, measured: Numbers, seconds: float = 0.0) -> Verdict:
        """Hold what was measured against what is expected."""
        misses = [miss for expectation in self.expect for miss in expectation.misses(measured)]
        parts = []
        if misses:
            parts = [f"not reproduced: {'; '.join(misses)}.", self.why_not or "No reason is known."]
        if self.assumed:
            parts.append(f"Assumed: {self.assumed}")
        return Verdict(self, measured, not misses, " ".join(parts), seconds)
