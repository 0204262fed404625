"""Plots of updates: their staleness over time and by worker, and the gaps between them."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from fastps.report.figure import Figure, Json, Table, heat_map, lanes_height, layout, line_at, rounded, seconds_text
from fastps.report.findings import Facts, lead_bound
from fastps.tracing.file import FOLDED
from fastps.tracing.series import gaps_ns, leads

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
