"""The output of several workers: whole lines as they come, and progress bars that do not overwrite each other.

On a terminal each worker's bar keeps a line below all other output. Elsewhere an update is a line, at most one per second and
worker.
"""

import json
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastps.errors import UsageError
from fastps.processes.progress_lines import ProgressLines, Sink
from fastps.system.clock import Clock

_BETWEEN_UPDATES_NS = 1_000_000_000
_Stream = tuple[int, int]  # a worker's rank, and the number of the sink


@dataclass(frozen=True)
class LogOptions:
    """How a launch writes down what its workers say. Raises UsageError for a folder that cannot be made or written."""

    folder: Path | None = None  # also a file for each rank and stream, RANK/stdout.log and RANK/stderr.log, without bars
    as_json: bool = False  # an object a line, with time, rank and stream, and no bars

    def __post_init__(self) -> None:
        try:
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=self.folder).close()  # it can be written
        except OSError as error:
            raise UsageError(f"--log-dir {self.folder}: expected a folder to write to, found: {error.strerror}") from None


def json_line(unix_ns: int, **parts: Any) -> str:
    """A line of a log in JSON.

    >>> json_line(1_500_000_000, rank=3, text="loss 0.5")
    '{"time": "1970-01-01T00:00:01.500+00:00", "rank": 3, "text": "loss 0.5"}'
    """
    return json.dumps({"time": datetime.fromtimestamp(unix_ns / 1e9, UTC).isoformat(timespec="milliseconds"), **parts})


class JsonFormatter(logging.Formatter):
    """Writes what fastps' own loggers say as lines of a log in JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        return json_line(int(record.created * 1e9), level=record.levelname, logger=record.name, message=record.getMessage())


class JobOutput:
    """The two streams of a job's workers. Each line begins with its worker's number.

    >>> import sys
    >>> from fastps.system.clock import SYSTEM_CLOCK
    >>> output = JobOutput(SYSTEM_CLOCK)
    >>> output.write(3, "loss 0.5\\n", sys.stdout)
    [3] loss 0.5
    """

    def __init__(self, clock: Clock, logs: LogOptions = LogOptions()) -> None:
        self._clock, self._logs = clock, logs
        self._on_terminal = ProgressLines()
        self._sinks: list[Sink] = []  # in the order of their first use
        # Without a terminal, by stream: the time and text of the last written update, and a later one not yet written.
        self._updated_ns: dict[_Stream, int] = {}
        self._last: dict[_Stream, str] = {}
        self._kept: dict[_Stream, str] = {}

    def write_all(self, rank: int, lines: Sequence[str], sink: Sink, name: str = "stdout") -> None:
        """Write lines of a worker in their order; `name` is that of the stream. Raises OSError of a file that takes nothing."""
        whole = [line for line in lines if not line.endswith("\r")]
        for line in whole if self._logs.as_json else lines:
            if self._logs.as_json:
                sink.write(json_line(self._clock.unix_ns(), rank=rank, stream=name, text=line.rstrip("\r\n")) + "\n")
            else:
                self.write(rank, line, sink)
        if self._logs.folder is not None and whole:
            file = self._logs.folder / str(rank) / f"{name}.log"
            file.parent.mkdir(exist_ok=True)
            with file.open("a", encoding="utf-8", errors="surrogateescape") as log:
                log.writelines(f"{line.rstrip(chr(10) + chr(13))}\n" for line in whole)

    def say(self, text: str, sink: Sink, **parts: Any) -> None:
        """Write a line of the launcher's own; `parts` are its parts in JSON."""
        sink.write(f"{json_line(self._clock.unix_ns(), **parts, message=text) if self._logs.as_json else text}\n")

    def write(self, rank: int, line: str, sink: Sink) -> None:
        """Write a line of a worker. A line that ends in a carriage return updates the worker's progress bar."""
        text = line.rstrip("\r\n")
        is_update = line.endswith("\r")
        if is_update and not text:
            return  # the carriage return before a bar
        shown = "" if is_update and not text.strip() else f"[{rank}] {text}"
        stream = self._stream(rank, sink)
        if not sink.isatty() or os.environ.get("TERM") == "dumb":
            self._write_to_file(stream, shown, is_update, sink)
        elif is_update:
            self._on_terminal.update(stream, shown, sink)
        else:
            self._on_terminal.end(stream, f"{shown}\n", sink)

    def end(self, rank: int, sink: Sink) -> None:
        """End a worker's stream: the last state of its bar stays."""
        stream = self._stream(rank, sink)
        if bar := self._on_terminal.bars.get(stream):
            self._on_terminal.end(stream, f"{bar}\n", sink)
        if kept := self._kept.pop(stream, ""):
            sink.write(f"{kept}\n")
        self._last.pop(stream, None)

    def hide_bars(self) -> None:
        """Clear the bars from the terminal until the next update, so that other lines can be written."""
        self._on_terminal.hide()

    def _stream(self, rank: int, sink: Sink) -> _Stream:
        if sink not in self._sinks:
            self._sinks.append(sink)
        return rank, self._sinks.index(sink)

    def _write_to_file(self, stream: _Stream, text: str, is_update: bool, sink: Sink) -> None:
        """Write an update at most once a second; write a whole line at once, in place of the update that it ends."""
        now_ns = self._clock.now_ns()
        if is_update:
            if not text:
                return  # an erased bar stays in the file
            if now_ns - self._updated_ns.get(stream, now_ns - _BETWEEN_UPDATES_NS) < _BETWEEN_UPDATES_NS:
                self._kept[stream] = text
                return
            self._updated_ns[stream] = now_ns
        self._kept.pop(stream, None)
        is_written = self._last.pop(stream, None) == text  # the bar did not change, or its line ended
        if is_update:
            self._last[stream] = text
        if not is_written:
            sink.write(f"{text}\n")
