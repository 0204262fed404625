"""The page of `fastps compare`: disciplines side by side, on the same seed and data."""

from collections.abc import Callable, Sequence
from typing import Any

from fastps.lab.demo import repeats
from fastps.report.figure import Figure, Json, Table, bars, layout, number_text, paired, rounded, rows_layout, seconds_text
from fastps.report.findings import GOOD, NOTE, Finding
from fastps.report.page import Fact, Page, Part
from fastps.version import __version__

Row = dict[str, Any]
_COLOURS = 8
_DASHES = ("solid", "dash", "dot", "dashdot")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "hexagon")
_ALIKE = 0.01  # accuracies that differ by less say nothing


def page_of(rows: Sequence[Row], what: str) -> Page:
    """Return the page about these rows of `fastps compare`; the first is the baseline, and `what` says what was trained."""
    workers = rows[0]["workers"]
    heading = f"{len(rows)} disciplines, {workers} worker{'s' if workers > 1 else ''}"
    is_script = "test_accuracy" not in rows[0]
    rate = ("steps_per_s", "steps/s") if is_script else ("samples_per_s", "samples/s")
    figures = [
        *([] if is_script else [_accuracy(rows)]),
        _bars(rows, "speed", "Throughput", *rate, "fold"),
        _bars(rows, "waits", "Waiting", "wait_share", "% of the workers' time", "wait", 100),
        _staleness(rows),
    ]
    if not is_script:
        figures.append(_bars(rows, "gaps", "Updates at almost the same time", "zero_gap_share", "% of gaps", "pull", 100))
    facts = [
        Fact(_name(row), seconds_text(row["seconds"]), row["last_line"])
        if is_script
        else Fact(_name(row), f"{row['test_accuracy']:.1%}", f"accuracy, in {seconds_text(row['seconds'])}")
        for row in rows[:8]
    ]
    made = f"Made by fastps {__version__}. This file holds all that it shows, and loads nothing."
    table = Part("runs", "Runs", [what], _table(rows))
    return Page(f"{heading}: fastps report", heading, what, facts, _findings(rows), paired(figures), [table], made=made)


def _name(row: Row) -> str:
    chosen = row.get("chosen", row["sync"])
    return str(row["sync"]) if chosen == row["sync"] else f"{row['sync']}, then {chosen}"


def _findings(rows: Sequence[Row]) -> list[Finding]:
    fastest, unclear = repeats.clearly_most(rows, "speed")
    base = rows[0]
    found = []
    if len(rows) == 1:
        found.append(Finding("fastest", NOTE, f"{_name(base)} made {base['steps_per_s']:,.0f} steps/s."))
    else:
        took = [
            f"{_name(row)}: {repeats.text_of(row, 'seconds', '.2f')} s"
            for row in ([fastest] if fastest is base else [fastest, base])
        ]
        found.append(Finding("fastest", GOOD if not unclear else NOTE, repeats.verdict(rows, _name), "; ".join(took) + "."))
    if "test_accuracy" in base:
        found.append(_accuracies(rows, fastest))
    waits = max(rows, key=lambda row: float(row["wait_share"]))
    if waits["wait_share"] > 0.05:
        title = f"Workers waited most under {_name(waits)}: {waits['wait_share']:.0%} of their time."
        found.append(Finding("waiting", NOTE, title))
    stale = max(rows, key=lambda row: float(row["staleness_mean"]))
    if stale["staleness_mean"] > 0:
        title = f"Gradients were the stalest under {_name(stale)}: {stale['staleness_mean']:.2f} versions in the mean."
        found.append(Finding("staleness", NOTE, title))
    return found


def _accuracies(rows: Sequence[Row], fastest: Row) -> Finding:
    """Whether another discipline is more accurate than the fastest, as far as the runs tell."""
    best, unsure = repeats.clearly_most(rows, "test_accuracy")
    runs = best.get("runs", 1)
    chance = f"Medians of {runs} runs." if runs > 1 else "One run of each, so differences of about two points may be chance."
    is_clear = best["test_accuracy"] - fastest["test_accuracy"] >= _ALIKE and (runs == 1 or fastest not in unsure)
    has, best_has = (repeats.text_of(row, "test_accuracy", ".1%") for row in (fastest, best))
    if best is not fastest and is_clear:
        title = f"{_name(best)} was the most accurate: {best_has}. {_name(fastest)} has {has}."
    else:
        title = f"No accuracy is clearly better than that of {_name(fastest)}: {has}."
    return Finding("accuracy", NOTE, title, chance)


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
                **_range([100 * point[1] for point in points], row.get("accuracy_range", ()), 100, "error_y"),
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


def _range(values: Sequence[float], ranges: Sequence[Sequence[float]], factor: float, name: str) -> Json:
    """Lines from the least to the most of repeated runs, about their medians."""
    if not ranges:
        return {}
    pairs = list(zip(values, ranges, strict=True))
    below = rounded([max(0.0, value - factor * least) for value, (least, _) in pairs])
    above = rounded([max(0.0, factor * most - value) for value, (_, most) in pairs])
    return {name: {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1.5}}


def _bars(rows: Sequence[Row], name: str, title: str, key: str, unit: str, colour: str, factor: float = 1.0) -> Figure:
    most = max(rows, key=lambda row: float(row[key]))
    names, values = [_name(row) for row in rows], rounded([factor * row[key] for row in rows])
    drawn = bars(names, values, f"var(--{colour})", f"%{{y}}: %{{x:,.4~r}} {unit}", texttemplate="%{x:,.3~r}")
    if "least" in rows[0]:
        drawn |= _range(values, [(row["least"][key], row["most"][key]) for row in rows], factor, "error_x")
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
    columns: dict[str, Callable[[Row], str]] = {
        "discipline": _name,
        "seconds": lambda row: repeats.text_of(row, "seconds", ".2f"),
        "steps/s": lambda row: f"{row['steps_per_s']:.1f}",
        "samples/s": lambda row: repeats.text_of(row, "samples_per_s", ".0f"),
        "speed": lambda row: repeats.text_of(row, "speed", ".2f"),
        "accuracy": lambda row: repeats.text_of(row, "test_accuracy", ".1%"),
        "staleness": lambda row: f"{row['staleness_mean']:.2f}",
        "at most": lambda row: str(row["staleness_max"]),
        "waiting": lambda row: f"{row['wait_share']:.1%}",
        "dropped": lambda row: str(row["dropped"]),
    }
    if "test_accuracy" not in rows[0]:
        del columns["samples/s"], columns["accuracy"]
    return Table(list(columns), [[cell(row) for cell in columns.values()] for row in rows])
