"""Tables of `fastps reproduce`: the rows that there are, and the verdicts."""

from collections.abc import Sequence

from fastps.cli.tables import Column, Rows
from fastps.lab.papers.row import Effort, Row, Verdict
from fastps.lab.papers.show import plain_cells, summary


def list_table(rows: Sequence[Row]) -> Rows:
    """Make a table with a line for each row: its id, the table or figure, and the paper's claim."""
    columns = [Column(heading, left=True) for heading in ("id", "source", "the paper says")]
    return Rows(f"{len(rows)} rows", columns, [(row.id, row.source, row.claim) for row in rows])


def verdict_table(verdicts: Sequence[Verdict], effort: Effort) -> Rows:
    """Make a table with a line for each row: the paper's numbers, the measured ones, the tolerance, and the verdict."""
    kind = "quick: fewer steps and seeds" if effort.quick else "in full"
    headings = ("row", "source", "the paper says", "expected", "we get", "tolerance", "ok")
    columns = [Column(heading, left=True) for heading in headings]
    failed = [number for number, verdict in enumerate(verdicts) if not (verdict.ok or verdict.skipped)]
    return Rows(f"reproduced {summary(verdicts)} ({kind})", columns, [plain_cells(verdict) for verdict in verdicts], failed)
