"""The trace file of a recorded run: a JSON header, then tables of steps, pushes and rows, and of messages and clocks of nodes.

Layout, all little endian: the 16 bytes of `MAGIC`; uint64: bytes of the header; the header in JSON, padded with spaces to a
multiple of 64 bytes; the tables one after the other, each as described in `header["tables"]`. numpy reads them without a copy.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastps.errors import Error

MAGIC = b"fastps-trace-v1\n"
_ALIGNMENT = 64
_LONGEST_HEADER = 1 << 26

# A record of one step of one worker. Times are in ns on the machine's monotonic clock, durations in ns.
STEP_DTYPE = np.dtype(
    [
        ("begin_ns", "<i8"),  # weights arrived, computing begins
        ("computed_ns", "<i8"),  # gradient ready, the push begins
        ("posted_ns", "<i8"),  # its descriptor is posted
        ("pushed_ns", "<i8"),  # the push returned; with overlap before its post
        ("granted_ns", "<i8"),  # the next step is granted
        ("end_ns", "<i8"),  # the next weights arrived
        ("cpu_ns", "<i8"),  # processor time of the worker's thread while it computed
        ("queue_ns", "<i8"),  # time in which that thread was runnable but had no core; -1: unknown
        ("store_cpu_ns", "<i8"),  # processor time of the worker's thread from computed_ns to end_ns
        ("push_transfer_ns", "<i8"),  # injected transfers (transfers.py), waiting for the link included
        ("pull_transfer_ns", "<i8"),
        ("read_version", "<i8"),  # newest version of any shard that the gradient was computed with
        ("step", "<i8"),  # of the worker, from 0
        ("samples", "<i4"),  # 0: never told
        ("worker", "<i2"),
        ("null", "u1"),  # a step without a gradient
        ("written", "u1"),  # 1, and written last
    ]
)

# A record of one push's outcome in one shard.
PUSH_DTYPE = np.dtype(
    [
        ("position", "<i8"),  # of the worker's descriptors, from 0
        ("step", "<i8"),
        ("read_version", "<i8"),  # newest version of any shard that the gradient was computed with
        ("version", "<i8"),  # folded: the version it is part of; dropped: the version it was too late for; undecided: -1
        ("decided_ns", "<i8"),  # time of the event that decided; undecided: -1
        ("staleness", "<i4"),  # folded: versions of this shard between read and fold
        ("worker", "<i2"),
        ("shard", "<i2"),
        ("fate", "u1"),
        ("written", "u1"),  # 1, and written last
    ]
)
FOLDED, DROPPED, UNDECIDED = 0, 1, 2
OUTCOMES = ("folded", "dropped", "undecided")

# A record of one message between two nodes, as one of their agents saw it.
MESSAGE_DTYPE = np.dtype(
    [
        ("begin_ns", "<i8"),  # sent: before its header leaves; taken: after its header has come
        ("end_ns", "<i8"),  # sent: its last float was sent; taken: its last float has come, or its last part is posted
        ("step", "<i8"),  # of the leaf's lane at the home, from 1; weights: the step that they answer, 0 for none
        ("node", "<i2"),  # that recorded it
        ("peer", "<i2"),  # the other node
        ("kind", "u1"),
        ("written", "u1"),  # 1, and written last
    ]
)
PUSH_SENT, PUSH_POSTED, WEIGHTS_SENT, WEIGHTS_TAKEN = 0, 1, 2, 3  # by the leaf, the home, the home, the leaf
MESSAGES = ("send push", "post push", "send weights", "take weights")

# A record of what a node knew of node 0's clock. In node 0's own trace all differences are 0.
CLOCK_DTYPE = np.dtype(
    [
        ("at_ns", "<i8"),  # by the node's own clock
        ("offset_ns", "<i8"),  # node 0's clock less the node's
        ("error_ns", "<i8"),  # the bound of the error
        ("round_trip_ns", "<i8"),
        ("node", "<i2"),
        ("written", "u1"),  # 1, and written last
    ]
)

# A record of the rows of tables that one push had in one shard. Only a job with tables has them.
ROWS_DTYPE = np.dtype(
    [
        ("position", "<i8"),  # of the push, as in its record
        ("rows", "<i8"),
        ("worker", "<i2"),
        ("shard", "<i2"),
        ("written", "u1"),  # 1, and written last
    ]
)
# In the order of the file. What was added later comes last: an older fastps reads what it knows, and leaves the rest.
_DTYPES = {"steps": STEP_DTYPE, "pushes": PUSH_DTYPE, "messages": MESSAGE_DTYPE, "clock": CLOCK_DTYPE, "rows": ROWS_DTYPE}
_OPTIONAL = ("messages", "clock", "rows")  # an older trace lacks some, and one of a job without tables the last
Lines = npt.NDArray[np.void]


class TraceError(Error, ValueError):
    """A file is not a trace, is damaged, or cannot be written."""


@dataclass(frozen=True)
class Trace:
    """A recorded run.

    Attributes:
        header: what recording.py says of the job; "sync", "workers", "shards" and more.
        steps: records of STEP_DTYPE, by worker, then step.
        pushes: records of PUSH_DTYPE, by worker, then position, then shard.
        messages: records of MESSAGE_DTYPE; none in a job of one node.
        clock: records of CLOCK_DTYPE; none in a job of one node.
        rows: records of ROWS_DTYPE, by worker, then position, then shard; none in a job without tables.
    """

    header: Mapping[str, Any]
    steps: Lines
    pushes: Lines
    messages: Lines = field(default_factory=lambda: np.empty(0, MESSAGE_DTYPE))
    clock: Lines = field(default_factory=lambda: np.empty(0, CLOCK_DTYPE))
    rows: Lines = field(default_factory=lambda: np.empty(0, ROWS_DTYPE))

    @property
    def workers(self) -> int:
        """Workers of the job, recorded or not."""
        return int(self.header["workers"])

    def steps_of(self, worker: int) -> Lines:
        """Return one worker's steps."""
        return self._steps_by_worker.get(worker, self.steps[:0])

    @cached_property
    def _steps_by_worker(self) -> dict[int, Lines]:
        """Each worker's steps, without a copy where the records are in order. Readers ask for them often."""
        workers, steps = self.steps["worker"], self.steps
        if (np.diff(workers) < 0).any():
            steps = steps[np.argsort(workers, kind="stable")]
        numbers, firsts = np.unique(steps["worker"], return_index=True)
        return (
            {int(number): part for number, part in zip(numbers, np.split(steps, firsts[1:]), strict=True)} if len(steps) else {}
        )


