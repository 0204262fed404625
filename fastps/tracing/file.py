"""The trace file of a recorded run: a JSON header, then tables of steps, pushes and rows, and of messages and clocks of nodes.

Layout, all little endian: the 16 bytes of `MAGIC`; uint64: bytes of the header; the header in JSON, padded with spaces to a
multiple of 64 bytes; the tables one after the other, each as described in `header["tables"]`; uint32: the CRC-32 of all bytes
before, if `header["checksum"]` says so, as an older trace does not. numpy reads the tables without a copy.
"""

import json
import math
import signal
import stat
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastps.errors import Error
from fastps.system.whole_file import replacing

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
        ("push_transfer_ns", "<i8"),  # injected transfers, waiting for the link included
        ("pull_transfer_ns", "<i8"),
        ("read_version", "<i8"),  # oldest version of the shards that were pulled for the gradient
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
        ("read_version", "<i8"),  # oldest version of the shards that were pulled for the gradient
        ("version", "<i8"),  # folded, rejected: the version it is part of; dropped: that it was too late for; undecided: -1
        ("decided_ns", "<i8"),  # time of the event that decided; undecided: -1
        ("staleness", "<i4"),  # folded, rejected: versions of this shard between read and fold
        ("worker", "<i2"),
        ("shard", "<i2"),
        ("fate", "u1"),
        ("written", "u1"),  # 1, and written last
    ]
)
FOLDED, DROPPED, UNDECIDED, REJECTED = range(4)  # the last: it was not finite, and its version has nothing of it
OUTCOMES = ("folded", "dropped", "undecided", "rejected")

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

# What a replay needs, in the three tables that follow. A job that cannot be replayed has none of them; its header says why.

# A record of one event that a combiner gave a shard's scheduler. Its commit published all events of the commit, in their order.
EVENT_DTYPE = np.dtype(
    [
        ("at_ns", "<i8"),  # the scheduler's time: that of the event, or of an earlier one that came later
        ("commit", "<i8"),  # of the shard, from 2; each has a number more than the one before
        ("position", "<i8"),  # of the worker's descriptor, from 0; of a change: that of its next descriptor; -1: none
        ("version", "<i8"),  # of the shard, once this commit is published
        ("worker", "<i2"),  # that posted it or that changed, or -1
        ("shard", "<i2"),
        ("order", "<u2"),  # within the commit, from 0
        ("kind", "u1"),
        ("written", "u1"),  # 1, and written last
    ]
)
EVENT_PUSH, EVENT_NULL, EVENT_LEAVE, EVENT_TIMER = range(4)
EVENT_DEATH, EVENT_EXPULSION, EVENT_JOIN = range(4, 7)  # older traces have 4 for each, without its worker

# A record of what one push was computed with in one shard, and what it was.
INPUT_DTYPE = np.dtype(
    [
        ("position", "<i8"),  # of the push, as in its record
        ("version", "<i8"),  # of the shard that the gradient was computed with
        ("timestamp", "<i8"),  # the version that its descriptor named
        ("sample", "<u4"),  # CRC-32 of at most 1024 words of the gradient in all shards, evenly spaced; 0 without a gradient
        ("worker", "<i2"),
        ("shard", "<i2"),
        ("written", "u1"),  # 1, and written last
    ]
)

# A record of the weights of one published version of one shard.
CHECKSUM_DTYPE = np.dtype(
    [
        ("version", "<i8"),
        ("checksum", "<u4"),  # CRC-32 of the shard's parameters in order
        ("shard", "<i2"),
        ("written", "u1"),  # 1, and written last
    ]
)

# In the order of the file. What was added later comes last: an older fastps reads what it knows, and leaves the rest.
DTYPES = {"steps": STEP_DTYPE, "pushes": PUSH_DTYPE, "messages": MESSAGE_DTYPE, "clock": CLOCK_DTYPE, "rows": ROWS_DTYPE}
DTYPES |= {"events": EVENT_DTYPE, "inputs": INPUT_DTYPE, "checksums": CHECKSUM_DTYPE}
_NEEDED = ("steps", "pushes")  # an older trace, or one of another job, lacks some of the others
_OF_A_REPLAY = ("events", "inputs", "checksums")  # the last ones
_WRITTEN = (*_NEEDED, "messages", "clock")  # even without a record
Lines = npt.NDArray[np.void]


