"""Progress bars of several workers on one terminal: a block of lines at the bottom, and whole lines that scroll above it.

Knows neither workers nor time: its caller says which bar is new and which has ended.
"""

import os
import re
import shutil
from typing import IO

from rich.cells import cell_len, set_cell_size

_COLOUR = re.compile(r"(\x1b\[[0-9;]*m)")


class ProgressLines:
    """The block. The bars are in the order of their keys; those that the terminal's height leaves no room for are counted.

    >>> import sys
    >>> ProgressLines().show("whole line\\n", sys.stdout)
    whole line
    """

    def __init__(self) -> None:
        self._bars: dict[tuple[int, int], str] = {}
        self._sink: IO[str] | None = None  # where the block is drawn now
        self._height = 0

    def update(self, key: tuple[int, int], bar: str, sink: IO[str]) -> None:
        """Draw this bar in place of the one that the key had; an empty one ends it."""
        if self._bars.get(key, "") == bar:
            return
        if bar:
            self._bars[key] = bar
        else:
            del self._bars[key]
        self.show("", sink)

    def end(self, key: tuple[int, int], line: str, sink: IO[str]) -> None:
        """Write a line above the block, in which the key has no bar any more."""
        self._bars.pop(key, None)
        self.show(line, sink)

    def bar_of(self, key: tuple[int, int]) -> str:
        """The bar of this key; empty where it has none."""
        return self._bars.get(key, "")

    def show(self, line: str, sink: IO[str]) -> None:
        """Write a line above the block, in one piece with the block's new lines: the terminal does not flicker."""
        above = self._erasure()
        if self._sink is not None and self._sink is not sink:
            self._sink.write(above)  # stdout and stderr are two streams to one terminal: in order
            self._sink.flush()
            above = ""
        lines = self._lines(sink)
        sink.write(above + line + "".join(f"{text}\n" for text in lines))
        sink.flush()
        self._sink, self._height = sink, len(lines)

    def hide(self) -> None:
        """Take the block off the terminal until the next bar or line, so that somebody else can write there."""
        if self._sink is not None:
            self._sink.write(self._erasure())
            self._sink.flush()
        self._height = 0

    def _erasure(self) -> str:
        """Up to the block's first line, and clear all from there on."""
        return f"\x1b[{self._height}F\x1b[J" if self._height else ""

    def _lines(self, sink: IO[str]) -> list[str]:
        columns, rows = _size(sink)
        bars = [_cut(self._bars[key], columns - 1) for key in sorted(self._bars)]
        most = max(1, rows - 2)  # one row is the cursor's; a line that has left the screen cannot be erased
        return bars if len(bars) <= most else [*bars[: most - 1], f"... and {len(bars) - most + 1} more"]


def _size(sink: IO[str]) -> tuple[int, int]:
    """Columns and rows of the terminal behind a stream."""
    try:
        size = os.get_terminal_size(sink.fileno())
    except (OSError, ValueError):
        size = os.terminal_size((0, 0))
    return size if min(size) > 0 else shutil.get_terminal_size()


def _cut(text: str, columns: int) -> str:
    """As much of a text as so many columns hold; colours take none.

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
