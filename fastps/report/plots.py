"""Plots of a run: where time went, the staleness of updates, and what other disciplines would have given."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from fastps.advice.replay import limits, steady_part
from fastps.errors import Error
from fastps.report.figure import (
    Figure,
    Json,
    Table,
    bars,
    heat_map,
    lanes_height,
    layout,
    line_at,
    number_text,
    rounded,
    rows_layout,
    seconds_text,
)
from fastps.report.findings import Facts, lead_bound, straggler_of
from fastps.tracing.file import FOLDED
from fastps.tracing.series import gaps_ns, leads
from fastps.tracing.summary import Row

_PARTS = {
    "core": ("on a core", "compute", "is computing on a core"),
    "queue": ("ready, no core", "queue", "is spent ready to compute, while no core is free"),
    "blocked": ("blocked", "blocked", "is spent blocked: asleep, or waiting for files or data"),
    "store": ("store", "fold", "is pushing, folding and pulling"),
    "waiting": ("waiting", "wait", "is waiting for the next grant"),
}


def time_of_workers(facts: Facts) -> Figure:
    """Shares of each worker's time: on a core, ready without one, blocked, in the store, waiting."""
    known = [name for name in _PARTS if all(row[name] is not None for row in facts.times)]
    times = np.array([[row[name] or 0.0 for name in known] for row in facts.times])
    shares = 100 * times / np.maximum(1e-9, times.sum(axis=1, keepdims=True))
    data = [
        bars(
            *(facts.names, shares[:, number], f"var(--{colour})"),
            f"%{{y}}: {text} %{{x:.1f}} % (%{{customdata:.3g}} s)",
            name=text,
            customdata=rounded(times[:, number] / 1e3),
        )
        for number, (text, colour, _) in enumerate(_PARTS[name] for name in known)
    ]
    whole = times.sum(axis=0) / max(1e-9, float(times.sum()))
    most = int(whole.argmax())
    drawn = rows_layout("% of the worker's time", barmode="stack", showlegend=True)
    drawn["legend"]["traceorder"] = "normal"
    rows = [[name, *(f"{value:.1f}%" for value in row)] for name, row in zip(facts.names, shares, strict=True)]
    return Figure(
        "time",
        "Where the time went",
        f"The largest part, {whole[most]:.0%} of the workers' time, {_PARTS[known[most]][2]}.",
        "Stacked bars, one for each worker: shares of its time. The table has the numbers.",
        {"data": data, "layout": drawn},
        lanes_height(facts.trace.workers),
        Table(["worker", *(_PARTS[name][0] for name in known)], rows),
        "“Blocked” is time without a core that the worker did not ask for: sleep, files, a straggler's injected wait.",
    )


def waits(facts: Facts) -> Figure | None:
    """Who waited for whom."""
    if facts.trace.workers < 2:
        return None
    seconds = facts.waited_ns / 1e9
    columns = [*map(str, range(facts.trace.workers)), "none"]
    of_worker = seconds[:, :-1].sum(axis=0)
    most = int(of_worker.argmax())
    rows = [[name, *(f"{value:.3g} s" for value in row)] for name, row in zip(facts.names, seconds, strict=True)]
    total = float(seconds.sum())
    sentence = (
        f"Of {seconds_text(total)} of waiting, {seconds_text(float(of_worker[most]))} was for worker {most}."
        if total and of_worker[most]
        else "No worker waited for another."
    )
    return Figure(
        "waits",
        "Who waited for whom",
        sentence,
        "A matrix: each row is a worker that waited, each column the worker it waited for; the table has the seconds.",
        heat_map(columns, facts.names, seconds, "s", "%{y} waited %{z:.3g} s for worker %{x}", "waited for worker"),
        int(np.clip(130 + 38 * facts.trace.workers, 200, 900)),
        Table(["worker", *(f"for {name}" for name in columns)], rows),
        "A wait counts for the worker whose push ended it, until that push. The rest (folds, messages, wake-ups) is in the last"
        " column.",
    )


def _spread(values_ms: Any) -> list[float]:
    """The percentiles 5, 25, 50, 75 and 95; 0 of no values."""
    return list(np.percentile(values_ms, (5, 25, 50, 75, 95))) if len(values_ms) else [0.0] * 5


def _cells(values_ms: Any) -> list[str]:
    return [f"{value:.3g} ms" for value in _spread(values_ms)]


