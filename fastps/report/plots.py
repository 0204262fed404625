"""Plots of where time went: the parts of each worker's time, who waited for whom, how long steps and the store take."""

from typing import Any

import numpy as np

from fastps.report.figure import Figure, Json, Table, bars, heat_map, lanes_height, rounded, rows_layout, seconds_text
from fastps.report.findings import Facts, straggler_of

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
