"""Live progress of a training on a terminal: one line for each worker."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from fastps.store.observer import WorkerStatistics


class LiveWorkers:
    """Live progress on a terminal: one line per worker, from the job's counters. Use as a context manager."""

    def __init__(self, console: Console, title: str, budget_samples: int) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._title = title
        self._budget = budget_samples
        self._seconds = 0.0

    def __enter__(self) -> "LiveWorkers":
        self._live.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._live.__exit__(*exception)

    def show(self, rows: Sequence[WorkerStatistics], seconds: float) -> None:
        """Draw the workers' current rows; `seconds` is the time since the first row."""
        drawn = sum(row.samples for row in rows)
        table = Table(title=f"{self._title}: {min(1.0, drawn / self._budget):.0%} of the samples")
        for heading in ("worker", "steps", "steps/s", "loss", "staleness", "waiting", "state"):
            table.add_column(heading, justify="right")
        for row in rows:
            table.add_row(
                str(row.rank),
                str(row.steps),
                f"{row.steps / seconds:.1f}" if seconds > 0 else "-",
                f"{row.loss:.3f}",
                f"{row.staleness_mean:.2f}",
                f"{row.wait_share:.0%}",
                row.state,
            )
        self._live.update(table, refresh=True)
