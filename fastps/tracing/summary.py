"""Summaries of a trace: a row for each worker, and one for the whole run."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fastps.tracing.file import DROPPED, FOLDED, Lines, Trace

Row = dict[str, Any]
_FIRST_STEPS = 2  # of a worker
_LEAST_STEPS = 5  # of which a median is worth comparing


def blocked_ns(steps: Lines) -> npt.NDArray[np.int64]:
    """Return the time that each step waited without needing a core.

    If the machine does not tell how long threads waited for a core, the worker with the smallest share of lost time is assumed
    to have lost it to the cores alone, and the others the same amount per processor time.
    """
    lost_ns = (steps["computed_ns"] - steps["begin_ns"] - steps["cpu_ns"]).astype(np.float64)
    if (steps["queue_ns"] >= 0).all():
        queued_ns = steps["queue_ns"].astype(np.float64)
    else:
        workers = np.unique(steps["worker"])
        of = [steps["worker"] == worker for worker in workers]
        queued_ns = steps["cpu_ns"] * min(lost_ns[lines].sum() / max(1, steps["cpu_ns"][lines].sum()) for lines in of)
    found_ns: npt.NDArray[np.int64] = np.maximum(0, lost_ns - queued_ns).astype(np.int64)
    return found_ns


def folded_rows(trace: Trace) -> Lines:
    """Return the records of rows whose push was folded."""

    def key(lines: Lines) -> npt.NDArray[np.int64]:
        found: npt.NDArray[np.int64] = (
            lines["position"] * int(trace.header["shards"]) + lines["shard"]
        ) * trace.workers + lines["worker"]
        return found

    found: Lines = trace.rows[np.isin(key(trace.rows), key(trace.pushes[trace.pushes["fate"] == FOLDED]))]
    return found


def summary_row(trace: Trace) -> Row:
    """Summarize the whole run: speed, staleness, waiting, drops."""
    steps = len(trace.steps)
    seconds = int(trace.steps["computed_ns"].max() - trace.steps["begin_ns"].min()) / 1e9 if steps else 0.0  # to the last push
    folded = trace.pushes[trace.pushes["fate"] == FOLDED]
    waited, total = _waiting(trace.steps)
    return {
        "sync": trace.header["sync"],
        "workers": trace.workers,
        "shards": trace.header["shards"],
        "seconds": seconds,
        "steps": steps,
        "steps_per_s": steps / seconds if seconds else 0.0,
        "staleness_mean": float(folded["staleness"].mean()) if len(folded) else 0.0,
        "staleness_max": int(folded["staleness"].max(initial=0)),
        "wait_share": waited / max(1, total),
        "dropped": int((trace.pushes["fate"] == DROPPED).sum()),
        "recorded": list(trace.header["recorded"]),
        "unfinished": list(trace.header["unfinished"]),
        **_rows_of(trace, trace.rows, steps),
    }


def worker_rows(trace: Trace) -> list[Row]:
    """Return a row for each worker: the time of its steps' parts, in ms, and the outcomes of its pushes."""
    return [_worker_row(trace, worker) for worker in range(trace.workers)]


def _worker_row(trace: Trace, worker: int) -> Row:
    steps = trace.steps_of(worker)
    pushes = trace.pushes[trace.pushes["worker"] == worker]
    folded = pushes[pushes["fate"] == FOLDED]
    waited, total = _waiting(steps)
    wall_ns = steps["computed_ns"] - steps["begin_ns"]
    return {
        "worker": worker,
        "steps": len(steps),
        "compute_ms_mean": _mean_ms(wall_ns),
        "compute_ms_median": float(np.median(wall_ns)) / 1e6 if len(steps) else 0.0,
        "compute_ms_p95": float(np.percentile(wall_ns, 95)) / 1e6 if len(steps) else 0.0,
        "cpu_ms_mean": _mean_ms(steps["cpu_ns"]),
        "queue_ms_mean": _mean_ms(np.maximum(steps["queue_ns"], 0)) if (steps["queue_ns"] >= 0).all() else None,
        "blocked_ms_mean": _mean_ms(blocked_ns(steps)),
        "store_cpu_ms_mean": _mean_ms(steps["store_cpu_ns"]),
        "transfer_ms_mean": _mean_ms(steps["push_transfer_ns"] + steps["pull_transfer_ns"]),
        "wait_share": waited / max(1, total),
        "staleness_mean": float(folded["staleness"].mean()) if len(folded) else 0.0,
        "staleness_max": int(folded["staleness"].max(initial=0)),
        "dropped": int((pushes["fate"] == DROPPED).sum()),
        **_rows_of(trace, trace.rows[trace.rows["worker"] == worker], len(steps)),
    }


