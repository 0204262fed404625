"""What torch.profiler exported in a worker (export_chrome_trace), on the clock of the run's trace.

Times in torch's file are Unix times: `baseTimeNanoseconds`, and microseconds from there on. A trace has the machine's monotonic
clock, and for each worker what the Unix time was ahead of it at the worker's begin and at its end. The two differ if the wall
clock was set meanwhile, which states the error.
"""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastps.tracing.file import Trace, TraceError
from fastps.tracing.merging import nodes_of

Event = dict[str, Any]


@dataclass(frozen=True)
class Profile:
    """One file of torch's profiler."""

    file: Path  # where it was
    worker: int  # the worker that recorded it
    base_ns: int  # the time of its microsecond 0 on the clock of the trace
    error_ns: int  # how far the wall clock moved against the trace's clock during the run
    found: list[Event]  # its events

    @property
    def line(self) -> str:
        """What was added, in a sentence."""
        return f"{len(self.found):,} events of torch in worker {self.worker}, clock ± {self.error_ns / 1e6:.2f} ms: {self.file}"

    def events(self, origin_ns: int, first_process: int) -> Iterator[Event]:
        """The events in microseconds from `origin_ns`; processes and flows have numbers that no other file has."""
        shift_us = (self.base_ns - origin_ns) / 1e3
        numbers: dict[Any, int] = {}
        for event in self.found:
            process = numbers.setdefault(event.get("pid"), first_process + len(numbers))
            moved = {**event, "pid": process}
            if "ts" in event:
                moved["ts"] = float(event["ts"]) + shift_us
            if "id" in event:
                moved["id"] = f"{first_process}/{event['id']}"
            told = event.get("args")
            if event.get("ph") == "M" and event.get("name") == "process_name" and isinstance(told, dict) and "name" in told:
                moved["args"] = {"name": f"worker {self.worker}, torch: {told['name']}"}
            elif event.get("ph") == "M" and event.get("name") == "process_sort_index":
                moved["args"] = {"sort_index": process}
            yield moved


def profile_of(file: Path, trace: Trace) -> Profile:
    """Read torch's file and find its worker by the number of its process. Raises TraceError."""
    document = _read(file)
    found = document["traceEvents"]
    workers = _workers_of({event.get("pid") for event in found}, str(document.get("host_name", "")), trace)
    if len(workers) != 1:
        known = ", ".join(str(note.get("process_id")) for note in trace.header["of_worker"].values())
        raise TraceError(
            f"--with {file}: expected what torch.profiler exported in one worker of this run, whose processes are {known};"
            f" found {len(workers)} of them in it"
        )
    note: Mapping[str, Any] = trace.header["of_worker"][str(workers[0])]
    begin_ns, end_ns = note.get("unix_offset_ns"), note.get("unix_offset_end_ns")
    if begin_ns is None:
        raise TraceError(f"--with {file}: expected a trace that knows the Unix time, found an older one; record it again")
    node = next((each for each in nodes_of(trace) if 0 <= workers[0] - each.first_worker < each.workers), None)
    base_ns = int(document["baseTimeNanoseconds"]) - int(begin_ns) + (node.offset_ns if node is not None else 0)
    error_ns = abs(int(end_ns) - int(begin_ns)) if end_ns is not None else 0
    return Profile(file, workers[0], base_ns, error_ns + (node.error_ns if node is not None else 0), found)


def _workers_of(processes: set[Any], host: str, trace: Trace) -> list[int]:
    """The workers whose processes are among these; of several nodes those on this host, if any is."""
    workers = [int(rank) for rank, note in trace.header["of_worker"].items() if note.get("process_id") in processes]
    hosts = {each.first_worker + place: each.host for each in nodes_of(trace) for place in range(each.workers)}
    return [worker for worker in workers if hosts.get(worker) == host] or workers


def _read(file: Path) -> dict[str, Any]:
    try:
        data = file.read_bytes()
        document = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except OSError as error:
        raise TraceError(f"--with {file}: cannot be read: {error}") from None
    except (ValueError, EOFError, zlib.error, RecursionError) as error:
        raise TraceError(f"--with {file}: expected the JSON of torch.profiler's export_chrome_trace, found: {error}") from None
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(events, list) or not all(map(_is_event, events)):
        raise TraceError(f"--with {file}: expected the JSON of torch.profiler's export_chrome_trace, found another document")
    if not isinstance(document.get("baseTimeNanoseconds"), int):
        raise TraceError(f"--with {file}: expected baseTimeNanoseconds in torch's file, found none: use a newer torch")
    return dict(document)


def _is_event(event: Any) -> bool:
    """Whether this is an event whose process and time can be changed; both may be absent."""
    if not isinstance(event, dict):
        return False
    return isinstance(event.get("pid"), int | str | None) and isinstance(event.get("ts", 0), int | float)
