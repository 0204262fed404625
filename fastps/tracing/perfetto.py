"""Export of a trace as Chrome trace events, for ui.perfetto.dev and chrome://tracing.

Trace Event Format (Google, 2016): complete events "X" for a worker's activities, instant events "i" for drops, "X" of length 0
for updates, flows "s" and "f" from a push to its update, counters "C" for staleness. Times are in microseconds from the first
step's beginning.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fastps.tracing.file import DROPPED, FOLDED, OUTCOMES, Trace, TraceError

Event = dict[str, Any]
_WORKERS, _SHARDS = 1, 2  # the two "processes"


def events(trace: Trace) -> Iterator[Event]:
    """Yield the events: names first, then each track's events in order of time."""
    yield from _names(trace)
    if not len(trace.steps):
        return
    origin_ns = int(trace.steps["begin_ns"].min())
    for worker in range(trace.workers):
        yield from _worker_events(trace, worker, origin_ns)
    for shard in range(int(trace.header["shards"])):
        yield from _shard_events(trace, shard, origin_ns)


def save(trace: Trace, file: Path) -> int:
    """Write the events as JSON and return their number. Raises TraceError."""
    found = list(events(trace))
    document = {"traceEvents": found, "displayTimeUnit": "ms", "otherData": {"sync": trace.header["sync"]}}
    try:
        file.write_text(json.dumps(document, separators=(",", ":")))
    except OSError as error:
        raise TraceError(f"--perfetto {file}: cannot be written: {error}") from None
    return len(found)


def _names(trace: Trace) -> Iterator[Event]:
    title = f"workers ({trace.header['sync']})"
    for process, name in ((_WORKERS, title), (_SHARDS, "shards")):
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
    for worker in range(trace.workers):
        yield {"ph": "M", "name": "thread_name", "pid": _WORKERS, "tid": worker, "args": {"name": f"worker {worker}"}}
    for shard in range(int(trace.header["shards"])):
        yield {"ph": "M", "name": "thread_name", "pid": _SHARDS, "tid": shard, "args": {"name": f"shard {shard}"}}


def _worker_events(trace: Trace, worker: int, origin_ns: int) -> Iterator[Event]:
    for record in trace.steps_of(worker):
        step, read = int(record["step"]), int(record["read_version"])
        cpu = {"cpu_ms": int(record["cpu_ns"]) / 1e6, "queue_ms": int(record["queue_ns"]) / 1e6}
        yield _span(
            "compute", worker, record["begin_ns"], record["computed_ns"], origin_ns, step=step, read_version=read, **cpu
        )
        yield _span("push", worker, record["computed_ns"], record["pushed_ns"], origin_ns, step=step)
        if record["end_ns"]:
            yield _span("wait", worker, record["pushed_ns"], record["granted_ns"], origin_ns, step=step)
            yield _span("pull", worker, record["granted_ns"], record["end_ns"], origin_ns, step=step)


def _span(name: str, worker: int, begin_ns: Any, end_ns: Any, origin_ns: int, **arguments: Any) -> Event:
    begin_us, end_us = (int(begin_ns) - origin_ns) / 1e3, (int(end_ns) - origin_ns) / 1e3
    return {
        "ph": "X",
        "name": name,
        "cat": "worker",
        "pid": _WORKERS,
        "tid": worker,
        "ts": begin_us,
        "dur": max(0.0, end_us - begin_us),
        "args": arguments,
    }


def _shard_events(trace: Trace, shard: int, origin_ns: int) -> Iterator[Event]:
    records = trace.pushes[(trace.pushes["shard"] == shard) & (trace.pushes["fate"] <= DROPPED)]
    last_version = -1
    steps_of = [trace.steps_of(worker) for worker in range(trace.workers)]
    for record in records[np.argsort(records["decided_ns"], kind="stable")]:
        worker, step, version = int(record["worker"]), int(record["step"]), int(record["version"])
        decided_us = (int(record["decided_ns"]) - origin_ns) / 1e3
        here = {"cat": "shard", "pid": _SHARDS, "tid": shard, "ts": decided_us}
        if record["fate"] != FOLDED:
            arguments = {"worker": worker, "step": step, "fate": OUTCOMES[int(record["fate"])]}
            yield {"ph": "i", "s": "t", "name": f"drop of worker {worker}", **here, "args": arguments}
            continue
        if version != last_version:
            yield {"ph": "X", "name": f"version {version}", "dur": 0, **here, "args": {"version": version}}
            last_version = version
        of_worker = steps_of[worker]
        place = np.searchsorted(of_worker["step"], step)
        if place < len(of_worker):
            number = (worker * int(trace.header["shards"]) + shard) << 40 | step
            begin_us = (int(of_worker["computed_ns"][place]) - origin_ns) / 1e3
            flow = {"cat": "push", "name": "push", "id": number}
            yield {"ph": "s", "pid": _WORKERS, "tid": worker, "ts": begin_us, **flow}
            yield {"ph": "f", "bp": "e", "pid": _SHARDS, "tid": shard, "ts": decided_us, **flow}
        staleness = {"staleness": int(record["staleness"])}
        yield {
            "ph": "C",
            "name": f"staleness of shard {shard}",
            "pid": _SHARDS,
            "tid": shard,
            "ts": decided_us,
            "args": staleness,
        }
