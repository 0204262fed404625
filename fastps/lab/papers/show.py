"""The output of `fastps reproduce`: the progress, the cells of its tables, notes, and the document."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fastps.errors import UsageError
from fastps.lab.papers import items
from fastps.lab.papers.expectations import short
from fastps.lab.papers.items import outcomes
from fastps.lab.papers.row import Cause, Effort, Row, Verdict
from fastps.lab.papers.rows import items_of, reproduce

INTRODUCTION = """The command below makes this page. Parameters come from the papers' texts. What a text does not give stands in
a footnote, after "Assumed". Times are virtual, except in rows
whose names end in "live": the store's own scheduler plays them ([Virtual time](architecture/simulation.md)). "Real gradients"
are torch's, each computed at its virtual moment with the weights that its worker would have read. Their last bits follow the
processor and the number of threads, and so do such rows' figures.

What is counted is a table, figure or claim of a paper. It holds in full only if rows measure all of it and each of them
holds. What no row measures stands in the last column of a paper's first table, with the reason. Where a setting was chosen
after others had been tried, the footnote says so and what they gave. For rows on [the harder task](papers/harder-task.md)
rates, targets, seeds and tolerances were fixed before any of their seeds was run.

"""
MOST_LINES = 6  # of a cell; a longer one stands in the row's footnote


def reproduce_watched(rows: Sequence[Row], effort: Effort, console: Console, *, progress: bool = True) -> list[Verdict]:
    """Measure the rows, optionally with a progress bar that names the current one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not progress) as bar:
        task = bar.add_task("", total=len(rows))
        return reproduce(
            rows,
            effort,
            before=lambda row: bar.update(task, description=row.id),
            after=lambda verdict: bar.advance(task),
        )


def plain_cells(verdict: Verdict) -> list[str]:
    """A verdict's id, source, claim, expectation, measured numbers, tolerance and outcome, as plain text."""
    found = verdict.as_json()
    expected = "\n".join(_expected(each) for each in _all(found["expected"])).replace("<br>", "\n")
    outcome = "skipped" if verdict.skipped else "ok" if verdict.ok else "no"
    return [found["id"], found["source"], found["claim"], expected, numbers(found["measured"]), found["tolerance"], outcome]


def summary(verdicts: Sequence[Verdict]) -> str:
    """Return a text such as "30 of 35 rows: 12 of 20 tables, figures and claims hold in full, ..."."""
    found = outcomes(items_of([verdict.row for verdict in verdicts]), verdicts)
    made = [verdict for verdict in verdicts if not verdict.skipped]
    rows = f"{sum(verdict.ok for verdict in made)} of {len(made)} rows"
    return f"{rows}: {items.summary(found)}" if found else rows


def notes(verdicts: Sequence[Verdict]) -> str:
    """Return a paragraph for each row with a note."""
    return "\n\n".join(f"{verdict.row.id}: {verdict.note}" for verdict in verdicts if verdict.note)


def numbers(measured: dict[str, Any]) -> str:
    """Format the numbers of a row, one a line.

    >>> numbers({"bsp": 1.23456, "asp": None})
    'bsp: 1.235\\nasp: -'
    """
    return "\n".join(f"{name}: {'-' if number is None else short(number)}" for name, number in measured.items())


def markdown(verdicts: Sequence[Verdict], command: str) -> str:
    """Format the results as a document: a table for each paper, then the notes."""
    parts = [f"`{command}` gives {summary(verdicts)}.\n"]
    for paper in dict.fromkeys(verdict.row.paper for verdict in verdicts):
        parts.append(f"## {paper}\n\n{_coverage(paper, verdicts)}")
        parts.append("| row | the paper says | expected | we get | tolerance | ok |")
        parts.append("|---|---|---|---|---|---|")
        chosen = [verdict for verdict in verdicts if verdict.row.paper == paper]
        parts.extend(f"| {' | '.join(_cells(verdict))} |" for verdict in chosen)
        parts.append("")
        parts.extend(_footnote(verdict) for verdict in chosen if _footnote(verdict))
        parts.append("")
    missed = [verdict for verdict in verdicts if not (verdict.ok or verdict.skipped)]
    if missed:
        parts.append("## What we could not reproduce, by cause\n\nThe evidence is in each row's footnote.\n")
        parts.append("| cause | what it means | rows |\n|---|---|---|")
        parts.extend(f"| {name} | {meaning} | {rows} |" for name, meaning, rows in _by_cause(missed))
        parts.append("")
    return "\n".join(parts)