def write(trace: Trace, file: Path) -> None:
    """Write a trace atomically. Raises TraceError."""
    tables = {"steps": trace.steps, "pushes": trace.pushes, "messages": trace.messages, "clock": trace.clock}
    tables |= {"rows": trace.rows} if len(trace.rows) else {}
    described = {name: {"lines": len(lines), "dtype": _described(_DTYPES[name])} for name, lines in tables.items()}
    text = json.dumps({**trace.header, "tables": described}).encode()
    text += b" " * (-(len(MAGIC) + 8 + len(text)) % _ALIGNMENT)
    unfinished = file.with_name(f"{file.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("wb") as stream:
            stream.write(MAGIC + len(text).to_bytes(8, "little") + text)
            for name, lines in tables.items():
                stream.write(np.ascontiguousarray(lines, _DTYPES[name]).tobytes())
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.replace(file)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise TraceError(f"the trace {file} cannot be written: {error}; choose another file") from None


def read(file: Path) -> Trace:
    """Read a trace file. Raises TraceError, which says what is wrong with the file."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise TraceError(f"expected a trace that --trace wrote, found {file}: {error.strerror}") from None
    begin = len(MAGIC) + 8
    if data[: len(MAGIC)] != MAGIC or len(data) < begin:
        raise TraceError(f"expected a trace that --trace wrote, found another file: {file}")
    length = int.from_bytes(data[len(MAGIC) : begin], "little")
    try:
        if length > _LONGEST_HEADER:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(data[begin : begin + length])
        offset = begin + length
        tables = {}
        for name, dtype in _DTYPES.items():
            if name in _OPTIONAL and name not in header["tables"]:
                tables[name] = np.empty(0, dtype)
                continue
            described = header["tables"][name]
            if described["dtype"] != _described(dtype):
                raise ValueError(f"records of another layout in {name!r}")
            count = int(described["lines"])
            tables[name] = np.frombuffer(data, dtype, count, offset)
            offset += count * dtype.itemsize
        header.pop("tables")
        found = Trace(header, **tables)
        _check_header(found)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(f"the trace {file} is damaged or from another version of fastps: {error}; record it again") from None
    return found


def _check_header(trace: Trace) -> None:
    """Check what readers rely on: the numbers of workers and shards, and records of these only."""
    workers, shards = int(trace.header["workers"]), int(trace.header["shards"])
    if not (1 <= workers <= 1 << 15 and 1 <= shards <= 1 << 15):
        raise ValueError(f"{workers} workers and {shards} shards")
    for name in ("sync", "policy", "recorded", "unfinished", "of_worker", "spins"):
        trace.header[name]
    float(trace.header["machine"]["cores"])
    for lines, name, most in (
        (trace.steps, "worker", workers),
        (trace.pushes, "worker", workers),
        (trace.pushes, "shard", shards),
        (trace.rows, "worker", workers),
        (trace.rows, "shard", shards),
    ):
        if len(lines) and not (int(lines[name].min()) >= 0 and int(lines[name].max()) < most):
            raise ValueError(f"a record of {name} {int(lines[name].max())} of {most}")


def _described(dtype: "np.dtype[np.void]") -> list[list[str]]:
    return [[str(name), str(kind)] for name, kind, *_ in dtype.descr]
