"""A page that shows the disciplines of one simulation side by side: what is learned by when, how fast, and how stale."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastps.report.figure import Figure, Json, Table, bars, lanes_height, layout, paired, rounded, rows_layout, seconds_text
from fastps.report.page import Fact, Page
from fastps.version import __version__

Row = dict[str, Any]
_COLOURS = 8  # of the page's style
_MOST_POINTS = 400  # of a line


def page_of(rows: Sequence[Row], title: str) -> Page:
    """The page about the rows of `fastps simulate`, one for each discipline. `title` says what was simulated."""
    learned = "accuracy_over_time" if "accuracy_over_time" in rows[0] else "loss_over_time"
    figures = [_speed(rows), _staleness(rows)]
    if any(row.get(learned) for row in rows):
        figures.insert(0, _learning(rows, learned))
    facts = [
        Fact("Disciplines", str(len(rows))),
        Fact("Virtual time", seconds_text(max(row["seconds"] for row in rows)), "of the longest"),
        Fact("Simulated in", seconds_text(sum(row["wall_seconds"] for row in rows)), "in all"),
    ]
    made = f"Made by fastps {__version__}. This file holds all that it shows, and loads nothing."
    return Page(f"{title}: fastps", title, ", ".join(row["sync"] for row in rows), facts, [], paired(figures), made=made)


def _line(number: int, name: str, x: Sequence[float], y: Sequence[float], hover: str) -> Json:
    """A line in the colour of the discipline with this number. What is not finite is a gap in it."""
    made: Json = {"type": "scatter", "mode": "lines+markers", "name": name, "x": list(x)}
    made["y"] = [value if math.isfinite(value) else None for value in rounded(y)]
    made |= {"line": {"color": f"var(--c{number % _COLOURS})"}, "marker": {"size": 4}}
    return {**made, "hovertemplate": f"{name}: {hover}<extra></extra>"}


def _learning(rows: Sequence[Row], learned: str) -> Figure:
    """Test accuracy, or the losses that a script reports, over virtual time."""
    is_loss = learned == "loss_over_time"
    what, hover = ("reported loss", "%{y:.4g} at %{x:.4g} s") if is_loss else ("test accuracy, %", "%{y:.1f} % at %{x:.4g} s")
    scale, sign, unit = (1.0, 1.0, "") if is_loss else (100.0, -1.0, " %")
    lines, ends = [], []
    for number, row in enumerate(rows):
        if row[learned]:
            times, values = zip(*row[learned], strict=True)
            lines.append(_line(number, row["sync"], rounded(times), [scale * value for value in values], hover))
            ends.append((scale * row["train_loss" if is_loss else "test_accuracy"], row["sync"], seconds_text(row["seconds"])))
    finite = [each for each in ends if math.isfinite(each[0])]
    best = min(finite, key=lambda each: sign * each[0], default=None)
    return Figure(
        "learning",
        f"{'Loss' if is_loss else 'Accuracy'} over virtual time",
        f"{best[1]} ends best: {best[0]:.4g}{unit}, after {best[2]}." if best else "No discipline ends with a finite loss.",
        f"A line for each discipline: {what} over virtual seconds.",
        {"data": lines, "layout": layout("virtual seconds", what, showlegend=True)},
        380,
        Table(["sync", what, "virtual time"], [[sync, f"{end:.4g}", took] for end, sync, took in ends]),
        "Each point is the mean of a run of pushes; the table has the mean of the last tenth." if is_loss else "",
        is_wide=True,
    )


def _speed(rows: Sequence[Row]) -> Figure:
    """Steps of all workers in a virtual second."""
    names, speeds = [row["sync"] for row in rows], [row["steps_per_s"] for row in rows]
    colours = [f"var(--c{number % _COLOURS})" for number in range(len(rows))]
    cells = [[row["sync"], f"{row['steps_per_s']:,.1f}", f"{row['wait_share']:.1%}", f"{row['dropped']:,}"] for row in rows]
    most = rows[speeds.index(max(speeds))]
    return Figure(
        "speed",
        "Steps in a virtual second",
        f"{most['sync']} makes most: {most['steps_per_s']:,.1f}. Its workers wait for {most['wait_share']:.0%} of the time.",
        "A bar for each discipline: the steps of all workers in a virtual second.",
        {"data": [bars(names, speeds, colours, "%{y}: %{x:,.1f} steps/s")], "layout": rows_layout("steps/s")},
        lanes_height(len(rows)),
        Table(["sync", "steps/s", "waiting", "dropped pushes"], cells),
    )


def _staleness(rows: Sequence[Row]) -> Figure:
    """The share of folded pushes over their staleness."""
    lines = []
    for number, row in enumerate(rows):
        versions, counts = np.array(row["staleness"], np.int64).reshape(-1, 2).T
        shares = 100 * counts / max(1, counts.sum())
        parts = range(0, len(versions), -(-len(versions) // _MOST_POINTS) or 1)  # the first version of each, and its mean share
        sums = np.add.reduceat(shares, parts) if len(versions) else shares
        means = [float(total) / count for total, count in zip(sums, np.diff([*parts, len(versions)]).tolist(), strict=True)]
        lines.append(_line(number, row["sync"], versions[parts].tolist(), means, "%{y:.2g} % of pushes are %{x} versions old"))
    most = max(rows, key=lambda row: float(row["staleness_max"]))
    cells = [[row["sync"], f"{row['staleness_mean']:.2f}", f"{row['staleness_max']:,}"] for row in rows]
    return Figure(
        "staleness",
        "Staleness of the folded pushes",
        f"The oldest push is {most['staleness_max']:,} versions old, under {most['sync']}.",
        "A line for each discipline: the share of folded pushes over the versions made since their weights were read.",
        {"data": lines, "layout": layout("versions", "% of the folded pushes", showlegend=True)},
        lanes_height(len(rows)),
        Table(["sync", "mean", "most"], cells),
    )
