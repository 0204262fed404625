"""The time line: a lane for each worker, with each step's phases as bars where there is room, and else their shares.

The page has the shares of the whole run in intervals, and the steps themselves if they are few; of many steps it has those of
some windows. Its script draws steps as soon as a reader has zoomed in far enough.
"""

from collections.abc import Sequence

import numpy as np

from fastps.report.figure import Figure, Json, Table, layout, listed, packed, seconds_text
from fastps.report.findings import BAD, Facts, Finding, straggler_of
from fastps.tracing.endings import KILLED
from fastps.tracing.merging import nodes_of
from fastps.tracing.series import PHASES, Times, edges_of, phase_shares

MOST_LANES = 64
MOST_STEPS = 60_000  # kept one by one; 32 bytes of the page each
_MOST_CELLS = 1600  # lanes times intervals
_LEAST_INTERVALS, _MOST_INTERVALS = 60, 400
_LANE = 0.78  # of a lane's height is drawn
MEANINGS = {
    "compute": "computing the gradient",
    "push": "copying it into the slot",
    "fold": "posting it, and folding if no other worker does",
    "wait": "waiting for the grant of the next step",
    "pull": "pinning the new weights",
    "lost": "the worker is gone",
}


def timeline(facts: Facts, findings: Sequence[Finding]) -> Figure:
    """Return the time line of a run, with lost workers and the straggler marked."""
    lanes = _lanes(facts, findings)
    edges = {worker: edges_of(facts.trace.steps_of(worker)) - facts.begin_ns for worker in lanes}
    windows = _windows(facts, findings)
    kept = _kept(facts, edges, windows)
    is_whole = all(len(each[1]) == len(edges[worker]) for worker, each in kept.items())
    unit_ns = max(1, round(facts.seconds * 1e9 / (1 << 30)), 100)
    intervals = int(np.clip(_MOST_CELLS // len(lanes), _LEAST_INTERVALS, _MOST_INTERVALS))
    borders = np.linspace(0, facts.seconds * 1e9, intervals + 1)
    extra = {
        "phases": list(PHASES),
        "span": facts.seconds,
        "lanes": [_lane(facts, worker, findings) for worker in lanes],
        "intervals": intervals,
        "shares": [packed(np.round(255 * phase_shares(edges[worker], borders)), "u1") for worker in lanes],
        "unit": unit_ns / 1e9,
        "steps": [
            {"numbers": packed(numbers, "i4"), "times": packed(times.ravel() // unit_ns, "i4")}
            for numbers, times in (kept[worker] for worker in lanes)
        ],
        "windows": windows,
        "whole": is_whole,
        "fill": _LANE,
    }
    shown = [*PHASES, *(["lost"] if any(ending.is_lost for ending in facts.endings) else [])]
    return Figure(
        "timeline",
        "Time line",
        _sentence(facts, lanes, is_whole),
        _description(facts, findings),
        {"data": [], "layout": layout("seconds from the first step", "")},
        int(np.clip(64 + 46 * len(lanes), 150, 960)),
        Table(["phase", "what the worker does"], [[name, MEANINGS[name]] for name in shown]),
        extra=extra,
        is_wide=True,
    )


def _lanes(facts: Facts, findings: Sequence[Finding]) -> list[int]:
    """The workers to draw: all, or of many those that findings name and the first others."""
    workers = list(range(facts.trace.workers))
    if len(workers) <= MOST_LANES:
        return workers
    named = [each.worker for each in findings if each.worker >= 0]
    return sorted(list(dict.fromkeys([*named, *workers]))[:MOST_LANES])


def _lane(facts: Facts, worker: int, findings: Sequence[Finding]) -> Json:
    ending = facts.endings[worker]
    node = next((each for each in nodes_of(facts.trace) if 0 <= worker - each.first_worker < each.workers), None)
    found = straggler_of(facts)
    lane: Json = {"worker": worker, "name": f"worker {worker}", "node": "" if node is None else f"node {node.node}"}
    if found is not None and found["worker"] == worker:
        lane["straggler"] = f"straggler, {found['factor']:.1f} times"
    if ending.is_lost:
        word = "killed" if ending.kind == KILLED else "failed" if ending.kind == "failed" else "lost"
        lane["lost"] = {
            "at": min(facts.seconds, facts.at_s(ending.at_ns)),
            "text": f"{word} at {seconds_text(facts.at_s(ending.at_ns))}",
        }
    lane["pauses"] = [
        {
            "begin": facts.at_s(pause.begin_ns),
            "end": min(facts.seconds, facts.at_s(pause.end_ns)),
            "text": f"{'stopped' if pause.is_known else 'stood still'} {seconds_text((pause.end_ns - pause.begin_ns) / 1e9)}",
        }
        for pause in facts.pauses
        if pause.worker == worker
    ]
    return lane


def _windows(facts: Facts, findings: Sequence[Finding]) -> list[Json]:
    """Parts of the run that a reader may want to see step by step: the first steps, and around each finding with a time."""
    rows = [row["compute_ms_mean"] for row in facts.workers if row["steps"]]
    width = min(facts.seconds, max(1e-3, 25e-3 * float(np.median(rows)))) if rows else facts.seconds
    places = [("first steps", 0.0), ("middle", facts.seconds / 2)]
    for each in findings:
        if each.at_s >= 0 and each.level == BAD and len(places) < 6:
            places.append((f"worker {each.worker} {each.kind.replace('-', ' ')}", each.at_s))
    found = []
    for name, at in places:
        begin = float(np.clip(at - width / 2, 0, max(0.0, facts.seconds - width)))
        found.append({"name": name, "begin": begin, "end": begin + width})
    return found


def _kept(facts: Facts, edges: dict[int, Times], windows: Sequence[Json]) -> dict[int, tuple[Times, Times]]:
    """The numbers and the times of the steps that the page has: all of them, or of many those of the windows."""
    is_all = sum(map(len, edges.values())) <= MOST_STEPS
    found = {}
    for worker, each in edges.items():
        inside = np.full(len(each), is_all)
        for window in () if is_all else windows:
            width = window["end"] - window["begin"]
            begin_ns, end_ns = 1e9 * (window["begin"] - width), 1e9 * (window["end"] + width)
            inside |= (each[:, -1] >= begin_ns) & (each[:, 0] <= end_ns)
        places = np.flatnonzero(inside)[: MOST_STEPS if is_all else MOST_STEPS // len(edges)]
        found[worker] = facts.trace.steps_of(worker)["step"][places], each[places]
    return found


def _sentence(facts: Facts, lanes: Sequence[int], is_whole: bool) -> str:
    steps = len(facts.trace.steps)
    text = f"{steps:,} steps of {facts.trace.workers} worker{'s' if facts.trace.workers > 1 else ''}."
    if not is_whole:
        text += " They are too many to draw each: the page has shares of time, and single steps only in the parts named below."
    if len(lanes) < facts.trace.workers:
        text += f" {len(lanes)} of the {facts.trace.workers} workers are drawn: those of the findings, and the first others."
    return text


def _description(facts: Facts, findings: Sequence[Finding]) -> str:
    marks = [each.title for each in findings if each.worker >= 0]
    text = f"A lane for each of {facts.trace.workers} workers over {seconds_text(facts.seconds)}, with the share of time in "
    return text + f"{listed(list(PHASES))}. " + " ".join(marks)