def _by_cause(missed: Sequence[Verdict]) -> list[tuple[str, str, str]]:
    """Name, meaning and rows of each cause that rows which do not hold have."""
    found = []
    for cause in (*Cause, None):
        name, meaning = (cause.name.lower(), cause.value) if cause else ("not known", "no reason is known")
        rows = [f"{verdict.row.id}[^{_mark(verdict)}]" for verdict in missed if verdict.row.cause is cause]
        found += [(f"{name} ({len(rows)})", meaning, ", ".join(rows))] if rows else []
    return found


def _coverage(paper: str, verdicts: Sequence[Verdict]) -> str:
    """The table of a paper's items: what each shows, its rows, its outcome, and what no row measures."""
    known = {paper: items_of([verdict.row for verdict in verdicts]).get(paper, [])}
    found = outcomes(known, verdicts)
    lines = ["| table, figure or claim | what it shows | rows | outcome | not measured |", "|---|---|---|---|---|"]
    for item in known[paper]:
        own = [verdict.row for verdict in verdicts if verdict.row.paper == paper and item.name in verdict.row.items]
        rows = ", ".join(row.id.partition("/")[2] for row in own)
        cells = [item.name, _literal(item.says), rows, found[paper, item.name].value, _literal(item.left_out)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cells(verdict: Verdict) -> list[str]:
    """A row of the document; the name has the mark of its footnote."""
    found = verdict.as_json()
    mark = f"[^{_mark(verdict)}]" if _footnote(verdict) else ""
    lists = [_short(lines) for lines in _lists(verdict).values()]
    name = f"{found['id'].partition('/')[2]}{mark} ({found['source']})"
    return [
        name,
        _literal(found["claim"]),
        *lists,
        _once(found["tolerance"]),
        "skipped" if verdict.skipped else "ok" if verdict.ok else "**no**",
    ]


def _footnote(verdict: Verdict) -> str:
    """The long cells and the note of a row, each a paragraph; "" where there are none."""
    long = {what: lines for what, lines in _lists(verdict).items() if len(lines) > MOST_LINES}
    paragraphs = [f"{what}: {'; '.join(lines)}." for what, lines in long.items()]
    paragraphs += [_literal(verdict.note)] if verdict.note else []
    return f"[^{_mark(verdict)}]: " + "\n\n    ".join(paragraphs) + "\n" if paragraphs else ""


def _lists(verdict: Verdict) -> dict[str, list[str]]:
    found = verdict.as_json()
    expected = "<br>".join(_expected(each) for each in _all(found["expected"])).split("<br>")
    lists = {"Expected": expected, "We get": numbers(found["measured"]).split("\n")}
    return {what: [_literal(line) for line in lines] for what, lines in lists.items()}


def _short(lines: list[str]) -> str:
    return "<br>".join(lines) if len(lines) <= MOST_LINES else f"{len(lines)} figures"


def _literal(text: str) -> str:
    r"""Text as it is written, where Markdown would see a tag or emphasis.

    >>> _literal("<sigma> of adv*")
    '&lt;sigma> of adv\\*'
    """
    return text.replace("<", "&lt;").replace("*", "\\*")


def _once(tolerance: str) -> str:
    """Each kind of tolerance once, in order.

    >>> _once("order; order; range")
    'order; range'
    """
    return "; ".join(dict.fromkeys(tolerance.split("; ")))


def _mark(verdict: Verdict) -> str:
    return verdict.row.id.replace("/", "-")


def write_markdown(verdicts: Sequence[Verdict], command: str, file: Path) -> None:
    """Write the document. Raises UsageError."""
    title = "# The papers' tables and figures, measured again\n\n"
    try:
        file.write_text(title + INTRODUCTION + markdown(verdicts, command))
    except OSError as error:
        raise UsageError(f"--markdown {file}: the document cannot be written: {error}") from None


def _all(expected: Any) -> list[Any]:
    return expected if isinstance(expected, list) else [expected]


def _expected(expected: Any) -> str:
    if isinstance(expected, dict):
        return "<br>".join(f"{name}: {short(each) if isinstance(each, float) else each}" for name, each in expected.items())
    return str(expected)
