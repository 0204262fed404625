"""The output of `fastps trace` and `fastps advise`: a summary, a check, advice."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress

from fastps.cli.tables import Column, Rows

if TYPE_CHECKING:
    from fastps.tracing.check import Violation
    from fastps.tracing.merging import NodeOfTrace

Row = dict[str, Any]
MOST_SHOWN = 20


def _milliseconds(heading: str, key: str, *, wide: bool = False) -> Column:
    return Column(heading, key, ".2f", missing="?", wide=wide)


_WORKER = (
    Column("worker"),
    Column("steps"),
    _milliseconds("compute", "compute_ms_mean"),
    _milliseconds("median", "compute_ms_median", wide=True),
    _milliseconds("95%", "compute_ms_p95", wide=True),
    _milliseconds("on a core", "cpu_ms_mean", wide=True),
    _milliseconds("for a core", "queue_ms_mean", wide=True),
    _milliseconds("blocked", "blocked_ms_mean", wide=True),
    _milliseconds("store", "store_cpu_ms_mean"),
    _milliseconds("transfer", "transfer_ms_mean"),
    Column("waiting", "wait_share", ".1%"),
    Column("staleness", "staleness_mean", ".2f"),
    Column("max", "staleness_max", wide=True),
    Column("dropped"),
)


def worker_table(rows: Sequence[Row], title: str) -> Rows:
    """Make a table with one row per worker: the mean ms of each part of a step."""
    has_rows = any("rows_per_step" in row for row in rows)
    return Rows.of(title, [*_WORKER, *([Column("rows", "rows_per_step", ",.1f")] if has_rows else [])], rows)


def summary_line(row: Row) -> str:
    """Return the whole run in a sentence or two."""
    text = (
        f"{row['sync']}, {row['workers']} workers: {row['steps']} steps in {row['seconds']:.2f} s,"
        f" {row['steps_per_s']:.1f} steps/s,"
        f" staleness {row['staleness_mean']:.2f} (at most {row['staleness_max']}), waiting {row['wait_share']:.1%},"
        f" {row['dropped']} dropped"
    )
    if "rows_pushed" in row:
        text += f", {row['rows_pushed']:,} rows of tables pushed ({row['rows_per_step']:,.1f} a step),"
        text += f" {row['rows_folded']:,} folded"
    missing = [rank for rank in range(row["workers"]) if rank not in row["recorded"]]
    if missing:
        text += f"; not recorded: workers {', '.join(map(str, missing))}"
    if row["unfinished"]:
        text += f"; cut short: workers {', '.join(map(str, row['unfinished']))}"
    return text


def node_lines(nodes: "Sequence[NodeOfTrace]") -> list[str]:
    """Return a line for each node of a trace of several: its workers, and how its clock was moved."""
    if len(nodes) < 2:
        return []
    lines = []
    for node in nodes:
        workers = ", ".join(str(node.first_worker + number) for number in range(node.workers))
        moved = f"its times moved by {node.offset_ns / 1e6:+.3f} ms, with an error of at most {node.error_ns / 1e6:.3f} ms"
        clock = "whose clock all times are on" if node.node == 0 else moved
        lines.append(f"node {node.node} ({node.host}, workers {workers}): {clock}")
    return lines


def check_lines(violations: "Sequence[Violation]", log: Row) -> list[str]:
    """Return the verdict and the first few violations."""
    facts = f"{log['folded']} folded, {log['dropped']} dropped, {log['undecided']} undecided"
    facts += f", {log['rejected']} rejected" if log["rejected"] else ""
    if not violations:
        scope = "each push once, versions in order" if log["complete"] else "as far as it was recorded"
        return [f"the push log is right, {scope}: {log['pushes']} pushes, {facts}"]
    shown = [f"  {violation.sentence}" for violation in violations[:MOST_SHOWN]]
    more = len(violations) - MOST_SHOWN
    return [f"the push log is wrong ({facts}):", *shown, *([f"  and {more} more"] if more > 0 else [])]


_ADVICE = (
    Column("sync", lambda row: f"{'-> ' if row['recommended'] else ''}{row['sync']}"),
    Column("progress", "expected", ".0%"),
    Column("useful steps/s", "useful_steps_per_s", ",.1f"),
    Column("speed", form=".0%"),
    Column("updates/s", "updates_per_s", ",.1f", wide=True),
    Column("staleness", "staleness_mean", ".2f"),
    Column("max", "staleness_max", wide=True),
    Column("waiting", "wait_share", ".0%"),
    Column("dropped", "dropped_share", ".0%"),
)


def advice_table(rows: Sequence[Row], title: str) -> Rows:
    """Make a table with one row per discipline, by expected progress; the recommended one is marked."""
    columns = (*_ADVICE, Column(f"loss at {rows[0]['loss_at_s']:.4g} s", "loss", ".4g")) if "loss" in rows[0] else _ADVICE
    return Rows.of(title, columns, rows, [number for number, row in enumerate(rows) if row["recommended"]])


def advice_lines(rows: Sequence[Row], test: Row | None) -> list[str]:
    """Return the recommendation with its reason, and the replay's error on the recorded run, if there is one."""
    chosen = next(row for row in rows if row["recommended"])
    lines = [f"recommended: --sync {chosen['sync']}: {chosen['reason']}"]
    if test is not None:
        found = f"{test['measured']:,.1f} steps/s measured, {test['predicted']:,.1f} predicted ({test['error']:+.1%})"
        lines.append(f"the recorded run under {test['sync']}: {found}")
        if chosen["sync"] != test["sync"] and chosen["gain"] <= abs(test["error"]):
            lines.append(f"{chosen['gain']:+.1%} is no more than that error: measure both, by fastps compare --runs 5 --script")
    learned = [row for row in rows if row.get("loss") is not None]
    if not learned:
        return [*lines, "progress is what two small tasks showed of staleness: --train SCRIPT tries it on yours"]
    best = min(learned, key=lambda row: row["loss"])
    return [*lines, f"the least loss at {best['loss_at_s']:.4g} virtual seconds: --sync {best['sync']}, {best['loss']:.4g}"]


@contextlib.contextmanager
def bar(console: Console, shown: bool, what: str = "simulating") -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar."""
    with Progress(console=console, transient=True, disable=not shown) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, of: progress.update(task, completed=done, total=of)


def replay_line(row: dict[str, Any], file: Path, *, finds: bool = False) -> str:
    """What a replay came to; `finds`: it looked for numbers that are not finite."""
    compared = f"{row['checksums']} checksums of weights and {row['gradients']:,} of gradients are equal"
    if row["changed"]:
        compared += f", up to what is changed ({'; '.join(row['changed'])})"
    found = "; all gradients and weights are finite" * finds if row["nonfinite"] is None else f"; {row['nonfinite']}"
    joined = f" and {row['joined']} that joined" if row["joined"] else ""
    played = f"{row['pushes']:,} pushes of {row['workers']} workers{joined}, {row['updates']:,} updates under {row['sync']}"
    return f"{file}: {played}, played again in {row['seconds']:.1f} s; {compared}; weights {row['weights']}{found}"
