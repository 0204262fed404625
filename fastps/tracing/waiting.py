"""Who waited for whom: each wait of a trace is put down to the worker whose push ended it.

The cause follows from the policy. Where a version takes several pushes, it is the worker that posted the last of them. Where a
lead is bounded, it is the slowest worker when the wait began. Elsewhere, and over several nodes, it is the last worker that
posted before the grant. The time after the cause's post is nobody's: a fold, a message, a wake-up.
"""

import numpy as np
import numpy.typing as npt

from fastps.tracing.endings import endings
from fastps.tracing.file import FOLDED, Lines, Trace
from fastps.tracing.merging import nodes_of

Times = npt.NDArray[np.int64]
_NEVER = np.iinfo(np.int64).max
_NOBODY = -1
_Causes = tuple[npt.NDArray[np.int64], Times]
"""For each wait, the worker that caused it (-1: none) and the time of its post."""


def waiting_matrix(trace: Trace) -> Times:
    """Return how long each worker (row) waited for each other (column), in ns; the last column is waiting for no worker."""
    found = np.zeros((trace.workers, trace.workers + 1), np.int64)
    posts = [trace.steps_of(worker)["posted_ns"] for worker in range(trace.workers)]
    posts = [np.sort(times[times > 0]) for times in posts]
    ends_ns = [ending.at_ns if ending.at_ns >= 0 else 0 for ending in endings(trace)]
    policy, has_nodes = trace.header["policy"], len(nodes_of(trace)) > 1
    is_bounded, is_version = policy.get("grant") == "bounded", policy.get("fold") in ("all", "quorum", "count")
    completed = _completions(trace) if is_version else None
    for worker in range(trace.workers):
        steps = trace.steps_of(worker)
        steps = steps[(steps["granted_ns"] > 0) & (steps["granted_ns"] > steps["pushed_ns"])]
        if not len(steps):
            continue
        if is_bounded and not has_nodes:
            workers, posted_ns = _slowest(posts, ends_ns, worker, steps)
        elif completed is not None and not has_nodes:
            workers, posted_ns = _last_of_version(trace, completed, worker, steps)
        else:
            workers, posted_ns = _last_posts(posts, worker, steps)
        begin_ns, end_ns = steps["pushed_ns"], steps["granted_ns"]
        has_cause = (workers != _NOBODY) & (workers != worker)
        until_ns = np.where(has_cause, np.clip(posted_ns, begin_ns, end_ns), begin_ns)
        np.add.at(found[worker], workers[has_cause], (until_ns - begin_ns)[has_cause])
        found[worker, -1] += int((end_ns - until_ns).sum())
    return found


def _last_posts(posts: list[Times], worker: int, steps: Lines) -> _Causes:
    others = [(other, times) for other, times in enumerate(posts) if other != worker and len(times)]
    if not others:
        return np.full(len(steps), _NOBODY), np.zeros(len(steps), np.int64)
    times = np.concatenate([times for _, times in others])
    workers = np.concatenate([np.full(len(times), other) for other, times in others])
    order = np.argsort(times, kind="stable")
    times, workers = times[order], workers[order]
    place = np.searchsorted(times, steps["granted_ns"], "right") - 1
    posted_ns = times[np.maximum(place, 0)]
    is_within = (place >= 0) & (posted_ns > steps["pushed_ns"])
    return np.where(is_within, workers[np.maximum(place, 0)], _NOBODY), posted_ns


def _slowest(posts: list[Times], ends_ns: list[int], worker: int, steps: Lines) -> _Causes:
    """The live worker with the fewest pushes at the beginning of the wait; of several, the one that posts next last."""
    begin_ns = steps["pushed_ns"]
    fewest = np.searchsorted(posts[worker], begin_ns, "right")  # a worker that is not behind is no cause
    cause, next_ns = np.full(len(steps), _NOBODY), np.zeros(len(steps), np.int64)
    for other, times in enumerate(posts):
        if other == worker or not len(times):
            continue
        count = np.searchsorted(times, begin_ns, "right")
        after_ns = np.append(times, _NEVER)[count]
        is_live = begin_ns <= ends_ns[other]
        is_tied = (count == fewest) & (cause != _NOBODY) & (after_ns > next_ns)
        is_worse = is_live & ((count < fewest) | is_tied)
        fewest, cause = np.where(is_worse, count, fewest), np.where(is_worse, other, cause)
        next_ns = np.where(is_worse, after_ns, next_ns)
    return cause, next_ns


def _completions(trace: Trace) -> Lines:
    kind = np.dtype([("version", "<i8"), ("posted_ns", "<i8"), ("worker", "<i8")])
    pushes = trace.pushes[(trace.pushes["fate"] == FOLDED) & (trace.pushes["shard"] == 0)]
    found = np.zeros(len(pushes), kind)
    found["version"], found["worker"] = pushes["version"], pushes["worker"]
    for worker in np.unique(pushes["worker"]):
        mine, steps = pushes["worker"] == worker, trace.steps_of(int(worker))
        found["posted_ns"][mine] = _at(steps, pushes["step"][mine], "posted_ns", 0)
    found = np.sort(found, order=["version", "posted_ns"])
    is_last = np.append(np.diff(found["version"]) > 0, True)
    last: Lines = found[is_last[: len(found)]]
    return last


def _last_of_version(trace: Trace, completed: Lines, worker: int, steps: Lines) -> _Causes:
    """The last post of the version that the worker's push is part of."""
    pushes = trace.pushes[(trace.pushes["worker"] == worker) & (trace.pushes["shard"] == 0) & (trace.pushes["fate"] == FOLDED)]
    version = _at(pushes, steps["step"], "version", -1)
    place = np.minimum(np.searchsorted(completed["version"], version), max(0, len(completed) - 1))
    if not len(completed):
        return np.full(len(steps), _NOBODY), np.zeros(len(steps), np.int64)
    is_known = completed["version"][place] == version
    return np.where(is_known, completed["worker"][place], _NOBODY), completed["posted_ns"][place]


def _at(lines: Lines, steps: Times, name: str, missing: int) -> Times:
    if not len(lines):
        return np.full(len(steps), missing)
    place = np.minimum(np.searchsorted(lines["step"], steps), len(lines) - 1)
    found: Times = np.where(lines["step"][place] == steps, lines[name][place], missing)
    return found
