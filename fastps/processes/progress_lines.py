"""Progress bars of several workers on one terminal: a block of lines at the bottom, and whole lines that scroll above it."""

import os
import re
import shutil
from typing import Protocol

from rich.cells import cell_len, set_cell_size

_COLOUR = re.compile(r"(\x1b\[[0-9;]*m)")


class Sink(Protocol):
    """What bars and lines are written to: a stream of text."""

    def write(self, text: str, /) -> object:
        """Write."""

    def flush(self) -> None:
        """Pass on what was written."""

    def isatty(self) -> bool:
        """Whether it is a terminal."""

    def fileno(self) -> int:
        """The file's descriptor. Raises OSError if there is none."""


class ProgressLines:
    """The block. Bars are in the order of their keys; a count stands for bars beyond the terminal's height.

    >>> import sys
    >>> ProgressLines().show("whole line\\n", sys.stdout)
    whole line
    """

    def __init__(self) -> None:
        self.bars: dict[tuple[int, int], str] = {}
        self._sink: Sink | None = None  # the stream that shows the block
        self._height = 0

    def update(self, key: tuple[int, int], bar: str, sink: Sink) -> None:
        """Replace the bar of a key; an empty bar ends it."""
        if self.bars.get(key, "") == bar:
            return
        if bar:
            self.bars[key] = bar
        else:
            del self.bars[key]
        self.show("", sink)

    def end(self, key: tuple[int, int], line: str, sink: Sink) -> None:
        """Write a line above the block and end the key's bar."""
        self.bars.pop(key, None)
        self.show(line, sink)

    def show(self, line: str, sink: Sink) -> None:
        """Write a line above the block and redraw the block in one write, which avoids flicker."""
        above = self._erasure()
        if self._sink is not None and self._sink is not sink:
            self._sink.write(above)  # stdout and stderr share the terminal: keep their order
            self._sink.flush()
            above = ""
        lines = self._lines(sink)
        sink.write(above + line + "".join(f"{text}\n" for text in lines))
        self._sink, self._height = sink, len(lines)

    def hide(self) -> None:
        """Clear the block until the next bar or line, so that other output can be written."""
        if self._sink is not None:
            self._sink.write(self._erasure())
        self._height = 0

    def _erasure(self) -> str:
        """Return the control sequence that moves to the block's first line and clears below it."""
        return f"\x1b[{self._height}F\x1b[J" if self._height else ""

    def _lines(self, sink: Sink) -> list[str]:
        columns, rows = _size(sink)
        bars = [_cut(self.bars[key], columns - 1) for key in sorted(self.bars)]
        most = max(1, rows - 2)  # one row holds the cursor; a line that scrolled away cannot be erased
        return bars if len(bars) <= most else [*bars[: most - 1], f"... and {len(bars) - most + 1} more"]


def _size(sink: Sink) -> tuple[int, int]:
    try:
        size = os.get_terminal_size(sink.fileno())
    except (OSError, ValueError):
        size = os.terminal_size((0, 0))
    return size if min(size) > 0 else shutil.get_terminal_size()


def _cut(text: str, columns: int) -> str:
    """Cut a text to a number of columns; colour sequences take none.

    >>> _cut("10% |###   |", 6), _cut("\\x1b[32m10%\\x1b[0m", 6)
    ('10% |#', '\\x1b[32m10%\\x1b[0m')
    """
    pieces = []
    for piece in _COLOUR.split(text.expandtabs()):
        if not _COLOUR.fullmatch(piece):
            piece = piece if cell_len(piece) <= columns else set_cell_size(piece, columns)
            columns -= cell_len(piece)
        pieces.append(piece)
    return "".join(pieces)
