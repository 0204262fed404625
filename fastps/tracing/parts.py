"""The parts of a trace during a run: each worker writes its own records into a folder beside the file; the last worker merges.

A part is a mapped file, so that records outlive their process: kill -9 loses only the step in progress and steps whose pushes
were not decided yet. A machine that goes down loses what its kernel has not written. Each part has one writer, so a step takes
no lock.
"""

import contextlib
import fcntl
import hashlib
import itertools
import json
import logging
import mmap
import os
import re
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fastps.job import limits
from fastps.kernels.shm.arena import LANE_DEAD, OUTCOME_DROPPED, OUTCOME_REJECTED, Arena
from fastps.membership.job_memory import JobMemory
from fastps.membership.peers import WORKER_PRESENT
from fastps.system.time_limit import locked
from fastps.tracing.file import DROPPED, DTYPES, FOLDED, REJECTED, UNDECIDED, Lines, Trace, TraceError, read, write

logger = logging.getLogger("fastps.trace")

AGENT = "agent"  # the name of the files of a node's agent, where those of workers have their ranks
CHUNK_LINES = 4096  # a chunk of either kind is a whole number of pages
_SUFFIX = ".parts"
_CODES = {"<i8": "q", "<i4": "i", "<u4": "I", "<i2": "h", "<u2": "H", "|u1": "B"}
FOR_REPLAY = ("inputs", "checksums")
_FATES = {OUTCOME_DROPPED: DROPPED, OUTCOME_REJECTED: REJECTED}
_CLOCKS = ("process_id", "unix_offset_ns", "unix_offset_end_ns")  # which place the times of other recordings
_OF_WORKER = ("finished", "began_ns", "transfer_ns", "posted", "failure", "load", "loss", *_CLOCKS)


def folder_of(file: Path, store: JobMemory) -> Path:
    """Return the folder of a job's parts, beside the trace; one an arena, so that an earlier crash's are never mixed in."""
    return file.with_name(f"{_begin_of(file, store.job)}-{os.fstat(store.descriptor).st_ino}{_SUFFIX}")


def _begin_of(file: Path, job: str) -> str:
    return f"{file.name}.{hashlib.sha256(job.encode()).hexdigest()[:12]}"


def folders_of(file: Path, job: str | None = None) -> list[Path]:
    """Return the folders with unmerged parts of this trace, or of one job's, the newest last."""
    begin = rf"{re.escape(file.name)}\.[0-9a-f]{{12}}" if job is None else re.escape(_begin_of(file, job))
    own, found = re.compile(rf"{begin}-\d+{re.escape(_SUFFIX)}"), []
    for folder in file.parent.glob(f"*{_SUFFIX}"):
        if own.fullmatch(folder.name):  # run.trace.1 has folders of its own
            with contextlib.suppress(FileNotFoundError):  # merged meanwhile
                found.append((folder.stat().st_mtime, folder))
    return [folder for _, folder in sorted(found)]


def numbered(file: Path, number: int) -> Path:
    """Return the file of a process's first, second, ... job.

    >>> numbered(Path("run.trace"), 0).name, numbered(Path("run.trace"), 1).name
    ('run.trace', 'run-1.trace')
    """
    return file.with_stem(f"{file.stem}-{number}") if number else file


def of_node(file: Path, node: int) -> Path:
    """Return the file of one node, in a job of several.

    >>> of_node(Path("run.trace"), 1).name
    'run.node1.trace'
    """
    return file.with_stem(f"{file.stem}.node{node}")


def finish(file: Path, job: str, since_ns: int) -> list[Path]:
    """Merge the parts that dead workers left, after all of a launch's workers have ended. Returns the launch's traces in order.

    Its workers began after the Unix time `since_ns`. A node's agent that still serves other nodes merges parts when it ends.
    """
    found: list[Path] = []
    for number in itertools.count():
        own, name = numbered(file, number), f"{job}.{number}" if number else job
        left = folders_of(own, name)[-1:]  # a node that was lost and started again has an older one
        if not left and not own.exists():
            break
        is_written = any(merge(folder, own, partial(_is_left, folder, since_ns)) for folder in left)
        with contextlib.suppress(TraceError):
            if is_written or _are_since(read(own).notes, since_ns):
                found.append(own)
    return found


