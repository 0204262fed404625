"""A trace as Chrome trace events, which ui.perfetto.dev and chrome://tracing open. Refuses to summarize.

Trace Event Format (Google, 2016): complete events "X" for what a worker does, instant events "i" for drops, "X" of no length
for updates, flows "s" and "f" from a push to the update that it is part of, counters "C" for staleness. Times are in
microseconds from the first step's beginning.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fastps.tracing.file import DROPPED, FATES, FOLDED, Trace, TraceError

Event = dict[str, Any]
_WORKERS, _SHARDS = 1, 2  # the two "processes"


def events(trace: Trace) -> Iterator[Event]:
    """The events, names first, and each track's in order of time."""
    yield from _names(trace)
    if not len(trace.steps):
        return
    origin_ns = int(trace.steps["begin_ns"].min())
    for worker in range(trace.workers):
        yield from _worker_events(trace, worker, origin_ns)
    for shard in range(int(trace.header["shards"])):
        yield from _shard_events(trace, shard, origin_ns)


def save(trace: Trace, file: Path) -> int:
    """Write the events as JSON; returns how many there are. Raises TraceError."""
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
    for line in trace.steps_of(worker):
        step, read = int(line["step"]), int(line["read_version"])
        cpu = {"cpu_ms": int(line["cpu_ns"]) / 1e6, "queue_ms": int(line["queue_ns"]) / 1e6}
        yield _span("compute", worker, line["begin_ns"], line["computed_ns"], origin_ns, step=step, read_version=read, **cpu)
        yield _span("push", worker, line["computed_ns"], line["pushed_ns"], origin_ns, step=step)
        if line["end_ns"]:
            yield _span("wait", worker, line["pushed_ns"], line["granted_ns"], origin_ns, step=step)
            yield _span("pull", worker, line["granted_ns"], line["end_ns"], origin_ns, step=step)


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
    lines = trace.pushes[(trace.pushes["shard"] == shard) & (trace.pushes["fate"] <= DROPPED)]
    last_version = -1
    steps_of = [trace.steps_of(worker) for worker in range(trace.workers)]
    for line in lines[np.argsort(lines["decided_ns"], kind="stable")]:
        worker, step, version = int(line["worker"]), int(line["step"]), int(line["version"])
        decided_us = (int(line["decided_ns"]) - origin_ns) / 1e3
        here = {"cat": "shard", "pid": _SHARDS, "tid": shard, "ts": decided_us}
        if line["fate"] != FOLDED:
            arguments = {"worker": worker, "step": step, "fate": FATES[int(line["fate"])]}
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
        staleness = {"staleness": int(line["staleness"])}
        yield {
            "ph": "C",
            "name": f"staleness of shard {shard}",
            "pid": _SHARDS,
            "tid": shard,
            "ts": decided_us,
            "args": staleness,
        }