class TraceError(Error, ValueError):
    """A file is not a trace, is damaged, or cannot be written."""


@dataclass(frozen=True)
class Trace:
    """A recorded run."""

    header: Mapping[str, Any]  # what the recorders say of the job: "sync", "workers", "shards" and more
    steps: Lines  # records of STEP_DTYPE, by worker, then step
    pushes: Lines  # records of PUSH_DTYPE, by worker, then position, then shard
    # Records of MESSAGE_DTYPE; none in a job of one node.
    messages: Lines = field(default_factory=lambda: np.empty(0, MESSAGE_DTYPE))
    clock: Lines = field(default_factory=lambda: np.empty(0, CLOCK_DTYPE))  # records of CLOCK_DTYPE; none in a job of one node
    # Records of ROWS_DTYPE, by worker, then position, then shard; none in a job without tables.
    rows: Lines = field(default_factory=lambda: np.empty(0, ROWS_DTYPE))
    # Records of EVENT_DTYPE, INPUT_DTYPE and CHECKSUM_DTYPE, in no order; none in a job that cannot be replayed.
    events: Lines = field(default_factory=lambda: np.empty(0, EVENT_DTYPE))
    inputs: Lines = field(default_factory=lambda: np.empty(0, INPUT_DTYPE))
    checksums: Lines = field(default_factory=lambda: np.empty(0, CHECKSUM_DTYPE))

    @property
    def workers(self) -> int:
        """Workers of the job, recorded or not."""
        return int(self.header["workers"])

    @property
    def notes(self) -> list[Mapping[str, Any]]:
        """What is known of each recorded worker, if anything is."""
        return [note for note in self.header["of_worker"].values() if note]

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
    tables = {name: getattr(trace, name) for name in DTYPES}
    tables = {name: lines for name, lines in tables.items() if len(lines) or name in _WRITTEN}
    described = {name: {"lines": len(lines), "dtype": _described(DTYPES[name])} for name, lines in tables.items()}
    text = json.dumps({**trace.header, "checksum": "crc32", "tables": described}).encode()
    text += b" " * (-(len(MAGIC) + 8 + len(text)) % _ALIGNMENT)
    try:
        with replacing(file) as stream:
            checksum = 0
            contents = (np.ascontiguousarray(lines, DTYPES[name]).tobytes() for name, lines in tables.items())
            for data in (MAGIC + len(text).to_bytes(8, "little") + text, *contents):
                stream.write(data)
                checksum = zlib.crc32(data, checksum)
            stream.write(checksum.to_bytes(4, "little"))
    except OSError as error:
        raise TraceError(f"the trace {file} cannot be written: {error}; choose another file") from None


def read(file: Path) -> Trace:
    """Read a trace file. Raises TraceError, which says what is wrong with the file."""
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # a device may have no end, and a pipe no writer
            raise TraceError(f"expected a trace that --trace wrote, found no regular file: {file}")
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
        for name, dtype in DTYPES.items():
            if name not in _NEEDED and name not in header["tables"]:
                continue
            described = header["tables"][name]
            if described["dtype"] != _described(dtype):
                if name in _OF_A_REPLAY:  # of another version: the run can be looked at, and not be played again
                    header["replay"] = {"against": f"recorded by another fastps ({header.get('version', '?')})"}
                    break
                raise ValueError(f"records of another layout in {name!r}")
            if (count := int(described["lines"])) < 0:
                raise ValueError(f"{count} records in {name!r}")
            tables[name] = np.frombuffer(data, dtype, count, offset)
            offset += count * dtype.itemsize
        header.pop("tables")
        # Of all but the last bytes, also behind the tables that are known: a later fastps may write more.
        if header.pop("checksum", None) and data[-4:] != zlib.crc32(memoryview(data)[:-4]).to_bytes(4, "little"):
            raise ValueError("its checksum differs")
        check_header(header)
        found = Trace(header, **tables)
        _check_numbers(found)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise TraceError(f"the trace {file} is damaged or from another version of fastps: {error}; record it again") from None
    return found


