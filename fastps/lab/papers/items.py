"""A paper's tables, figures, theorems and headline claims, and how many of them hold: the count that `fastps reproduce` gives.

An item holds in full only if rows measure all of it and all these rows hold. What no row measures is listed, not left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from fastps.lab.papers.row import Verdict


@dataclass(frozen=True, kw_only=True)
class Item:
    """A table, figure, theorem or headline claim of a paper.

    Attributes:
        name: as the paper calls it, such as "Table I", or "Section 4.2" for a claim of the text.
        says: what it shows, in a sentence.
        left_out: what no row measures of it, and why; "" if rows measure all of it.
    """

    name: str
    says: str
    left_out: str = ""


class Outcome(Enum):
    """How an item fared."""

    HOLDS = "holds"
    IN_PART = "holds as far as it is measured"
    NO = "**no**"
    NOT_COVERED = "not covered"


def outcome(item: Item, verdicts: Sequence[Verdict]) -> Outcome:
    """Return the outcome of an item by the verdicts of its paper's rows.

    >>> outcome(Item(name="Table I", says="SSP is slow.", left_out="all: it needs a GPU"), ())
    <Outcome.NOT_COVERED: 'not covered'>
    """
    own = [verdict for verdict in verdicts if item.name in verdict.row.items and not verdict.skipped]
    if not own:
        return Outcome.NOT_COVERED
    if not all(verdict.ok for verdict in own):
        return Outcome.NO
    return Outcome.IN_PART if item.left_out else Outcome.HOLDS


def outcomes(items: Mapping[str, Sequence[Item]], verdicts: Sequence[Verdict]) -> dict[tuple[str, str], Outcome]:
    """Return the outcome of each item, by paper and name."""
    of_paper = {paper: [verdict for verdict in verdicts if verdict.row.paper == paper] for paper in items}
    return {(paper, item.name): outcome(item, of_paper[paper]) for paper, each in items.items() for item in each}


def summary(found: Mapping[tuple[str, str], Outcome]) -> str:
    """Return the count as a text.

    >>> summary({("dssp", "Table I"): Outcome.NO, ("dssp", "Figure 2"): Outcome.HOLDS})
    '1 of 2 tables, figures and claims hold in full, 0 as far as they are measured, 1 does not, 0 are not covered'
    """
    count = {kind: list(found.values()).count(kind) for kind in Outcome}
    no, missing = count[Outcome.NO], count[Outcome.NOT_COVERED]
    return (
        f"{count[Outcome.HOLDS]} of {len(found)} tables, figures and claims hold in full,"
        f" {count[Outcome.IN_PART]} as far as they are measured, {no} {'does' if no == 1 else 'do'} not,"
        f" {missing} {'is' if missing == 1 else 'are'} not covered"
    )
