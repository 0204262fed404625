"""The output of `fastps simulate`: a progress bar, and a table of the rows."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fastps.cli.tables import Column, Rows
from fastps.errors import UsageError
from fastps.job.policy import Policy
from fastps.simulation.simulate import Outcome, Simulation, build, simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fastps.lab.virtual.training import VirtualTraining

Row = dict[str, Any]


def simulate_all(
    runs: Sequence[tuple[Policy, Simulation]],
    console: Console,
    *,
    trace: bool = False,
    training: "VirtualTraining | None" = None,
    progress: bool = True,
) -> list[Outcome]:
    """Simulate each policy in sequence, optionally with a progress bar, and with real gradients if `training` is given.

    All policies are checked before the first simulation.
    """
    for policy, simulation in runs:
        policy.check_workers(simulation.workers)
    build(*runs[0])
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%"), TimeRemainingColumn())
    outcomes = []
    with Progress(*columns, console=console, transient=True, disable=not progress) as bar:
        for policy, simulation in runs:
            task = bar.add_task(policy.spec.replace("[", "\\["), total=None)
            outcomes.append(_play(policy, simulation, trace, training, partial(_show, bar, task)))
            bar.remove_task(task)
    return outcomes


def _play(
    policy: Policy,
    simulation: Simulation,
    trace: bool,
    training: "VirtualTraining | None",
    tick: Callable[[int, int], None],
) -> Outcome:
    if training is None:
        return simulate(policy, simulation, trace=trace, tick=tick)
    from fastps.lab.virtual.training import train_virtually

    return train_virtually(policy, simulation, training, tick=tick)


def _show(bar: Progress, task: TaskID, pushes: int, of: int) -> None:
    bar.update(task, completed=pushes, total=of)


def simulation_table(rows: Sequence[Row], title: str) -> Rows:
    """Make a table with one row per policy; speed is relative to the first."""
    headings = ["sync", "steps/s", "speed", "waiting", "for grants", "staleness", "max", "zero gaps", "dropped", "link use"]
    has_busy_servers = any(row["server_share_max"] > 0 for row in rows)
    if has_busy_servers:
        headings.append("server use")
    if "test_accuracy" in rows[0]:
        headings.append("accuracy")
    cells = [
        (
            row["sync"],
            f"{row['steps_per_s']:,.1f}",
            f"{row['steps_per_s'] / rows[0]['steps_per_s']:.2f}x",
            f"{row['wait_share']:.1%}",
            f"{row['grant_wait_share']:.1%}",
            f"{row['staleness_mean']:.2f}",
            str(row["staleness_max"]),
            f"{row['zero_gap_share']:.0%}",
            str(row["dropped"]),
            f"{row['link_share_max']:.0%}",
            *([f"{row['server_share_max']:.0%}"] if has_busy_servers else []),
            *([f"{row['test_accuracy']:.1%}"] if "test_accuracy" in row else []),
        )
        for row in rows
    ]
    lesser = ("for grants", "zero gaps", "link use", "server use")
    return Rows(title, [Column(heading, wide=heading in lesser) for heading in headings], cells)


def simulation_footer(rows: Sequence[Row]) -> str:
    """Return one line about the simulation's own speed."""
    events, seconds = sum(row["events"] for row in rows), sum(row["wall_seconds"] for row in rows)
    return f"{sum(row['seconds'] for row in rows):,.1f} virtual seconds, {events:,} events played in {seconds:.1f} s"


def save_trace(outcome: Outcome, file: Path) -> None:
    """Write the trace's records as a NumPy file (numpy.load reads it). Raises UsageError."""
    assert outcome.trace is not None
    try:
        with file.open("wb") as stream:
            np.save(stream, outcome.trace, allow_pickle=False)
    except OSError as error:
        raise UsageError(f"--trace {file}: the trace cannot be written: {error}") from None


def plot_staleness(rows: Sequence[Row], file: Path) -> None:
    """Plot the share of folded pushes over their staleness, one line per policy. Raises UsageError."""
    from fastps.cli.plots import save_picture

    def draw(axes: "Axes") -> None:
        for row in rows:
            folded = sum(count for _, count in row["staleness"])
            shares = [100 * count / folded for _, count in row["staleness"]]
            axes.plot([versions for versions, _ in row["staleness"]], shares, marker=".", label=row["sync"])
        axes.set_xlabel("staleness, versions")
        axes.set_ylabel("folded pushes, %")

    save_picture(draw, file)