def _check_numbers(trace: Trace) -> None:
    """Check that all records are of the job's workers and shards. An event's worker may be none."""
    for name, dtype in DTYPES.items():
        lines = getattr(trace, name)
        for column, most in (("worker", trace.header["workers"]), ("shard", trace.header["shards"])):
            if not len(lines) or column not in (dtype.names or ()) or (name, column) == ("events", "worker"):
                continue
            if not (int(lines[column].min()) >= 0 and int(lines[column].max()) < most):
                raise ValueError(f"a record of {column} {int(lines[column].max())} of {most}")


def _described(dtype: "np.dtype[np.void]") -> list[list[str]]:
    return [[str(name), str(kind)] for name, kind, *_ in dtype.descr]


_COUNTS = [int]
_NOTE = {  # about a worker
    "began_ns?": int,
    "process_id?": int,
    "transfer_ns?": int,
    "loss?": float,
    "failure?": str,
    "stops?": [[int]],
    "end?": {"exit_code?": int, "at_ns?": int},
    "load?": {"now_ns": float, "machine_ns": float, "thread_ns": float},
}
_NODE = {"node": int, "host": str}
_SIZES = {"workers?": int, "lanes?": int}  # workers at the beginning
_SCRIPT = {"name": str, "digest": str, "arguments": [str]}
_SHAPE = {
    "workers": int,
    "shards": int,
    "sync": str,
    "job?": str,
    "version?": str,
    "spins": int,
    "parameters?": int,
    "model_bytes?": int,
    "slots?": int,
    "machine": {"cores": float},
    "policy": {"fold": str, "spec?": str, "grant?": str, "bound?": str, "low?": float, "high?": float},
    "recorded": _COUNTS,
    "unfinished": _COUNTS,
    "versions?": _COUNTS,
    "committed?": {"folded": _COUNTS, "dropped": _COUNTS, "rows?": _COUNTS},
    "of_worker": {"*": _NOTE},
    "owners?": [_COUNTS],
    "node?": _NODE,
    "of_nodes?": [_NODE],
    "weights?": _COUNTS,
    "replay?": {"against": str, "model?": str, "nonfinite?": str, "threads?": str, "script?": _SCRIPT, **_SIZES},
}


def check_header(header: Mapping[str, Any]) -> None:
    """Raise ValueError for a header that no trace has. Looks at all that a reader uses: a trace may come from anybody."""
    _check(header, _SHAPE, "header")
    workers, shards = header["workers"], header["shards"]
    if not (1 <= workers <= 1 << 15 and 1 <= shards <= 1 << 15):
        raise ValueError(f"{workers} workers and {shards} shards")
    if len(header.get("versions") or range(shards)) != shards:
        raise ValueError(f"versions of {len(header['versions'])} shards of {shards}")
    for note in header["of_worker"].values():
        code = ((note or {}).get("end") or {}).get("exit_code") or 0
        if -code >= signal.NSIG:
            raise ValueError(f"a worker ended by signal {-code}")
        if any(len(stop) != 2 for stop in (note or {}).get("stops") or ()):
            raise ValueError("a stop without a begin and an end")


def _check(value: Any, shape: Any, name: str) -> None:
    """Check a JSON value. A key that ends with "?" may be absent, null or empty; "*" is any key, of such a value."""
    if isinstance(shape, list):
        _expect(isinstance(value, list), name, "a list", value)
        for each in value:
            _check(each, shape[0], name)
    elif isinstance(shape, dict):
        _expect(isinstance(value, dict), name, "an object", value)
        for key, inner in ((key, shape["*"]) for key in value) if "*" in shape else ((key, shape[key]) for key in shape):
            found = value.get(key.removesuffix("?"))
            if found not in (None, {}) or not (key.endswith("?") or "*" in shape):
                _check(found, inner, f"{name}.{key.removesuffix('?')}")
    elif shape is str:
        _expect(isinstance(value, str), name, "a text", value)
    else:
        kinds = int if shape is int else (int, float)
        is_number = isinstance(value, kinds) and not isinstance(value, bool) and abs(value) < 1 << 63 and not math.isnan(value)
        _expect(is_number, name, "a number", value)


def _expect(is_right: bool, name: str, what: str, found: Any) -> None:
    if not is_right:
        raise ValueError(f"expected {what} as {name}, found {found!r:.80}")