def _box(name: str, values_ms: Any, colour: str) -> Json:
    low, first, median, third, high = rounded(_spread(values_ms))
    return {
        "type": "box",
        "orientation": "h",
        "name": name,
        "y": [name],
        "q1": [first],
        "median": [median],
        "q3": [third],
        "lowerfence": [low],
        "upperfence": [high],
        "marker": {"color": f"var(--{colour})"},
        "line": {"width": 1.5},
        "hoverinfo": "x",
    }


def steps(facts: Facts) -> Figure:
    """How long each worker's steps compute."""
    steps = [facts.trace.steps_of(worker) for worker in range(facts.trace.workers)]
    times = [(each["computed_ns"] - each["begin_ns"]) / 1e6 for each in steps]
    rows = [
        [name, f"{row['steps']:,}", *_cells(mine)] for name, row, mine in zip(facts.names, facts.workers, times, strict=True)
    ]
    medians = [float(np.median(mine)) for mine in times if len(mine)]
    found = straggler_of(facts)
    slow = found["worker"] if found is not None else -1
    spread = max(medians) / max(1e-9, min(medians))
    return Figure(
        "steps",
        "How long steps compute",
        f"Medians from {min(medians):.3g} to {max(medians):.3g} ms: the slowest worker takes {spread:.1f} times the fastest."
        if len(medians) > 1
        else f"The median step computes for {medians[0]:.3g} ms.",
        "A box for each worker: its middle half of steps, with lines to the 5th and the 95th percentile.",
        {
            "data": [
                _box(name, mine, "wait" if worker == slow else "compute")
                for worker, (name, mine) in enumerate(zip(facts.names, times, strict=True))
            ],
            "layout": rows_layout("ms of a step, from its weights to its gradient", xaxis={"rangemode": "tozero"}),
        },
        lanes_height(facts.trace.workers),
        Table(["worker", "steps", "5%", "25%", "median", "75%", "95%"], rows),
    )


def store(facts: Facts) -> Figure:
    """What pushing, folding and pulling take."""
    steps = facts.trace.steps
    whole = steps[(steps["end_ns"] > 0) & (steps["posted_ns"] > 0)]
    posted = np.clip(whole["posted_ns"], whole["computed_ns"], whole["pushed_ns"])
    parts = {
        "push": (posted - whole["computed_ns"]) / 1e6,
        "fold": (whole["pushed_ns"] - posted) / 1e6,
        "pull": (whole["end_ns"] - whole["granted_ns"]) / 1e6,
        "all, on a core": whole["store_cpu_ns"] / 1e6,
    }
    medians = {name: float(np.median(mine)) if len(mine) else 0.0 for name, mine in parts.items()}
    rows = [[name, *_cells(mine)] for name, mine in parts.items()]
    megabytes = facts.trace.header.get("model_bytes", 0) / 1e6
    colours = {"push": "push", "fold": "fold", "pull": "pull"}
    return Figure(
        "store",
        "Push, fold and pull",
        f"In the median a step pushes for {medians['push']:.3g} ms, posts and folds for {medians['fold']:.3g} ms and pulls for"
        f" {medians['pull']:.3g} ms; the model has {megabytes:.3g} MB.",
        "A box for each part of a step in the store: the middle half, with lines to the 5th and the 95th percentile.",
        {
            "data": [_box(name, mine, colours.get(name, "blocked")) for name, mine in parts.items()],
            "layout": rows_layout("ms of a step", xaxis={"rangemode": "tozero"}),
        },
        240,
        Table(["part", "5%", "25%", "median", "75%", "95%"], rows),
        "A worker folds while it posts only if no other worker folds; folds that it helps with are part of its waiting.",
    )


_INTERVALS = 160


def _in_intervals(times: Any, values: Any, seconds: float) -> tuple[list[float], list[float], list[float]]:
    """The middle, the mean and the maximum of each interval that has values."""
    place = np.clip((times / max(1e-9, seconds) * _INTERVALS).astype(int), 0, _INTERVALS - 1)
    count = np.bincount(place, minlength=_INTERVALS)
    total = np.bincount(place, weights=values, minlength=_INTERVALS)
    most = np.zeros(_INTERVALS)
    np.maximum.at(most, place, values)
    has = count > 0
    middle = (np.arange(_INTERVALS) + 0.5) * seconds / _INTERVALS
    return rounded(middle[has], 6), rounded(total[has] / count[has]), rounded(most[has])


