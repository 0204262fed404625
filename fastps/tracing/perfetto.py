"""Export of a trace as Chrome trace events, for ui.perfetto.dev and chrome://tracing.

Trace Event Format (Google, 2016): complete events "X" for a worker's activities, instant events "i" for drops, "X" of length 0
for updates, flows "s" and "f" from a push to its update, counters "C" for staleness. Times are in microseconds from the first
step's beginning. In a job of several nodes each node is a process of its own, with tracks of the messages to each other node.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastps.tracing.file import DROPPED, FOLDED, MESSAGES, OUTCOMES, UNDECIDED, Lines, Trace, TraceError
from fastps.tracing.merging import NodeOfTrace, flows, nodes_of
from fastps.tracing.torch_profile import Profile

Event = dict[str, Any]
Place = dict[str, int]
_WORKERS, _SHARDS = 1, 2  # the two "processes" of a job of one node
_FIRST_NODE = 10  # the process of node 0
_FIRST_PROFILE, _PROFILE_STRIDE = 1_000_000, 1_000  # the processes of torch's profiles
_FIRST_SHARD, _FIRST_MESSAGE = 100_000, 200_000  # the tracks of a node's process


class _Places:
    def __init__(self, trace: Trace) -> None:
        self.nodes = nodes_of(trace)

    def worker(self, worker: int) -> Place:
        node = next((each for each in self.nodes if 0 <= worker - each.first_worker < each.workers), None)
        return {"pid": _WORKERS if node is None else _FIRST_NODE + node.node, "tid": worker}

    def shard(self, shard: int) -> Place:
        node = next((each for each in self.nodes if 0 <= shard - each.first_shard < each.shards), None)
        if node is None:
            return {"pid": _SHARDS, "tid": shard}
        return {"pid": _FIRST_NODE + node.node, "tid": _FIRST_SHARD + shard}

    def message(self, line: Any) -> Place:
        track = len(MESSAGES) * int(line["peer"]) + int(line["kind"])
        return {"pid": _FIRST_NODE + int(line["node"]), "tid": _FIRST_MESSAGE + track}


def events(trace: Trace) -> Iterator[Event]:
    """Yield the events: names first, then each track's events in order of time."""
    places = _Places(trace)
    yield from _names(trace, places)
    if not len(trace.steps):
        return
    origin_ns = origin_of(trace)
    for worker in range(trace.workers):
        yield from _worker_events(trace, worker, origin_ns, places)
    for shard in range(int(trace.header["shards"])):
        yield from _shard_events(trace, shard, origin_ns, places)
    yield from _message_events(trace, origin_ns, places)


def origin_of(trace: Trace) -> int:
    """The time that is 0 in the viewer: when the first step began."""
    return int(trace.steps["begin_ns"].min()) if len(trace.steps) else 0


def save(trace: Trace, file: Path, profiles: Sequence[Profile] = ()) -> int:
    """Write the events as JSON, with those of torch's profiles on one clock, and return their number. Raises TraceError."""
    found = list(events(trace))
    for number, profile in enumerate(profiles):
        found += profile.events(origin_of(trace), _FIRST_PROFILE + _PROFILE_STRIDE * number)
    document = {"traceEvents": found, "displayTimeUnit": "ms", "otherData": {"sync": trace.header["sync"]}}
    try:
        file.write_text(json.dumps(document, separators=(",", ":")))
    except OSError as error:
        raise TraceError(f"--perfetto {file}: cannot be written: {error}") from None
    return len(found)


def _names(trace: Trace, places: _Places) -> Iterator[Event]:
    if places.nodes:
        for node in places.nodes:
            pid = _FIRST_NODE + node.node
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": _title(trace, node)}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": node.node}}
    else:
        title = f"workers ({trace.header['sync']})"
        for process, name in ((_WORKERS, title), (_SHARDS, "shards")):
            yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
    for worker in range(trace.workers):
        yield {"ph": "M", "name": "thread_name", **places.worker(worker), "args": {"name": f"worker {worker}"}}
    for shard in range(int(trace.header["shards"])):
        yield {"ph": "M", "name": "thread_name", **places.shard(shard), "args": {"name": f"shard {shard}"}}
    _, firsts = np.unique(trace.messages[["node", "peer", "kind"]], return_index=True)
    for first in firsts:
        line = trace.messages[int(first)]
        name = f"node {line['peer']}: {MESSAGES[int(line['kind'])]}"
        yield {"ph": "M", "name": "thread_name", **places.message(line), "args": {"name": name}}


def _title(trace: Trace, node: NodeOfTrace) -> str:
    error = f", clock ± {node.error_ns / 1e6:.2f} ms" if node.error_ns else ""
    return f"node {node.node}, {node.host} ({trace.header['sync']} within{error})"


