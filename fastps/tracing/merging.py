"""Traces of several nodes as one, on node 0's clock.

Each node's trace has samples of the offset of its clock to node 0's, with a bound of the error of each. Between two samples the
offset is linear. The merged trace numbers workers as the job does, states the error of each node's times, and is a trace like
any other.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fastps.system.clock_offset import Offset, Times, offsets_at
from fastps.tracing.file import PUSH_POSTED, PUSH_SENT, WEIGHTS_SENT, WEIGHTS_TAKEN, Lines, Trace, TraceError

_STEP_TIMES = ("begin_ns", "computed_ns", "posted_ns", "pushed_ns", "granted_ns", "end_ns")
_MESSAGE_TIMES = ("begin_ns", "end_ns")
_EQUAL = ("sync", "policy", "parameters", "slots")


@dataclass(frozen=True)
class NodeOfTrace:
    """One node in a trace."""

    node: int  # its number
    host: str  # its machine's name
    first_worker: int  # the first of its workers, by the numbers in this trace
    workers: int
    first_shard: int  # the first of its arena's shards, by the numbers in this trace
    shards: int
    offset_ns: int = 0  # node 0's clock less the node's, at the beginning of the trace
    error_ns: int = 0  # the largest error of a time of the node on node 0's clock


@dataclass(frozen=True)
class Flow:
    """A message in a merged trace: the place of its record by the sender among the trace's messages, and by the receiver."""

    sent: int
    taken: int


def nodes_of(trace: Trace) -> list[NodeOfTrace]:
    """The nodes in a trace; none in a job of one node."""
    if "of_nodes" in trace.header:
        return [NodeOfTrace(**each) for each in trace.header["of_nodes"]]
    if "node" in trace.header:
        about = trace.header["node"]
        return [NodeOfTrace(about["node"], about["host"], 0, trace.workers, 0, int(trace.header["shards"]))]
    return []


def merge_nodes(traces: Sequence[tuple[Path, Trace]]) -> Trace:
    """Merge the traces of nodes of one job. Raises TraceError, which names the file that does not fit."""
    ordered = sorted(((_number(file, trace), file, trace) for file, trace in traces), key=lambda each: each[0])
    for (number, file, trace), (other, other_file, other_trace) in pairwise(ordered):
        if number == other:
            raise TraceError(f"expected traces of different nodes, found two of node {number}: {file} and {other_file}")
        _check_alike(file, trace, other_file, other_trace)
    moved, about = [], []
    workers = shards = 0
    for number, file, trace in ordered:
        found, node = _moved(file, trace, number, workers, shards)
        moved.append(found)
        about.append(node)
        workers, shards = workers + node.workers, shards + node.shards
    header = _header([trace for _, _, trace in ordered], about)
    tables = {
        name: np.concatenate([getattr(each, name) for each in moved]) for name in ("steps", "pushes", "messages", "clock")
    }
    return Trace(header, **tables)


def _number(file: Path, trace: Trace) -> int:
    if "node" not in trace.header:
        raise TraceError(f"expected the trace of a node of a job of several, found one of another kind: {file}")
    return int(trace.header["node"]["node"])


def _check_alike(file: Path, trace: Trace, other_file: Path, other: Trace) -> None:
    jobs = [re.sub(r"\.node\d+", "", str(each.header.get("job")), count=1) for each in (trace, other)]
    differs = jobs[0] != jobs[1] or any(trace.header.get(name) != other.header.get(name) for name in _EQUAL)
    if differs:
        raise TraceError(f"expected traces of one job, found {file} of job {jobs[0]} and {other_file} of job {jobs[1]}")


def _moved(file: Path, trace: Trace, number: int, worker: int, shard: int) -> tuple[Trace, NodeOfTrace]:
    """A node's trace on node 0's clock, with its workers and shards numbered from these on."""
    samples = [
        Offset(int(each["at_ns"]), int(each["offset_ns"]), int(each["error_ns"]), int(each["round_trip_ns"]))
        for each in trace.clock
    ]
    if not samples:
        raise TraceError(
            f"expected the offset of node {number}'s clock to node 0's, found none in {file}: the node was in the job for less"
            " than two beats, or its agent could not write"
        )
    worst = 0

    def shift(lines: Lines, names: Sequence[str], missing: int) -> None:
        nonlocal worst
        for name in names:
            known = lines[name] != missing
            if known.any():
                offsets, errors = _offsets(samples, lines[name][known], number)
                lines[name][known] += offsets
                worst = max(worst, int(errors.max()))

    steps, pushes, messages, clock = (np.array(table) for table in (trace.steps, trace.pushes, trace.messages, trace.clock))
    shift(steps, _STEP_TIMES, 0)
    shift(pushes, ("decided_ns",), -1)
    shift(messages, _MESSAGE_TIMES, 0)
    for table in (steps, pushes):
        table["worker"] += worker
    pushes["shard"] += shard
    first_ns = int(trace.steps["begin_ns"].min()) if len(trace.steps) else samples[0].at_ns
    offset_ns = int(_offsets(samples, np.array([first_ns]), number)[0][0])
    node = NodeOfTrace(
        number, str(trace.header["node"]["host"]), worker, trace.workers, shard, int(trace.header["shards"]), offset_ns, worst
    )
    return Trace(trace.header, steps, pushes, messages, clock), node


