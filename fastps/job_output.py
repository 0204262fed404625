"""Where the lines of several workers go: whole lines as they come, progress bars so that none overwrites another.

On a terminal each worker's bar keeps a line of its own below everything else; elsewhere an update is a line, at most one a
second and worker. Knows nothing of pipes and processes.
"""

import shutil
from typing import IO

from fastps.clock import Clock

_BETWEEN_UPDATES_NS = 1_000_000_000


class JobOutput:
    """The two streams of a job's workers; `prefix`: whether each line begins with its worker's number.

    >>> import sys
    >>> from fastps.clock import SYSTEM_CLOCK
    >>> output = JobOutput(SYSTEM_CLOCK)
    >>> output.write(3, "loss 0.5\\n", sys.stdout)
    [3] loss 0.5
    """

    def __init__(self, clock: Clock, prefix: bool = True) -> None:
        self._clock = clock
        self._prefix = prefix
        self._bars: dict[int, str] = {}  # on a terminal: the bar of each worker that has one
        self._drawn: IO[str] | None = None  # where they are drawn now
        self._lines_drawn = 0
        self._updated_ns: dict[int, int] = {}  # elsewhere: when a worker's last update was written
        self._kept: dict[int, tuple[str, IO[str]]] = {}  # the last update, where it was not

    def write(self, rank: int, line: str, sink: IO[str]) -> None:
        """Pass on a line of a worker; one that ends in a carriage return is an update of its progress bar."""
        text = f"[{rank}] {line}" if self._prefix else line
        if sink.isatty():
            self._write_to_terminal(rank, text, sink)
        else:
            self._write_to_file(rank, text, sink)
        sink.flush()

    def end(self, rank: int) -> None:
        """A worker writes no more: what its bar showed last stays."""
        if rank in self._kept:
            text, sink = self._kept.pop(rank)
            sink.write(text)
            sink.flush()
        if rank in self._bars and self._drawn is not None:
            self._write_to_terminal(rank, self._bars[rank] + "\n", self._drawn)

    def _write_to_file(self, rank: int, text: str, sink: IO[str]) -> None:
        if not text.endswith("\r"):
            self._kept.pop(rank, None)
            sink.write(text if text.endswith("\n") else text + "\n")
            return
        whole, now_ns = text.rstrip("\r") + "\n", self._clock.now_ns()
        if rank in self._updated_ns and now_ns - self._updated_ns[rank] < _BETWEEN_UPDATES_NS:
            self._kept[rank] = whole, sink
            return
        self._kept.pop(rank, None)
        self._updated_ns[rank] = now_ns
        sink.write(whole)

    def _write_to_terminal(self, rank: int, text: str, sink: IO[str]) -> None:
        self._clear()
        if text.endswith("\r"):
            self._bars[rank] = text.rstrip("\r")
        else:
            self._bars.pop(rank, None)
            sink.write(text if text.endswith("\n") else text + "\n")
        columns = shutil.get_terminal_size().columns - 1
        for _, bar in sorted(self._bars.items()):
            sink.write(f"{bar[:columns]}\n")
        self._drawn, self._lines_drawn = sink, len(self._bars)

    def _clear(self) -> None:
        """Take the drawn bars off the terminal again."""
        if self._drawn is not None and self._lines_drawn:
            self._drawn.write(f"\x1b[{self._lines_drawn}F\x1b[J")
            self._drawn.flush()
        self._lines_drawn = 0
