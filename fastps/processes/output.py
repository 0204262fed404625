"""The output of several workers: whole lines as they come, and progress bars that do not overwrite each other.

On a terminal each worker's bar keeps a line below all other output. Elsewhere an update is a line, at most one per second and
worker.
"""

import os
from collections.abc import Sequence

from fastps.processes.progress_lines import ProgressLines, Sink
from fastps.system.clock import Clock

_BETWEEN_UPDATES_NS = 1_000_000_000
_Stream = tuple[int, int]  # a worker's rank, and the number of the sink


class JobOutput:
    """The two streams of a job's workers. Each line begins with its worker's number.

    >>> import sys
    >>> from fastps.system.clock import SYSTEM_CLOCK
    >>> output = JobOutput(SYSTEM_CLOCK)
    >>> output.write(3, "loss 0.5\\n", sys.stdout)
    [3] loss 0.5
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._on_terminal = ProgressLines()
        self._sinks: list[Sink] = []  # in the order of their first use
        # Without a terminal, by stream: the time and text of the last written update, and a later one not yet written.
        self._updated_ns: dict[_Stream, int] = {}
        self._last: dict[_Stream, str] = {}
        self._kept: dict[_Stream, str] = {}

    def write_all(self, rank: int, lines: Sequence[str], sink: Sink) -> None:
        """Write lines of a worker in their order."""
        for line in lines:
            self.write(rank, line, sink)

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
