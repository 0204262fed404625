"""The parts of a trace while a job runs: each worker writes lines of its own into a folder beside the file; the last merges.

A part is mapped memory of a file, so that lines outlive the process that wrote them: kill -9 loses the step in progress and
steps whose pushes were not decided yet, no more. A machine that goes down loses what its kernel had not written. No part is
written by two, so there are no locks on the way of a step. Refuses to know what lines mean.
"""

import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fastps.tracing.file import PUSH_DTYPE, STEP_DTYPE, Lines, Trace, TraceError, read, write

CHUNK_LINES = 4096  # a chunk of any line is a whole number of pages
_SUFFIX = ".parts"
_CODES = {"<i8": "q", "<i4": "i", "<i2": "h", "|u1": "B"}
_TABLES = {"steps": STEP_DTYPE, "pushes": PUSH_DTYPE}
_OF_WORKER = ("began_ns", "transfer_ns", "posted", "failure", "load")


def folder_of(file: Path, job: str) -> Path:
    """Where the parts of a job's trace lie: beside it, one folder a job, so that an earlier crash is never mixed in."""
    return file.with_name(f"{file.name}.{hashlib.sha256(job.encode()).hexdigest()[:12]}{_SUFFIX}")


def folders_of(file: Path) -> list[Path]:
    """Folders with parts of this trace that nobody has merged, the newest last."""
    found = []
    for folder in file.parent.glob(f"{file.name}.*{_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):  # merged since
            found.append((folder.stat().st_mtime, folder))
    return [folder for _, folder in sorted(found)]


def numbered(file: Path, number: int) -> Path:
    """The file of a process's first, second, ... job.

    >>> numbered(Path("run.trace"), 0).name, numbered(Path("run.trace"), 1).name
    ('run.trace', 'run-1.trace')
    """
    return file.with_stem(f"{file.stem}-{number}") if number else file


def finish(file: Path, job: str) -> None:
    """After all of a launch's processes have ended: merge what a worker that died has left unmerged."""
    number = 0
    while (folder := folder_of(numbered(file, number), f"{job}.{number}" if number else job)).exists() or number == 0:
        merge(folder, numbered(file, number))
        number += 1


def load(file: Path) -> Trace:
    """Read a trace; where there is none yet, what the parts of its last job hold. Raises TraceError."""
    left = folders_of(file)
    if left and not file.exists():
        with _locked(left[-1]) as there:
            if there:
                return _gathered(left[-1], _notes_of(left[-1]))
    return read(file)


class PartTable:
    """Lines of one kind of one worker, appended to a mapped file that grows by chunks."""

    def __init__(self, file: Path, dtype: "np.dtype[np.void]") -> None:
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        # struct writes a line in two thirds of the time that numpy takes for it.
        self._form = struct.Struct("<" + "".join(_CODES[field[0].str] for field in (dtype.fields or {}).values()))
        self._chunks = 0
        self._used = CHUNK_LINES
        self._memory: mmap.mmap | None = None

    def append(self, line: tuple[Any, ...]) -> None:
        """Write one line; its last field, `written`, is 1."""
        if self._used == CHUNK_LINES or self._memory is None:
            self._memory = self._grow()
        self._form.pack_into(self._memory, self._used * self._form.size, *line)
        self._used += 1

    def _grow(self) -> mmap.mmap:
        size = CHUNK_LINES * self._form.size
        try:
            # Not a hole of the file: where the disk is full, writing into one would end the process by a signal.
            os.posix_fallocate(self._descriptor, self._chunks * size, size)
        except OSError as error:
            raise TraceError(f"the trace's lines cannot be written: {error}; make room, or choose another file") from None
        memory = mmap.mmap(self._descriptor, size, offset=self._chunks * size)
        self._chunks += 1
        self._used = 0
        return memory

    def close(self) -> None:
        """Write no more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._memory = None


class Part:
    """What one worker writes: its steps, its pushes, and a note about itself."""

    def __init__(self, folder: Path, rank: int, note: dict[str, Any]) -> None:
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            self.steps, self.pushes = (PartTable(folder / f"{rank}.{name}", dtype) for name, dtype in _TABLES.items())
            self._folder, self._rank, self._note = folder, rank, note
            self._write_note(finished=False)
        except OSError as error:
            raise TraceError(f"the trace's lines cannot be written to {folder}: {error}; choose another file") from None

    def finish(self, **more: Any) -> None:
        """All lines are written; `more` is added to the note."""
        self.steps.close()
        self.pushes.close()
        self._note.update(more)
        with contextlib.suppress(FileNotFoundError):  # somebody removed the folder: there is nothing to finish
            self._write_note(finished=True)

    def _write_note(self, *, finished: bool) -> None:
        file = self._folder / f"{self._rank}.json"
        unfinished = file.with_suffix(".unfinished")
        unfinished.write_text(json.dumps({**self._note, "rank": self._rank, "finished": finished}))
        unfinished.replace(file)


def _notes_of(folder: Path) -> list[dict[str, Any]]:
    """The workers' notes, by rank. The folder is locked: who merges would remove them meanwhile."""
    found = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    return sorted(found, key=lambda note: int(note["rank"]))


def merge(
    folder: Path,
    file: Path,
    when: Callable[[list[dict[str, Any]]], bool] | None = None,
    more: Callable[[], dict[str, Any]] | None = None,
    settle: Callable[[Lines], None] | None = None,
) -> bool:
    """Write the trace of what is in the folder, and remove the folder; False when another has done so, or it is not time.

    `when` says of the workers' notes whether it is time; `settle` may complete the lines of pushes before they are written;
    what `more` returns goes into the header. Raises TraceError.
    """
    with _locked(folder) as there:
        if not there:
            return False
        notes = _notes_of(folder)
        if when is not None and not when(notes):
            return False
        found = _gathered(folder, notes)
        if settle is not None:
            settle(found.pushes)
        write(replace(found, header={**found.header, **(more() if more is not None else {})}), file)
        for part in folder.iterdir():
            part.unlink()
        folder.rmdir()
    return True


def _gathered(folder: Path, notes: list[dict[str, Any]]) -> Trace:
    """The trace of what the folder holds now: also of a job that still runs, or has crashed. Raises TraceError."""
    if not notes:
        raise TraceError(f"expected parts of a trace in {folder}, found none")
    tables = {}
    for name, dtype in _TABLES.items():
        parts = [_lines(folder / f"{note['rank']}.{name}", dtype) for note in notes]
        tables[name] = np.concatenate(parts) if parts else np.empty(0, dtype)
    header = {
        **notes[0]["job"],  # all workers say the same of the job
        "recorded": [note["rank"] for note in notes],
        "unfinished": [note["rank"] for note in notes if not note["finished"]],
        "of_worker": {str(note["rank"]): {key: note.get(key) for key in _OF_WORKER} for note in notes},
    }
    return Trace(header, tables["steps"], tables["pushes"])


def _lines(file: Path, dtype: "np.dtype[np.void]") -> Lines:
    """The lines that were written whole; the file is longer."""
    data = file.read_bytes()
    lines = np.frombuffer(data, dtype, len(data) // dtype.itemsize)
    whole: Lines = lines[lines["written"] == 1].copy()
    return whole


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """One at a time reads all parts or merges them; False where the folder is gone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder.exists()
    finally:
        os.close(descriptor)
