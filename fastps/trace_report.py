"""What `fastps trace` shows: tables of a trace's summary and of its check. Refuses to compute what they say."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from fastps.trace_check import Violation

Row = dict[str, Any]
MOST_SHOWN = 20


def worker_table(rows: Sequence[Row], title: str) -> Table:
    """A line a worker: where the time of its steps went, mean ms a step."""
    table = Table(title=title)
    headings = ("worker", "steps", "compute", "median", "95%", "on a core", "for a core", "blocked", "store", "transfer")
    for heading in (*headings, "waiting", "staleness", "max", "dropped"):
        table.add_column(heading, justify="right")
    for row in rows:
        times = ("compute_ms_mean", "compute_ms_median", "compute_ms_p95", "cpu_ms_mean", "queue_ms_mean", "blocked_ms_mean")
        cells = ["?" if row[name] is None else f"{row[name]:.2f}" for name in (*times, "store_cpu_ms_mean", "transfer_ms_mean")]
        end = (f"{row['wait_share']:.1%}", f"{row['staleness_mean']:.2f}", str(row["staleness_max"]), str(row["dropped"]))
        table.add_row(str(row["worker"]), str(row["steps"]), *cells, *end)
    return table


def summary_line(row: Row) -> str:
    """The whole run in a sentence or two."""
    text = (
        f"{row['sync']}, {row['workers']} workers: {row['steps']} steps in {row['seconds']:.2f} s, {row['steps_per_s']:.1f} steps/s,"
        f" staleness {row['staleness_mean']:.2f} (at most {row['staleness_max']}), waiting {row['wait_share']:.1%},"
        f" {row['dropped']} dropped"
    )
    missing = [rank for rank in range(row["workers"]) if rank not in row["recorded"]]
    if missing:
        text += f"; not recorded: workers {', '.join(map(str, missing))}"
    if row["unfinished"]:
        text += f"; cut short: workers {', '.join(map(str, row['unfinished']))}"
    return text


def check_lines(violations: Sequence[Violation], ledger: Row) -> list[str]:
    """The verdict, and the violations, the first few of them."""
    facts = f"{ledger['folded']} folded, {ledger['dropped']} dropped, {ledger['undecided']} undecided"
    if not violations:
        scope = "each push once, versions in order" if ledger["complete"] else "as far as it was recorded"
        return [f"the ledger is right, {scope}: {ledger['pushes']} pushes, {facts}"]
    shown = [f"  {violation.sentence}" for violation in violations[:MOST_SHOWN]]
    more = len(violations) - MOST_SHOWN
    return [f"the ledger is wrong ({facts}):", *shown, *([f"  and {more} more"] if more > 0 else [])]
