"""Where the lines of several workers go: whole lines as they come, progress bars so that none overwrites another.

On a terminal each worker's bar keeps a line of its own below everything else; elsewhere an update is a line, at most one a
second and worker. Refuses to know pipes and processes.
"""

import os
import sys
from typing import IO

from fastps.processes.progress_lines import ProgressLines
from fastps.system.clock import Clock

_BETWEEN_UPDATES_NS = 1_000_000_000
_Stream = tuple[int, int]  # a worker's rank, and 1 for its standard error, else 0


class JobOutput:
    """The two streams of a job's workers; `prefix`: whether each line begins with its worker's number.

    >>> import sys
    >>> from fastps.system.clock import SYSTEM_CLOCK
    >>> output = JobOutput(SYSTEM_CLOCK)
    >>> output.write(3, "loss 0.5\\n", sys.stdout)
    [3] loss 0.5
    """

    def __init__(self, clock: Clock, prefix: bool = True) -> None:
        self._clock = clock
        self._prefix = prefix
        self._on_terminal = ProgressLines()
        # Elsewhere, by stream: when its last update was written and as what, and a later one that was not.
        self._updated_ns: dict[_Stream, int] = {}
        self._last: dict[_Stream, str] = {}
        self._kept: dict[_Stream, str] = {}

    def write(self, rank: int, line: str, sink: IO[str]) -> None:
        """Pass on a line of a worker; one that ends in a carriage return is an update of its progress bar."""
        text = line.rstrip("\r\n")
        is_update = line.endswith("\r")
        if is_update and not text:
            return  # the carriage return before a bar
        shown = "" if is_update and not text.strip() else f"[{rank}] {text}" if self._prefix else text
        stream = (rank, int(sink is sys.stderr))
        if not _is_terminal(sink):
            self._write_to_file(stream, shown, is_update, sink)
        elif is_update:
            self._on_terminal.update(stream, shown, sink)
        else:
            self._on_terminal.end(stream, f"{shown}\n", sink)

    def end(self, rank: int, sink: IO[str]) -> None:
        """A worker writes no more there: what its bar showed last stays."""
        stream = (rank, int(sink is sys.stderr))
        if bar := self._on_terminal.bar_of(stream):
            self._on_terminal.end(stream, f"{bar}\n", sink)
        if kept := self._kept.pop(stream, ""):
            sink.write(f"{kept}\n")
            sink.flush()
        self._last.pop(stream, None)

    def hide_bars(self) -> None:
        """Leave the terminal to somebody else's lines; the bars are drawn again with the next update."""
        self._on_terminal.hide()

    def _write_to_file(self, stream: _Stream, text: str, is_update: bool, sink: IO[str]) -> None:
        """An update at most once a second; a whole line at once, in place of the update that it ends."""
        now_ns = self._clock.now_ns()
        if is_update:
            if not text:
                return  # a bar that was taken away: the file keeps it
            if now_ns - self._updated_ns.get(stream, now_ns - _BETWEEN_UPDATES_NS) < _BETWEEN_UPDATES_NS:
                self._kept[stream] = text
                return
            self._updated_ns[stream] = now_ns
        self._kept.pop(stream, None)
        is_written = self._last.pop(stream, None) == text  # the bar that stood still, or the end of its line
        if is_update:
            self._last[stream] = text
        if not is_written:
            sink.write(f"{text}\n")
            sink.flush()


def _is_terminal(sink: IO[str]) -> bool:
    """Whether a stream obeys what moves the cursor."""
    return sink.isatty() and os.environ.get("TERM") != "dumb"