def _line(name: str, x: Sequence[float], y: Sequence[float], colour: str, **more: Any) -> Json:
    line = {"color": f"var(--{colour})", "width": 2, **more.pop("line", {})}
    return {"type": "scatter", "mode": "lines", "name": name, "x": list(x), "y": list(y), "line": line, **more}


def staleness(facts: Facts) -> Figure | None:
    """Staleness, and where a lead is bounded the lead, over time."""
    folded = facts.trace.pushes[facts.trace.pushes["fate"] == FOLDED]
    bound = lead_bound(dict(facts.trace.header["policy"]))
    if not len(folded) or facts.trace.workers < 2 or (bound is None and not folded["staleness"].any()):
        return None
    times, mean, most = _in_intervals((folded["decided_ns"] - facts.begin_ns) / 1e9, folded["staleness"], facts.seconds)
    data = [
        _line("staleness, most", times, most, "wait", line={"width": 1, "shape": "hvh"}),
        _line("staleness, mean", times, mean, "compute"),
    ]
    run = facts.run
    sentence = f"{run['staleness_mean']:.2f} versions in the mean, {run['staleness_max']} at most."
    more: Json = {}
    if bound is not None:
        at_ns, lead = leads(facts.trace)
        times, _, most_lead = _in_intervals((at_ns - facts.begin_ns) / 1e9, lead, facts.seconds)
        data.append(_line("lead of the fastest worker", times, most_lead, "pull", line={"dash": "dot"}))
        line, name = line_at("y", bound, f"bound of the lead: {bound}", "bad")
        more = {"shapes": [line], "annotations": [name]}
        sentence += f" The lead, in pushes, is bounded by {bound}; staleness counts all workers' versions."
    drawn = layout("seconds from the first step", "versions", showlegend=True, yaxis={"rangemode": "tozero"}, **more)
    return Figure(
        "staleness",
        "Staleness over time",
        sentence,
        f"Lines over time: the mean and the most of the staleness of folded pushes. {sentence}",
        {"data": data, "layout": drawn},
        300,
        None,
        f"Each point is one of {_INTERVALS} equal parts of the run.",
    )


