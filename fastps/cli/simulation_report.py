"""The output of `fastps simulate`: a progress bar, and a table of the rows."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fastps.cli.tables import Column, Rows
from fastps.errors import UsageError
from fastps.job.policy import Policy
from fastps.simulation.simulate import Outcome, Simulation, build

Row = dict[str, Any]
Player = Callable[[Policy, Simulation, Callable[[int, int], None]], Outcome]
"""Plays one simulation, and calls the function with the pushes so far and of all; 0 of all: nobody knows."""


def simulate_all(
    runs: Sequence[tuple[Policy, Simulation]], console: Console, play: Player, *, progress: bool = True
) -> list[Outcome]:
    """Play each policy in sequence, optionally with a progress bar. All policies are checked before the first simulation."""
    for policy, simulation in runs:
        policy.check_workers(simulation.workers)
    build(*runs[0])
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,} pushes"), TimeRemainingColumn())
    outcomes = []
    with Progress(*columns, console=console, transient=True, disable=not progress) as bar:
        for policy, simulation in runs:
            task = bar.add_task(policy.spec.replace("[", "\\["), total=None)

            def tick(pushes: int, of: int, task: TaskID = task) -> None:
                bar.update(task, completed=pushes, total=of or None)

            outcomes.append(play(policy, simulation, tick))
            bar.remove_task(task)
    return outcomes


def simulation_table(rows: Sequence[Row], title: str) -> Rows:
    """Make a table with one row per policy; speed is relative to the first."""
    first = rows[0]["steps_per_s"]  # 0 if its workers were killed before they pushed
    columns = [
        Column("sync"),
        Column("steps/s", "steps_per_s", ",.1f"),
        Column("speed", lambda row: f"{row['steps_per_s'] / first:.2f}x" if first else "-"),
        Column("waiting", "wait_share", ".1%"),
        Column("for grants", "grant_wait_share", ".1%", wide=True),
        Column("staleness", "staleness_mean", ".2f"),
        Column("max", "staleness_max"),
        Column("zero gaps", "zero_gap_share", ".0%", wide=True),
        Column("dropped"),
        Column("link use", "link_share_max", ".0%", wide=True),
    ]
    if any(row["server_share_max"] > 0 for row in rows):
        columns.append(Column("server use", "server_share_max", ".0%", wide=True))
    if "test_accuracy" in rows[0]:
        columns.append(Column("accuracy", "test_accuracy", ".1%"))
    if "last_line" in rows[0]:
        columns += [Column("virtual s", "seconds", ",.2f"), Column("updates", form=","), Column("loss", "train_loss", ".4f")]
    return Rows.of(title, columns, rows)


def simulation_footer(rows: Sequence[Row]) -> str:
    """Return one line about the simulation's own speed, and the last line that a script printed under each discipline."""
    events, seconds = sum(row["events"] for row in rows), sum(row["wall_seconds"] for row in rows)
    printed = [f"{row['sync']}: {row['last_line']}" for row in rows if row.get("last_line")]
    speed = f"{sum(row['seconds'] for row in rows):,.1f} virtual seconds, {events:,} events played in {seconds:.1f} s"
    return "\n".join([*printed, speed])


def save_trace(outcome: Outcome, file: Path) -> None:
    """Write the trace's records as a NumPy file (numpy.load reads it). Raises UsageError."""
    assert outcome.trace is not None
    try:
        with file.open("wb") as stream:
            np.save(stream, outcome.trace, allow_pickle=False)
    except OSError as error:
        raise UsageError(f"--trace {file}: the trace cannot be written: {error}") from None
