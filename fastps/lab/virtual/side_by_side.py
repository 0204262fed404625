"""A page that shows the disciplines of one simulation side by side: what is learned by when, how fast, and how stale."""

from collections.abc import Sequence
from typing import Any

from fastps.report.figure import Figure, Json, Table, bars, lanes_height, layout, paired, rounded, rows_layout, seconds_text
from fastps.report.page import Fact, Page
from fastps.version import __version__

Row = dict[str, Any]
_COLOURS = 8  # of the page's style


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
    made: Json = {"type": "scatter", "mode": "lines+markers", "name": name, "x": rounded(x), "y": rounded(y)}
    made |= {"line": {"color": f"var(--c{number % _COLOURS})"}, "marker": {"size": 4}}
    return {**made, "hovertemplate": f"{name}: {hover}<extra></extra>"}


def _learning(rows: Sequence[Row], learned: str) -> Figure:
    """Test accuracy, or the losses that a script reports, over virtual time."""
    is_loss, shown = learned == "loss_over_time", [row for row in rows if row[learned]]
    what, hover = ("reported loss", "%{y:.4g} at %{x:.4g} s") if is_loss else ("test accuracy, %", "%{y:.1f} % at %{x:.4g} s")
    scale = 1.0 if is_loss else 100.0
    lines = [
        _line(number, row["sync"], [at_s for at_s, _ in row[learned]], [scale * value for _, value in row[learned]], hover)
        for number, row in enumerate(rows)
        if row[learned]
    ]
    ends = {row["sync"]: row["train_loss"] if is_loss else 100 * row["test_accuracy"] for row in shown}
    best = (min if is_loss else max)(ends, key=lambda sync: ends[sync])
    note = "Each point is the mean of a run of pushes; the table has the mean of the last tenth." if is_loss else ""
    return Figure(
        "learning",
        f"{'Loss' if is_loss else 'Accuracy'} over virtual time",
        f"{best} ends best: {ends[best]:.4g}{'' if is_loss else ' %'}, after {_seconds_of(shown, best)}.",
        f"A line for each discipline: {what} over virtual seconds.",
        {"data": lines, "layout": layout("virtual seconds", what, showlegend=True)},
        380,
        Table(["sync", what, "virtual time"], [[sync, f"{end:.4g}", _seconds_of(shown, sync)] for sync, end in ends.items()]),
        note,
        is_wide=True,
    )


def _seconds_of(rows: Sequence[Row], sync: str) -> str:
    return seconds_text(next(row["seconds"] for row in rows if row["sync"] == sync))


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
        folded = max(1, sum(count for _, count in row["staleness"]))
        shares = [100 * count / folded for _, count in row["staleness"]]
        versions = [versions for versions, _ in row["staleness"]]
        lines.append(_line(number, row["sync"], versions, shares, "%{y:.1f} % of the pushes are %{x} versions old"))
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