def staleness_by_worker(facts: Facts) -> Figure | None:
    """Staleness of each worker's pushes."""
    folded = facts.trace.pushes[facts.trace.pushes["fate"] == FOLDED]
    most = int(folded["staleness"].max(initial=0))
    if not len(folded) or facts.trace.workers < 2 or most == 0:
        return None
    width = max(1, (most + 24) // 24)
    columns = most // width + 1
    cells = np.zeros((facts.trace.workers, columns))
    np.add.at(cells, (folded["worker"], folded["staleness"] // width), 1)
    shares = 100 * cells / np.maximum(1, cells.sum(axis=1, keepdims=True))
    names = [str(low) if width == 1 else f"{low}-{low + width - 1}" for low in range(0, most + 1, width)]
    hover = "%{y}: %{z:.1f} % of its pushes are %{x} versions stale"
    stalest = max(facts.workers, key=lambda row: float(row["staleness_mean"]))
    rows = [[f"worker {row['worker']}", f"{row['staleness_mean']:.2f}", str(row["staleness_max"])] for row in facts.workers]
    return Figure(
        "staleness-by-worker",
        "Staleness by worker",
        f"Worker {stalest['worker']}'s pushes are the stalest: {stalest['staleness_mean']:.2f} versions in the mean.",
        "A matrix: each row is a worker, each column a staleness; the colour is the share of the worker's pushes.",
        heat_map(names, facts.names, shares, "%", hover, "staleness in versions"),
        lanes_height(facts.trace.workers),
        Table(["worker", "mean", "at most"], rows),
    )


def gaps(facts: Facts) -> Figure | None:
    """Times between updates."""
    found = gaps_ns(facts.trace)
    found = found[found >= 0]
    if len(found) < 2:
        return None
    seconds = np.maximum(found, 1000) / 1e9
    borders = np.geomspace(seconds.min(), max(seconds.max(), 1.01 * seconds.min()), 41)
    counts = np.histogram(seconds, borders)[0]
    middle = np.sqrt(borders[1:] * borders[:-1])
    shares = 100 * counts / counts.sum()
    texts = [f"{seconds_text(low)} to {seconds_text(high)}" for low, high in pairwise(borders)]
    low, median, high = (seconds_text(float(value)) for value in np.percentile(seconds, (5, 50, 95)))
    return Figure(
        "gaps",
        "Gaps between updates",
        f"A new version comes {median} after the one before, in the median; nine in ten gaps are {low} to {high}.",
        f"A histogram of the times between versions, on a logarithmic axis: the median is {median}.",
        {
            "data": [
                {
                    "type": "bar",
                    "x": rounded(1e3 * middle),
                    "y": rounded(shares),
                    "width": rounded(1e3 * np.diff(borders)),
                    "customdata": texts,
                    "hovertemplate": "%{customdata}: %{y:.1f} % of gaps<extra></extra>",
                    "marker": {"color": "var(--compute)"},
                }
            ],
            "layout": layout("ms between two versions", "% of gaps", xaxis={"type": "log"}, bargap=0),
        },
        260,
        Table(["gaps", "5%", "median", "95%"], [[f"{len(found):,}", low, median, high]]),
    )


_MOST_BARS = 14
_HOVER = (
    "%{y}: %{x:.1f} useful steps/s<br>staleness %{customdata[0]:.2f}, waiting %{customdata[1]:.0f} %,"
    " dropped %{customdata[2]:.0f} %"
)
_HEADINGS = ("--sync", "progress", "useful steps/s", "speed", "staleness", "waiting", "dropped")
_LINE = 15  # pixels between the names of two bounds


def disciplines(facts: Facts) -> Figure | None:
    """Return the plot, or None if there was no replay."""
    rows = list(facts.advice)
    if len(rows) < 2:
        return None
    own = str(facts.trace.header["policy"].get("spec"))
    shown = [row for number, row in enumerate(rows) if number < _MOST_BARS or row["sync"] == own or row["recommended"]]
    names, colours = zip(*(_bar(row, own) for row in shown), strict=True)
    drawn = bars(
        names,
        [row["useful_steps_per_s"] for row in shown],
        colours,
        _HOVER,
        customdata=[rounded([row["staleness_mean"], 100 * row["wait_share"], 100 * row["dropped_share"]]) for row in shown],
    )
    bounds = _bounds(facts)
    lines = [line_at("x", value, name, "ink", _LINE * number) for number, (name, value) in enumerate(bounds)]
    chosen = next(row for row in rows if row["recommended"])
    text = "".join(f" {name[0].upper()}{name[1:]}: {number_text(value)} steps/s." for name, value in bounds)
    replayed, made = len(steady_part(facts.trace).steps), len(facts.trace.steps)
    return Figure(
        "disciplines",
        "What other disciplines would have given",
        f"Recommended: --sync {chosen['sync']}, {chosen['reason']}.",
        f"Bars: useful steps per second of each discipline, in order of the expected progress.{text}",
        {
            "data": [drawn],
            "layout": rows_layout(
                "useful steps/s, predicted",
                margin={"t": 20 + _LINE * len(bounds)},
                shapes=[shape for shape, _ in lines],
                annotations=[name for _, name in lines],
            ),
        },
        90 + 24 * len(shown) + _LINE * len(bounds),
        _table(rows, own),
        f"A replay in virtual time of the {replayed:,} steps, of {made:,}, that were made while all workers were at work, under"
        f" the scheduler that the store runs. Of this run itself it is off by {chosen['replay_error']:+.0%}. Progress weighs"
        f" useful steps by what staleness cost on two small tasks.{text}",
    )


def _bar(row: Row, own: str) -> tuple[str, str]:
    if row["sync"] == own:
        return f"<b>{row['sync']}</b> (this run)", "var(--wait)"
    return (f"<b>{row['sync']}</b> ✓", "var(--fold)") if row["recommended"] else (str(row["sync"]), "var(--muted-bar)")


def _table(rows: list[Row], own: str) -> Table:
    cells = []
    for row in rows:
        name = row["sync"] + (" (recommended)" if row["recommended"] else "") + (" (this run)" if row["sync"] == own else "")
        shares = [f"{row[key]:.0%}" for key in ("wait_share", "dropped_share")]
        speed = f"{row['expected']:.0%}", f"{row['useful_steps_per_s']:.1f}", f"{row['speed']:.0%}"
        cells.append([name, *speed, f"{row['staleness_mean']:.2f}", *shares])
    return Table(_HEADINGS, cells, [number for number, row in enumerate(rows) if row["recommended"]])


def _bounds(facts: Facts) -> list[tuple[str, float]]:
    try:
        rows = limits(facts.trace)
    except Error:
        return []
    names = {"measured": "measured", "cores": "limit of the cores"}
    return [(text, float(rows[name]["steps_per_s"])) for name, text in names.items() if name in rows]