def _offsets(samples: Sequence[Offset], times: Times, number: int) -> tuple[Times, Times]:
    if number == 0:  # its own clock, which does not drift
        return np.zeros(len(times), np.int64), np.zeros(len(times), np.int64)
    return offsets_at(samples, times)


def _header(traces: Sequence[Trace], nodes: Sequence[NodeOfTrace]) -> Mapping[str, Any]:
    headers = [trace.header for trace in traces]
    found = {name: value for name, value in headers[0].items() if name not in ("node", "committed", "versions")}
    found["job"] = re.sub(r"\.node\d+", "", str(found["job"]), count=1)
    found["workers"] = sum(node.workers for node in nodes)
    found["shards"] = sum(node.shards for node in nodes)
    firsts = [node.first_worker for node in nodes]
    for name in ("recorded", "unfinished"):
        found[name] = [first + rank for first, header in zip(firsts, headers, strict=True) for rank in header[name]]
    found["of_worker"] = {
        str(first + int(rank)): _note_at(note, node.offset_ns)
        for first, header, node in zip(firsts, headers, nodes, strict=True)
        for rank, note in header["of_worker"].items()
    }
    if all("committed" in header and "versions" in header for header in headers):
        found["versions"] = [version for header in headers for version in header["versions"]]
        found["committed"] = {
            name: [count for header in headers for count in header["committed"][name]] for name in ("folded", "dropped")
        }
    return {**found, "of_nodes": [asdict(node) for node in nodes]}


def _note_at(note: Mapping[str, Any] | None, offset_ns: int) -> Mapping[str, Any] | None:
    """A worker's note with its begin, and the times that the launcher saw, moved to node 0's clock."""
    if not note:
        return note
    moved = dict(note)
    if note.get("began_ns"):
        moved["began_ns"] = note["began_ns"] + offset_ns
    if note.get("end"):
        moved["end"] = {**note["end"], "at_ns": note["end"]["at_ns"] + offset_ns}
    if note.get("stops"):
        moved["stops"] = [(begin_ns + offset_ns, end_ns + offset_ns) for begin_ns, end_ns in note["stops"]]
    return moved


def flows(trace: Trace) -> list[Flow]:
    """The messages that both sides recorded, in order of their sending. A step that was sent again is left out."""
    found = []
    for sent, taken in ((PUSH_SENT, PUSH_POSTED), (WEIGHTS_SENT, WEIGHTS_TAKEN)):
        left, right = _places(trace.messages, sent, "node", "peer"), _places(trace.messages, taken, "peer", "node")
        found += [Flow(left[key], right[key]) for key in left.keys() & right.keys() if left[key] >= 0 <= right[key]]
    return sorted(found, key=lambda flow: int(trace.messages["begin_ns"][flow.sent]))


def _places(messages: Lines, kind: int, sender: str, receiver: str) -> dict[tuple[int, int, int], int]:
    """The place of each message of a kind, by sender, receiver and step; -1 where there are several."""
    found: dict[tuple[int, int, int], int] = {}
    for place in np.flatnonzero(messages["kind"] == kind):
        line = messages[place]
        key = int(line[sender]), int(line[receiver]), int(line["step"])
        found[key] = -1 if key in found else int(place)
    return found


def before_it_was_sent(trace: Trace) -> list[tuple[Flow, int]]:
    """The messages that were taken before they were sent, by more than the errors of the clocks, and by how many ns."""
    errors = {node.node: node.error_ns for node in nodes_of(trace)}
    begin, nodes = trace.messages["begin_ns"], trace.messages["node"]
    found = []
    for flow in flows(trace):
        early_ns = int(begin[flow.sent]) - int(begin[flow.taken])
        if early_ns > errors[int(nodes[flow.sent])] + errors[int(nodes[flow.taken])]:
            found.append((flow, early_ns))
    return found