def _rows_of(trace: Trace, rows: Lines, steps: int) -> Row:
    if not len(trace.rows):
        return {}
    folded = folded_rows(replace(trace, rows=rows))
    pushed = int(rows["rows"].sum())
    return {"rows_pushed": pushed, "rows_folded": int(folded["rows"].sum()), "rows_per_step": pushed / max(1, steps)}


def pace_rows(trace: Trace) -> list[Row]:
    """Return for each worker with enough steps its median computing time, and that of all others' steps meanwhile.

    The first steps are left out, because they include one-time costs. A worker is compared with the others while it was there,
    so that one that was lost early is not compared with their later steps.
    """
    steps = [trace.steps_of(worker)[_FIRST_STEPS:] for worker in range(trace.workers)]
    rows = []
    for worker, mine in enumerate(steps):
        if len(mine) < _LEAST_STEPS:
            continue
        begin_ns, end_ns = mine["begin_ns"][0], mine["computed_ns"][-1]
        beside = [
            (theirs["computed_ns"] - theirs["begin_ns"])[(theirs["computed_ns"] >= begin_ns) & (theirs["begin_ns"] <= end_ns)]
            for other, theirs in enumerate(steps)
            if other != worker
        ]
        others_ns = np.concatenate(beside) if beside else np.empty(0)
        if len(others_ns) >= _LEAST_STEPS:
            own, theirs_ns = float(np.median(mine["computed_ns"] - mine["begin_ns"])), float(np.median(others_ns))
            rows.append({"worker": worker, "ms": own / 1e6, "others_ms": theirs_ns / 1e6, "factor": own / max(1.0, theirs_ns)})
    return rows


def time_rows(trace: Trace) -> list[Row]:
    """Return for each worker the ms of its recorded time that went to each part; they add up to it.

    Parts are "core" (computing on a core), "queue" (ready to, without a core), "blocked", "store" (push, fold and pull) and
    "waiting". Where the machine does not tell how long threads waited for a core, "queue" is None, and is part of "blocked".
    """
    return [_time_row(trace.steps_of(worker)) for worker in range(trace.workers)]


def _time_row(steps: Lines) -> Row:
    wall_ns, core_ns = int((steps["computed_ns"] - steps["begin_ns"]).sum()), int(steps["cpu_ns"].sum())
    is_known = bool((steps["queue_ns"] >= 0).all())
    queue_ns = int(steps["queue_ns"].sum()) if is_known else 0
    whole = steps[steps["end_ns"] > 0]
    store_ns = int(((whole["pushed_ns"] - whole["computed_ns"]) + (whole["end_ns"] - whole["granted_ns"])).sum())
    return {
        "core": core_ns / 1e6,
        "queue": queue_ns / 1e6 if is_known else None,
        "blocked": max(0, wall_ns - core_ns - queue_ns) / 1e6,
        "store": store_ns / 1e6,
        "waiting": _waiting(steps)[0] / 1e6,
    }


def _waiting(steps: Lines) -> tuple[int, int]:
    """Return the time of steps in which their workers neither computed nor pushed nor pulled, and their total time, in ns."""
    whole = steps[steps["end_ns"] > 0]
    return int((whole["granted_ns"] - whole["pushed_ns"]).sum()), int((whole["end_ns"] - whole["begin_ns"]).sum())


def _mean_ms(durations_ns: npt.NDArray[Any]) -> float:
    return float(durations_ns.mean()) / 1e6 if len(durations_ns) else 0.0
