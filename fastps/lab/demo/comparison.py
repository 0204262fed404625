"""The page of `fastps compare`: disciplines side by side, on the same seed and data."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastps.report.figure import Figure, Json, Table, bars, layout, number_text, paired, rounded, rows_layout, seconds_text
from fastps.report.findings import GOOD, NOTE, Finding
from fastps.report.page import Fact, Page, Part
from fastps.version import __version__

Row = Mapping[str, Any]
_COLOURS = 8
_DASHES = ("solid", "dash", "dot", "dashdot")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "hexagon")
_ALIKE = 0.01  # accuracies that differ by less say nothing


def page_of(rows: Sequence[Row], what: str) -> Page:
    """Return the page about these rows of `fastps compare`; the first is the baseline, and `what` says what was trained."""
    workers = rows[0]["workers"]
    heading = f"{len(rows)} disciplines, {workers} worker{'s' if workers > 1 else ''}"
    figures = [
        _accuracy(rows),
        _bars(rows, "speed", "Throughput", "samples_per_s", "samples/s", "fold"),
        _bars(rows, "waits", "Waiting", "wait_share", "% of the workers' time", "wait", 100),
        _staleness(rows),
        _bars(rows, "gaps", "Updates at almost the same time", "zero_gap_share", "% of gaps", "pull", 100),
    ]
    facts = [
        Fact(_name(row), f"{row['test_accuracy']:.1%}", f"accuracy, in {seconds_text(row['seconds'])}") for row in rows[:8]
    ]
    made = f"Made by fastps {__version__}. This file holds all that it shows, and loads nothing."
    table = Part("runs", "Runs", [what], _table(rows))
    return Page(f"{heading}: fastps report", heading, what, facts, _findings(rows), paired(figures), [table], made=made)


def _name(row: Row) -> str:
    chosen = row.get("chosen", row["sync"])
    return str(row["sync"]) if chosen == row["sync"] else f"{row['sync']}, then {chosen}"


def _findings(rows: Sequence[Row]) -> list[Finding]:
    fastest = max(rows, key=lambda row: float(row["samples_per_s"]))
    best = max(rows, key=lambda row: float(row["test_accuracy"]))
    base = rows[0]
    found = []
    if fastest is not base:
        times = fastest["samples_per_s"] / max(1e-9, base["samples_per_s"])
        title = f"{_name(fastest)} was the fastest: {times:.2f} times as many samples a second as {_name(base)}."
        detail = f"It took {seconds_text(fastest['seconds'])}, {_name(base)} {seconds_text(base['seconds'])}."
        found.append(Finding("fastest", GOOD, title, detail))
    else:
        found.append(Finding("fastest", GOOD, f"{_name(base)} was the fastest, at {base['samples_per_s']:,.0f} samples/s."))
    lead = best["test_accuracy"] - fastest["test_accuracy"]
    if best is not fastest and lead >= _ALIKE:
        title = f"{_name(best)} was the most accurate: {best['test_accuracy']:.1%}."
        title += f" {_name(fastest)} has {fastest['test_accuracy']:.1%}."
    else:
        title = f"The fastest was also as accurate as any: {fastest['test_accuracy']:.1%}."
    found.append(Finding("accuracy", NOTE, title, "One run of each, so differences of about two points may be chance."))
    waits = max(rows, key=lambda row: float(row["wait_share"]))
    if waits["wait_share"] > 0.05:
        title = f"Workers waited most under {_name(waits)}: {waits['wait_share']:.0%} of their time."
        found.append(Finding("waiting", NOTE, title))
    stale = max(rows, key=lambda row: float(row["staleness_mean"]))
    if stale["staleness_mean"] > 0:
        title = f"Gradients were the stalest under {_name(stale)}: {stale['staleness_mean']:.2f} versions in the mean."
        found.append(Finding("staleness", NOTE, title))
    return found


def _accuracy(rows: Sequence[Row]) -> Figure:
    data: list[Json] = []
    for number, row in enumerate(rows):
        points = row["accuracy_over_time"]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": _name(row),
                "x": rounded([point[0] for point in points]),
                "y": rounded([100 * point[1] for point in points]),
                "line": {"color": f"var(--c{number % _COLOURS})", "width": 2, "dash": _DASHES[number // 2 % len(_DASHES)]},
                "marker": {"symbol": _SYMBOLS[number % len(_SYMBOLS)], "size": 8},
                "hovertemplate": f"{_name(row)}: %{{y:.1f}} % after %{{x:.2f}} s<extra></extra>",
            }
        )
    passes = max(len(row["accuracy_over_time"]) for row in rows)
    table = []
    for row in rows:
        cells = [f"{accuracy:.1%} at {seconds:.2f} s" for seconds, accuracy in row["accuracy_over_time"]]
        table.append([_name(row), *cells, *[""] * (passes - len(cells))])
    best = max(rows, key=lambda row: float(row["test_accuracy"]))
    return Figure(
        "accuracy",
        "Accuracy over time",
        f"At the end {_name(best)} has {best['test_accuracy']:.1%}.",
        "Lines, one for each discipline: test accuracy after each pass over the samples. The table has the numbers.",
        {"data": data, "layout": layout("seconds", "test accuracy, %", showlegend=True, xaxis={"rangemode": "tozero"})},
        400,
        Table(["discipline", *(f"pass {number}" for number in range(1, passes + 1))], table),
        is_wide=True,
    )


def _bars(rows: Sequence[Row], name: str, title: str, key: str, unit: str, colour: str, factor: float = 1.0) -> Figure:
    most = max(rows, key=lambda row: float(row[key]))
    names, values = [_name(row) for row in rows], rounded([factor * row[key] for row in rows])
    drawn = bars(names, values, f"var(--{colour})", f"%{{y}}: %{{x:,.4~r}} {unit}", texttemplate="%{x:,.3~r}")
    note = "Shares of gaps between updates that are under 1 % of a step's time." if key == "zero_gap_share" else ""
    return Figure(
        name,
        title,
        f"The most under {_name(most)}: {number_text(factor * most[key])} {unit}.",
        "Bars, one for each discipline. The table has the numbers.",
        {"data": [drawn], "layout": rows_layout(unit)},
        100 + 38 * len(rows),
        Table(["discipline", unit], [[name, number_text(value)] for name, value in zip(names, values, strict=True)]),
        note,
    )


def _staleness(rows: Sequence[Row]) -> Figure:
    """The mean staleness, with the most as a mark."""
    figure = _bars(rows, "staleness", "Staleness", "staleness_mean", "versions in the mean", "compute")
    marks = {
        "type": "scatter",
        "mode": "markers",
        "name": "at most",
        "y": [_name(row) for row in rows],
        "x": [row["staleness_max"] for row in rows],
        "marker": {"symbol": "line-ns-open", "size": 14, "color": "var(--bad)", "line": {"width": 3}},
        "hovertemplate": "%{y}: at most %{x}<extra></extra>",
    }
    figure.spec["data"][0]["name"] = "in the mean"
    figure.spec["data"].append(marks)
    figure.spec["layout"]["showlegend"] = True
    return figure


def _table(rows: Sequence[Row]) -> Table:
    base = rows[0]["samples_per_s"]
    columns: dict[str, Callable[[Row], str]] = {
        "discipline": _name,
        "seconds": lambda row: f"{row['seconds']:.2f}",
        "steps/s": lambda row: f"{row['steps_per_s']:.1f}",
        "samples/s": lambda row: f"{row['samples_per_s']:.0f}",
        "speed": lambda row: f"{row['samples_per_s'] / base:.2f}",
        "accuracy": lambda row: f"{row['test_accuracy']:.1%}",
        "staleness": lambda row: f"{row['staleness_mean']:.2f}",
        "at most": lambda row: str(row["staleness_max"]),
        "waiting": lambda row: f"{row['wait_share']:.1%}",
        "dropped": lambda row: str(row["dropped"]),
    }
    return Table(list(columns), [[cell(row) for cell in columns.values()] for row in rows])