def _is_left(folder: Path, since_ns: int, notes: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the parts that workers with these notes left are ready to be merged; see `finish`."""
    return _are_since(notes, since_ns) and not agent_runs(folder)


def _are_since(notes: Sequence[Mapping[str, Any]], since_ns: int) -> bool:
    """Whether all workers with these notes began after a Unix time, in ns."""
    return all((note.get("began_ns") or 0) + (note.get("unix_offset_ns") or 0) >= since_ns for note in notes)


def end(file: Path, job: str, notes: Mapping[int, Mapping[str, Any]], since_ns: int) -> None:
    """Finish a launch's traces, and add notes on workers to them. A warning tells if that fails: the job is over."""
    try:
        annotate(finish(file, job, since_ns), notes)
    except (TraceError, OSError) as error:
        logger.warning("%s; the records of the trace stay beside %s", error, file)


def annotate(files: Sequence[Path], notes: Mapping[int, Mapping[str, Any]]) -> None:
    """Add notes on workers, by their ranks, to a launch's traces. Raises TraceError.

    An end is of every trace that the worker had not finished, otherwise of the last one that has the worker. A stop is of every
    trace in whose time it lies.
    """
    traces = {file: read(file) for file in files} if notes else {}
    added: dict[Path, dict[str, Any]] = {file: {} for file in traces}
    for rank, note in notes.items():
        notes_of = {file: trace.header["of_worker"] for file, trace in traces.items()}
        known = {file: own[f"{rank}"] or {} for file, own in notes_of.items() if f"{rank}" in own}
        unfinished = [file for file, own in known.items() if not own.get("finished")] or list(known)[-1:]
        for file, own in known.items():
            more = {"end": note["end"]} if "end" in note and file in unfinished else {}
            if stops := [stop for stop in note.get("stops", ()) if _is_beside(stop, own, traces[file])]:
                more["stops"] = stops
            if more:
                added[file][f"{rank}"] = {**own, **more}
    for file, trace in traces.items():
        if added[file]:
            write(replace(trace, header={**trace.header, "of_worker": {**trace.header["of_worker"], **added[file]}}), file)


def _is_beside(stop: Sequence[int], note: Mapping[str, Any], trace: Trace) -> bool:
    """Whether a stop of a worker, of which the trace has this note, lies in the trace's time."""
    return bool((note.get("began_ns") or 0) < stop[1] and stop[0] < trace.steps["end_ns"].max(initial=0))


def agent_runs(folder: Path) -> bool:
    """Return whether the agent that writes a part into this folder still runs. It holds a lock until it ends."""
    try:
        with (folder / f"{AGENT}.note").open("rb") as note:
            fcntl.flock(note, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def merge_if_over(folder: Path, file: Path, arena: Arena, more: Callable[[], Mapping[str, Any]] = dict) -> None:
    """Write the trace if all of the job's writers have finished, or no other one is left to finish. `more` is for its header.

    If that fails, on a full disk say, the records stay, and a warning names their folder: the job is over.
    """

    def is_over(notes: list[dict[str, Any]]) -> bool:
        members = arena.members()
        others_run = any(state in WORKER_PRESENT for _, state in members)
        owners = {(lane, generation) for lane, (generation, state) in enumerate(members) if state != LANE_DEAD}
        unfinished = [(note["rank"], note.get("generation", 0)) for note in notes if not note["finished"]]
        if not notes or not owners.isdisjoint(unfinished) or agent_runs(folder):
            return False
        return not others_run or (len(notes) == arena.lanes and not unfinished)

    def complete(found: Trace) -> Trace:
        """Add the combiners' own counts of commits, for comparison with the records."""
        complete_outcomes(arena, found.pushes)
        counters = [arena.counters(lane) for lane in range(arena.lanes)]
        names = ("folded", "dropped", *(["rows"] if arena.n_tables else []))
        committed = {name: [count[name] for count in counters] for name in names}  # type: ignore[literal-required]
        versions = [arena.shard_version(shard) for shard in range(arena.shards)]
        return replace(found, header={**found.header, "committed": committed, "versions": versions, **more()})

    try:
        merge(folder, file, is_over, complete)
    except (TraceError, OSError) as error:
        logger.warning("%s; its records stay in %s", error, folder)


def outcome_of(arena: Arena, worker: int, shard: int, position: int) -> tuple[int, int, int, int]:
    """Return the version, the time, the staleness and the fate of a push, as the combiner wrote them before its commit."""
    found = arena.push_outcomes(worker, shard, position, position + 1)
    if not found or found[0] is None:
        return -1, -1, 0, UNDECIDED
    kind, version, decided_ns, staleness = found[0]
    return version, decided_ns, staleness, _FATES.get(kind, FOLDED)


def complete_outcomes(arena: Arena, pushes: Lines) -> None:
    """Complete the outcomes of pushes that other workers decided after their own worker's end."""
    for index in (pushes["fate"] == UNDECIDED).nonzero()[0]:
        line = pushes[index]
        outcome = outcome_of(arena, int(line["worker"]), int(line["shard"]), int(line["position"]))
        line["version"], line["decided_ns"], line["staleness"], line["fate"] = outcome


def load(file: Path) -> Trace:
    """Read a trace, or parts: a folder of them, or those of its last job if they are newer. Raises TraceError."""
    for folder in [file] if file.is_dir() else folders_of(file)[-1:]:
        with _locked(folder) as there:
            if there and not (file.is_file() and file.stat().st_mtime >= folder.stat().st_mtime):
                return _gathered(folder, _notes_of(folder))
    return read(file)


class PartTable:
    """One worker's records of one kind, appended to a mapped file that grows by chunks."""

    def __init__(self, file: Path, dtype: "np.dtype[np.void]") -> None:
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        # struct writes a record in two thirds of numpy's time.
        self._form = struct.Struct("<" + "".join(_CODES[field[0].str] for field in (dtype.fields or {}).values()))
        self._chunks = 0
        self._used = CHUNK_LINES
        self._memory: mmap.mmap | None = None

    def append(self, record: tuple[Any, ...]) -> None:
        """Write one record; its last field, `written`, is 1."""
        if self._used == CHUNK_LINES or self._memory is None:
            self._memory = self._grow()
        self._form.pack_into(self._memory, self._used * self._form.size, *record)
        self._used += 1

    def _grow(self) -> mmap.mmap:
        size = CHUNK_LINES * self._form.size
        try:
            # Allocate: on a full disk, a write into a hole of a mapped file would end the process by a signal.
            os.posix_fallocate(self._descriptor, self._chunks * size, size)
        except OSError as error:
            raise TraceError(f"the trace's records cannot be written: {error}; make room, or choose another file") from None
        memory = mmap.mmap(self._descriptor, size, offset=self._chunks * size)
        self._chunks += 1
        self._used = 0
        return memory

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._memory = None


class Part:
    """One worker's part: its steps, its pushes, further tables by name, and a note about itself.

    A lane's later owners, of a higher generation, have parts of their own.
    """

    def __init__(self, folder: Path, rank: int, note: dict[str, Any], more: Sequence[str] = (), generation: int = 0) -> None:
        self.folder, self.name = folder, f"{rank}-{generation}" if generation else f"{rank}"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            self.steps, self.pushes = (PartTable(folder / f"{self.name}.{name}", DTYPES[name]) for name in ("steps", "pushes"))
            self.more = {name: PartTable(folder / f"{self.name}.{name}", DTYPES[name]) for name in more}
            self._note = {**note, "rank": rank, "generation": generation}
            self._write_note(finished=False)
        except OSError as error:
            raise TraceError(f"the trace's records cannot be written to {folder}: {error}; choose another file") from None

    def finish(self, **more: Any) -> None:
        """Close the tables, and mark the part as finished; `more` is added to the note. Raises OSError on a full disk."""
        self.close()
        self._note.update(more)
        with contextlib.suppress(FileNotFoundError):  # the folder was removed: there is nothing to finish
            self._write_note(finished=True)

    def close(self) -> None:
        """Close the tables. What they have stays readable as the part of an unfinished worker."""
        for table in (self.steps, self.pushes, *self.more.values()):
            table.close()

    def _write_note(self, *, finished: bool) -> None:
        file = self.folder / f"{self.name}.json"
        unfinished = file.with_suffix(".unfinished")
        unfinished.write_text(json.dumps({**self._note, "finished": finished}))
        unfinished.replace(file)


def _notes_of(folder: Path) -> list[dict[str, Any]]:
    """Return the workers' notes by rank, then generation. The caller must hold the folder's lock: a merge removes them."""
    return [_note_in(file, {"rank", "job", "finished"}) for file in _files_of(folder, "json")]


def _note_in(file: Path, names: Set[str]) -> dict[str, Any]:
    """The note of a worker or of an agent, which has these names. Raises TraceError."""
    try:
        note: dict[str, Any] = json.loads(file.read_text())
    except ValueError as error:  # a machine that goes down may leave it empty
        raise TraceError(f"expected a note in {file}, found none: {error}; remove it to read the records of others") from None
    if not isinstance(note, dict) or not note.keys() >= names:
        raise TraceError(f"expected the parts of a trace in {file.parent}, found {file.name} of something else there")
    return note


def _files_of(folder: Path, name: str) -> list[Path]:
    """The files of one kind, by worker and generation, then those of others."""
    return sorted(folder.glob(f"*.{name}"), key=_writer_of)


def _writer_of(file: Path) -> tuple[int, int, str]:
    """A worker's rank and generation; behind them all others."""
    rank, _, generation = file.name.partition(".")[0].partition("-")
    return (int(rank), int(generation or 0), file.name) if rank.isdecimal() else (sys.maxsize, 0, file.name)


def merge(
    folder: Path,
    file: Path,
    when: Callable[[list[dict[str, Any]]], bool],
    complete: Callable[[Trace], Trace] = lambda found: found,
) -> bool:
    """Merge the folder's parts into the trace and remove the folder; return False if it is gone or `when` says no.

    `when` decides by the workers' notes; `complete` may add what the parts do not have. Raises TraceError.
    """
    with _locked(folder) as there:
        if not there:
            return False
        notes = _notes_of(folder)
        if not when(notes):
            return False
        write(complete(_gathered(folder, notes)), file)
        for part in folder.iterdir():
            part.unlink()
        folder.rmdir()
    return True


def _gathered(folder: Path, notes: list[dict[str, Any]]) -> Trace:
    """Build a trace of the folder's parts, also of a running or crashed job. Raises TraceError."""
    if not notes:
        raise TraceError(f"expected parts of a trace in {folder}, found none")
    owners = [(note["rank"], note.get("generation", 0), note.get("position", 0)) for note in notes]
    tables = {}
    for name, dtype in DTYPES.items():
        if parts := {_writer_of(file): _complete(file, dtype) for file in _files_of(folder, name)}:
            kept = (_posted(part, writer, owners) if name == "inputs" else part for writer, part in parts.items())
            tables[name] = np.concatenate(list(kept))
    ranks = sorted({note["rank"] for note in notes})
    header = {
        **notes[0]["job"],  # the same in all workers' notes
        "workers": max(notes[0]["job"]["workers"], *(rank + 1 for rank in ranks)),  # and those that joined
        "recorded": ranks,
        "unfinished": sorted({note["rank"] for note in notes if not note["finished"]}),
        "of_worker": {str(note["rank"]): {key: note.get(key) for key in _OF_WORKER} for note in notes},  # the last owner's
        "owners": [owner for owner in owners if owner[1]],  # the later ones
    }
    agent = folder / f"{AGENT}.note"
    if agent.exists():
        header["node"] = _note_in(agent, {"node", "nodes", "host"})
    return Trace(header, **tables)


def _posted(inputs: Lines, writer: tuple[int, int, str], owners: Sequence[tuple[int, int, int]]) -> Lines:
    """Leave out what a lane's owner computed and did not post, because it died: the next owner posted in its place."""
    ends = (position for rank, generation, position in owners if rank == writer[0] and generation > writer[1])
    return inputs[inputs["position"] < min(ends, default=sys.maxsize)]


def _complete(file: Path, dtype: "np.dtype[np.void]") -> Lines:
    """Return the completely written records; the file is longer."""
    data = file.read_bytes()
    records = np.frombuffer(data, dtype, len(data) // dtype.itemsize)
    whole: Lines = records[records["written"] == 1].copy()
    return whole


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock the folder for reading all parts or merging them; yield False if the folder is gone."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(folder, limits.timeout_s()))
        except FileNotFoundError:
            yield False
        else:
            yield folder.exists()
