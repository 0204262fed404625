"""One row: a paper's claim, its measurement, and whether the two agree."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import isfinite
from typing import Any

from fastps.lab.papers.expectations import Expectation, Numbers


@dataclass(frozen=True)
class Effort:
    """The effort for a row: `quick` has fewer steps and seeds, with the same expectations."""

    quick: bool = False

    def choose(self, full: int, quick: int) -> int:
        """One of the two."""
        return quick if self.quick else full


@dataclass(frozen=True)
class Verdict:
    """The outcome of a row; `as_json` has the keys that programs may rely on. A row that was skipped has no numbers."""

    row: "Row"
    measured: Numbers
    ok: bool
    note: str
    seconds: float
    skipped: bool = False

    def as_json(self) -> dict[str, Any]:
        """id, paper, claim, expected, measured, tolerance, ok, note; also source, items, skipped, seconds."""
        expected = [expectation.expected for expectation in self.row.expect]
        return {
            "id": self.row.id,
            "paper": self.row.paper,
            "source": self.row.source,
            "items": list(self.row.items),
            "claim": self.row.claim,
            "expected": expected[0] if len(expected) == 1 else expected,
            "measured": {name: number if isfinite(number) else None for name, number in self.measured.items()},
            "tolerance": "; ".join(expectation.tolerance for expectation in self.row.expect),
            "ok": self.ok,
            "note": self.note,
            "skipped": self.skipped,
            "seconds": self.seconds,
        }


class Cause(Enum):
    """The class of a disagreement with a paper, and what it means."""

    TASK = "a small network on small images shows the effect too weakly, or not at all"
    ASSUMPTION = "it depends on what the text does not give: times and their spread, rates, targets, the shape of a tree"
    CONTRADICTION = "the paper contradicts itself, and no setting meets all that it says"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A claim of a paper and how it is measured.

    Attributes:
        id: "paper/what", which `fastps reproduce` takes.
        source: where the paper says it.
        items: the tables, figures and claims (`Item.name`) of which the row measures all or a part.
        claim: the paper's statement in a sentence.
        measure: returns the numbers for an effort.
        expect: the expectations; all must hold.
        learns: whether gradients are computed, which takes much longer than virtual time alone.
        full_only: whether fewer seeds or steps do not decide, so that a quick effort skips the row.
        is_live: whether real processes are timed, so that the numbers differ from run to run; a quick effort skips it, too.
        missing: why the row cannot be measured on this machine; "" if it can.
        assumed: parameters that the paper's text does not give, with the reason for each.
        tried: each other setting that was tried for this row, with its outcome.
        why_not: the reason of a known disagreement; shown only if the row does not hold.
        cause: the class of that reason.
    """

    id: str
    source: str
    items: Sequence[str]
    claim: str
    measure: Callable[[Effort], Numbers]
    expect: Sequence[Expectation]
    learns: bool = False
    full_only: bool = False
    is_live: bool = False
    missing: Callable[[], str] = lambda: ""
    assumed: str = ""
    tried: Sequence[str] = ()
    why_not: str = ""
    cause: Cause | None = None

    @property
    def why_not_quick(self) -> str:
        """Why a quick effort skips the row; "" if it does not."""
        if not (self.full_only or self.is_live):
            return ""
        reason = "fewer seeds and steps do not decide" if self.full_only else "real processes take minutes"
        return f"{reason}, so leave --quick out"

    @property
    def paper(self) -> str:
        """The part of the id before the slash."""
        return self.id.partition("/")[0]

    def skip(self, reason: str) -> Verdict:
        """The outcome where the row cannot be measured."""
        return Verdict(self, {}, False, f"skipped: {reason}.", 0.0, skipped=True)

    def judge(self, measured: Numbers, seconds: float = 0.0) -> Verdict:
        """Compare the measured numbers with the expectations."""
        misses = [miss for expectation in self.expect for miss in expectation.misses(measured)]
        parts = []
        if misses:
            parts = [f"not reproduced: {'; '.join(misses)}.", self.why_not or "No reason is known."]
        if self.assumed:
            parts.append(f"Assumed: {self.assumed}")
        if self.tried:
            parts.append(f"Also tried: {'; '.join(self.tried)}.")
        return Verdict(self, measured, not misses, " ".join(parts), seconds)
