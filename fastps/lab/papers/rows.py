"""All items and rows by name, and the measurement of selected ones."""

from collections.abc import Callable, Iterable, Sequence

from fastps.errors import UsageError
from fastps.lab.papers import backup_workers, dssp, psp_sgd, r2sp, rudra
from fastps.lab.papers.items import Item
from fastps.lab.papers.row import Effort, Row, Verdict
from fastps.system.clock import SYSTEM_CLOCK, Clock

PAPERS = (dssp, psp_sgd, rudra, r2sp, backup_workers)
ITEMS: dict[str, Sequence[Item]] = {paper.PAPER: paper.ITEMS for paper in PAPERS}
ROWS: tuple[Row, ...] = tuple(row for paper in PAPERS for row in paper.ROWS)


def choose(names: Sequence[str]) -> list[Row]:
    """Return the rows with some ids or papers, in the table's order; without names, all. Raises UsageError for an unknown name.

    >>> [row.id for row in choose(["dssp/figure-2"])]
    ['dssp/figure-2']
    """
    papers = list(dict.fromkeys(row.paper for row in ROWS))
    for name in names:
        if name not in papers and not any(row.id == name for row in ROWS):
            raise UsageError(f"expected a paper ({', '.join(papers)}) or a row that --list shows, found {name!r}")
    return [row for row in ROWS if not names or row.id in names or row.paper in names]


def reproduce(
    rows: Iterable[Row],
    effort: Effort,
    *,
    before: Callable[[Row], None] | None = None,
    after: Callable[[Verdict], None] | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> list[Verdict]:
    """Measure rows one after the other; `before` and `after` are called around each."""
    verdicts = []
    for row in rows:
        if before is not None:
            before(row)
        began_ns = clock.now_ns()
        if reason := row.missing() or (row.why_not_quick if effort.quick else ""):
            verdicts.append(row.skip(reason))
        else:
            verdicts.append(row.judge(row.measure(effort), (clock.now_ns() - began_ns) / 1e9))
        if after is not None:
            after(verdicts[-1])
    return verdicts


def items_of(rows: Iterable[Row]) -> dict[str, list[Item]]:
    """Return, by paper, the items that can be judged by these rows alone: those whose rows are all among them.

    Items that no row measures are judged with all rows of their paper.
    """
    chosen = {row.id for row in rows}

    def judged(paper: str, item: Item) -> bool:
        all_of_paper = [row for row in ROWS if row.paper == paper]
        own = [row for row in all_of_paper if item.name in row.items]
        return all(row.id in chosen for row in own or all_of_paper)

    return {paper: [item for item in items if judged(paper, item)] for paper, items in ITEMS.items()}