def _message_events(trace: Trace, origin_ns: int, places: _Places) -> Iterator[Event]:
    for number in range(len(trace.messages)):
        line = trace.messages[number]
        begin_us, end_us = ((int(line[name]) - origin_ns) / 1e3 for name in ("begin_ns", "end_ns"))
        name, place = MESSAGES[int(line["kind"])], places.message(line)
        what = {"step": int(line["step"]), "node": int(line["peer"])}
        yield {"ph": "X", "name": name, "cat": "node", **place, "ts": begin_us, "dur": end_us - begin_us, "args": what}
    for number, flow in enumerate(flows(trace)):
        sent, taken = trace.messages[flow.sent], trace.messages[flow.taken]
        same = {"cat": "node", "name": MESSAGES[int(sent["kind"])].removeprefix("send "), "id": f"message {number}"}
        sent_us, taken_us = ((int(line["begin_ns"]) - origin_ns) / 1e3 for line in (sent, taken))
        yield {"ph": "s", **places.message(sent), "ts": sent_us, **same}
        yield {"ph": "f", "bp": "e", **places.message(taken), "ts": taken_us, **same}


def _worker_events(trace: Trace, worker: int, origin_ns: int, places: _Places) -> Iterator[Event]:
    of_worker, pushes = trace.rows[trace.rows["worker"] == worker], trace.pushes[trace.pushes["worker"] == worker]
    place, rows = places.worker(worker), _rows_by("step", of_worker, pushes)
    for record in trace.steps_of(worker):
        step, read = int(record["step"]), int(record["read_version"])
        cpu = {"cpu_ms": int(record["cpu_ns"]) / 1e6, "queue_ms": int(record["queue_ns"]) / 1e6}
        yield _span("compute", place, record["begin_ns"], record["computed_ns"], origin_ns, step=step, read_version=read, **cpu)
        more = {"rows": rows[step]} if step in rows else {}
        yield _span("push", place, record["computed_ns"], record["pushed_ns"], origin_ns, step=step, **more)
        if record["end_ns"]:
            yield _span("wait", place, record["pushed_ns"], record["granted_ns"], origin_ns, step=step)
            yield _span("pull", place, record["granted_ns"], record["end_ns"], origin_ns, step=step)


def _rows_by(name: str, rows: Lines, pushes: Lines) -> Mapping[int, int]:
    """How many of these rows of tables the pushes of each step or version (`name`) had together; empty without tables."""
    number_of = {(worker, position): number for worker, position, number in pushes[["worker", "position", name]].tolist()}
    found: Counter[int] = Counter()
    for worker, position, count in rows[["worker", "position", "rows"]].tolist():
        if (worker, position) in number_of:
            found[number_of[worker, position]] += count
    return found


def _span(name: str, place: Place, begin_ns: Any, end_ns: Any, origin_ns: int, **arguments: Any) -> Event:
    begin_us, end_us = (int(begin_ns) - origin_ns) / 1e3, (int(end_ns) - origin_ns) / 1e3
    length_us = max(0.0, end_us - begin_us)
    return {"ph": "X", "name": name, "cat": "worker", **place, "ts": begin_us, "dur": length_us, "args": arguments}


def _shard_events(trace: Trace, shard: int, origin_ns: int, places: _Places) -> Iterator[Event]:
    records = trace.pushes[(trace.pushes["shard"] == shard) & (trace.pushes["fate"] != UNDECIDED)]
    of_shard, folded = trace.rows[trace.rows["shard"] == shard], records[records["fate"] == FOLDED]
    last_version, track, rows = -1, places.shard(shard), _rows_by("version", of_shard, folded)
    steps_of = [trace.steps_of(worker) for worker in range(trace.workers)]
    for record in records[np.argsort(records["decided_ns"], kind="stable")]:
        worker, step, version = int(record["worker"]), int(record["step"]), int(record["version"])
        decided_us = (int(record["decided_ns"]) - origin_ns) / 1e3
        here = {"cat": "shard", **track, "ts": decided_us}
        if record["fate"] != FOLDED:
            arguments = {"worker": worker, "step": step, "fate": OUTCOMES[int(record["fate"])]}
            what = "drop" if record["fate"] == DROPPED else "rejection"
            yield {"ph": "i", "s": "t", "name": f"{what} of worker {worker}", **here, "args": arguments}
            continue
        if version != last_version:
            more = {"rows": rows[version]} if version in rows else {}
            yield {"ph": "X", "name": f"version {version}", "dur": 0, **here, "args": {"version": version, **more}}
            last_version = version
        of_worker = steps_of[worker]
        place = np.searchsorted(of_worker["step"], step)
        if place < len(of_worker):
            number = (worker * int(trace.header["shards"]) + shard) << 40 | step
            begin_us = (int(of_worker["computed_ns"][place]) - origin_ns) / 1e3
            flow = {"cat": "push", "name": "push", "id": number}
            yield {"ph": "s", **places.worker(worker), "ts": begin_us, **flow}
            yield {"ph": "f", "bp": "e", **track, "ts": decided_us, **flow}
        staleness = {"staleness": int(record["staleness"])}
        yield {"ph": "C", "name": f"staleness of shard {shard}", **track, "ts": decided_us, "args": staleness}
