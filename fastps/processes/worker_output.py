"""Parsing of workers' output: bytes from pipes become whole lines, errors of fastps one sentence; the last lines are kept."""

import re
from collections import deque

_MAX_LINE_BYTES = 1 << 20  # a longer line is passed on in parts
_TRACEBACK = b"Traceback (most recent call last):"
_OWN_ERROR = b"fastps."
_RANK = re.compile(rb"^\[rank\d+\]: ")  # torch.distributed begins the lines of a traceback so, once a process group has begun
_INTERRUPT = b"KeyboardInterrupt"
# With erasures: they refer to the worker's own lines, not to the shared terminal.
_CURSOR_MOVES = re.compile(rb"\x1b\[[0-9;?]*[A-HJKSTfsu]")
_CURSOR_UP = re.compile(rb"\x1b\[[0-9]*[AF]")
TAIL_LINES = 20


class Lines:
    """Cuts a stream into lines. A carriage return ends a line, too, so that progress bars arrive while they move.

    Cursor movements are removed. A line that moved the cursor up is a bar below another (nested loops) and ends in a carriage
    return.

    >>> lines = Lines()
    >>> lines.feed(b"one\\ntw"), lines.feed(b"o\\r"), lines.feed(b"\\n3"), lines.rest()
    ([b'one\\n'], [], [b'two\\r\\n'], [b'3'])
    """

    def __init__(self) -> None:
        self._pending = b""
        self._is_bar = False  # whether the last line ended in a carriage return

    @property
    def bar(self) -> bytes:
        """The current progress bar without a line end; empty if the pending text is no bar.

        Most bars begin with their carriage return, so waiting for the end would show each bar one update late.

        >>> lines = Lines()
        >>> lines.feed(b"\\r 10%"), lines.bar
        ([b'\\r'], b' 10%')
        """
        is_bar = self._is_bar or self._pending.endswith(b"\r")
        return _CURSOR_MOVES.sub(b"", self._pending).rstrip(b"\r") if is_bar else b""

    def feed(self, data: bytes) -> list[bytes]:
        """Add `data` and return the completed lines, each with its end."""
        self._pending += data
        # A carriage return at the very end may be the first half of \r\n: it waits for the next byte.
        whole = len(self._pending) - 1 if self._pending.endswith(b"\r") else len(self._pending)
        end = 1 + max(self._pending.rfind(b"\n", 0, whole), self._pending.rfind(b"\r", 0, whole))
        if not end and len(self._pending) > _MAX_LINE_BYTES:
            end = len(self._pending)
        done, self._pending = self._pending[:end], self._pending[end:]
        lines = [_without_moves(line) for line in done.splitlines(keepends=True)]
        if lines:
            self._is_bar = lines[-1].endswith(b"\r")
        return lines

    def rest(self) -> list[bytes]:
        """Return the text after the last line end, at the end of the stream."""
        rest, self._pending = self._pending, b""
        return [_without_moves(rest)] if rest else []


def _without_moves(line: bytes) -> bytes:
    """Remove cursor movements from a line.

    >>> _without_moves(b"batches: 33%\\x1b[A\\n")
    b'batches: 33%\\r'
    """
    if b"\x1b" not in line:
        return line
    text = _CURSOR_MOVES.sub(b"", line)
    return text.rstrip(b"\r\n") + b"\r" if _CURSOR_UP.search(line) else text


class ErrorLines:
    """Filters standard error: drops the tracebacks of fastps' own errors, whose text says what to do, and of Ctrl-C.

    Other tracebacks pass, without the rank that torch.distributed writes before each line. With `whole`, everything passes.

    >>> error = b"Traceback (most recent call last):\\n", b'  File "x"\\n', b"fastps.errors.UsageError: no\\n"
    >>> ErrorLines().feed(error)
    [b'fastps.errors.UsageError: no\\n']
    """

    def __init__(self, whole: bool = False) -> None:
        self._whole = whole
        self._held: list[bytes] = []
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)

    def feed(self, lines: "list[bytes] | tuple[bytes, ...]") -> list[bytes]:
        """Return the lines to show after these lines."""
        shown = [line for arrived in lines for line in self._next(_RANK.sub(b"", arrived))]
        self._remember(shown)
        return shown

    def rest(self) -> list[bytes]:
        """Return an incomplete traceback at the end of the stream."""
        held, self._held = self._held, []
        self._remember(held)
        return held

    def _next(self, line: bytes) -> list[bytes]:
        if self._whole:
            return [line]
        if line.startswith(_TRACEBACK):
            before, self._held = self._held, [line]
            return before
        if not self._held:
            return [line]
        if line.startswith(b" "):
            self._held.append(line)
            return []
        block, self._held = [*self._held, line], []
        if line.startswith(_INTERRUPT):
            return []
        return [line] if line.startswith(_OWN_ERROR) else block

    def _remember(self, lines: list[bytes]) -> None:
        self.tail.extend(text for line in lines if (text := line.decode("utf-8", "replace").rstrip()))
