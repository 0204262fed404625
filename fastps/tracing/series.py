"""Series over the time of a trace: staleness, leads, gaps between updates, and the parts of steps in intervals of time."""

import numpy as np
import numpy.typing as npt

from fastps.tracing.endings import endings
from fastps.tracing.file import FOLDED, Lines, Trace

Times = npt.NDArray[np.int64]
PHASES = ("compute", "push", "fold", "wait", "pull")


def span_of(trace: Trace) -> tuple[int, int]:
    """Return the beginning of the first step and the end of the last, in ns. The trace must have steps."""
    steps = trace.steps
    return int(steps["begin_ns"].min()), int(max(steps["end_ns"].max(), steps["pushed_ns"].max()))


def edges_of(steps: Lines) -> Times:
    """Return the borders of each step's phases: an array of (steps, 6) times in ns, which never decrease in a row.

    A worker computes, copies its gradient into its slot (push), posts it and folds what there is to fold (fold), waits for its
    grant, and pulls. A step that was cut short has no wait and no pull. Under overlap the post comes later, and push is empty.
    """
    computed, pushed = steps["computed_ns"], steps["pushed_ns"]
    posted = np.where(steps["posted_ns"] > 0, np.clip(steps["posted_ns"], computed, np.maximum(computed, pushed)), pushed)
    granted = np.where(steps["granted_ns"] > 0, steps["granted_ns"], pushed)
    end = np.where(steps["end_ns"] > 0, steps["end_ns"], granted)
    columns = np.stack([steps["begin_ns"], computed, posted, pushed, granted, end], axis=1).astype(np.int64)
    found: Times = np.maximum.accumulate(columns, axis=1)
    return found


def phase_shares(edges: Times, borders: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return which share of each interval between two borders a worker spent in each phase: (phases, intervals)."""
    width = np.diff(borders)
    found = np.zeros((len(PHASES), len(width)))
    if len(edges):
        for number in range(len(PHASES)):
            begin, end = edges[:, number], edges[:, number + 1]
            total = np.cumsum(end - begin)
            times = np.stack([begin, end], axis=1).ravel()
            spent = np.stack([np.append(0, total[:-1]), total], axis=1).ravel()
            found[number] = np.diff(np.interp(borders, times, spent)) / np.maximum(width, 1e-9)
    return found


def gaps_ns(trace: Trace) -> Times:
    """Return the times between consecutive versions of a shard, of all shards, in ns."""
    found = []
    for shard in range(int(trace.header["shards"])):
        pushes = trace.pushes[(trace.pushes["shard"] == shard) & (trace.pushes["fate"] == FOLDED)]
        pushes = pushes[np.argsort(pushes["decided_ns"], kind="stable")]
        _, first = np.unique(pushes["version"], return_index=True)
        found.append(np.diff(np.sort(pushes["decided_ns"][first])))
    return np.concatenate(found) if found else np.empty(0, np.int64)


def leads(trace: Trace) -> tuple[Times, Times]:
    """Return the time of each post, and by how many pushes its worker led the slowest live worker right after it."""
    posts = [np.sort(trace.steps_of(worker)["posted_ns"]) for worker in range(trace.workers)]
    posts = [times[times > 0] for times in posts]
    times = np.sort(np.concatenate(posts))
    most = np.iinfo(np.int64).max
    least, own = np.full(len(times), most), np.zeros(len(times), np.int64)
    for ending, of_worker in zip(endings(trace), posts, strict=True):
        if not len(of_worker):
            continue
        count = np.searchsorted(of_worker, times, "right")
        own = np.maximum(own, np.where(np.isin(times, of_worker), count, 0))
        is_live = times <= ending.at_ns
        least = np.where(is_live, np.minimum(least, count), least)
    return times, np.maximum(0, own - np.where(least == most, own, least))
