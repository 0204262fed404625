"""Writing that never holds up the launcher: threads write what bounded queues hold.

A slow reader slows the workers down, as a pipe does: the launcher reads no more from them meanwhile. A reader that has taken
nothing for long (a stopped pager, Ctrl-S), a full disk and a closed pipe cost lines, which are counted and told at the end.
"""

import contextlib
import io
import logging
import os
import select
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

from fastps.system.clock import SYSTEM_CLOCK

logger = logging.getLogger("fastps.launch")

MOST_BYTES = 8 << 20  # held for a stream that takes nothing
MANY_BYTES = 1 << 20  # held for a stream that is slow
_STUCK_NS = 10_000_000_000  # without any progress: the stream is not slow, it takes nothing
_PIECE_BYTES = 1 << 16
_OF_A_CALL = 256  # bytes that a call takes besides its text
_HURRY_S = 1.0  # for the rest of the output once the job shall end
_LOOK_S = 0.05
_NOBODY = "nobody has taken them"


class _Lost:
    def __init__(self) -> None:
        self.lines = 0
        self.reason = ""  # why the first of them was not

    def add(self, lines: int, reason: Exception | str) -> None:
        text = reason if isinstance(reason, str) else getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        self.lines += lines
        self.reason = self.reason or (text if lines else "")


class Stream:
    r"""A standard stream. Text that was decoded with "surrogateescape" is written as the bytes that it was.

    >>> stream = Stream(sys.stdout)
    >>> stream.write("loss 0.5\n"), stream.flush()
    loss 0.5
    (None, None)
    """

    def __init__(self, stream: IO[str] | None) -> None:
        """`stream`: None for one that is closed, as sys.stdout is then."""
        self._stream = stream
        self._file = -1
        self._waiting = bytearray()
        self.lost = _Lost()
        self.progressed_ns = 0  # when it last took something
        if isinstance(stream, io.TextIOWrapper):  # others take no bytes, or are more than their file
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
                self._file = stream.fileno()

    def write(self, text: str) -> None:
        """Let the next `flush` write a text: a system call for each line would cost a wait for the interpreter's lock."""
        self._waiting += text.encode("utf-8", "surrogateescape")

    def flush(self) -> None:
        """Write what waits. What cannot be written is lost."""
        while self._waiting:
            try:
                written = self._write()
            except Exception as error:  # of any kind of stream
                self.lost.add(self.waiting_lines, error)
                written = len(self._waiting)
            del self._waiting[:written]
            self.progressed_ns = SYSTEM_CLOCK.now_ns()

    def _write(self) -> int:
        """Write a part of what waits, and return its length."""
        if self._stream is None:
            raise OSError("it is closed")
        if self._file < 0:
            self._stream.write(self._waiting.decode("utf-8", "replace"))
            self._stream.flush()
            return len(self._waiting)
        try:
            return os.write(self._file, self._waiting[:_PIECE_BYTES])
        except BlockingIOError:  # another process has made the terminal or the pipe non-blocking
            select.select([], [self._file], [])
            return 0

    @property
    def waiting_lines(self) -> int:
        """The number of lines that wait for `flush`."""
        return self._waiting.count(b"\n")

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        """The file's descriptor. Raises OSError if there is none."""
        if self._file < 0:
            raise OSError("a stream without a file")
        return self._file

    def silence(self) -> None:
        """Let the file's descriptor lead to nowhere, because nobody takes what is written to it."""
        with contextlib.suppress(OSError, ValueError, AttributeError):  # no file at all
            number = self._file if self._stream is None or self._file >= 0 else self._stream.fileno()
            with Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), number)


class _Call(NamedTuple):
    """What the thread runs. `stream`: where alone it writes, with `write`; None for one that writes by itself."""

    run: Callable[[], object]
    stream: Stream | None
    nbytes: int
    lines: int


class OutputThread:
    """Runs calls that write to the streams, in order; `name` says where. The thread begins with the first call."""

    def __init__(self, name: str, *streams: Stream) -> None:
        self.name = name
        self.lost = _Lost()
        for stream in streams:
            stream.lost = self.lost
        self._streams = streams
        self._calls: deque[_Call] = deque()
        self._held_bytes = 0  # with the calls in progress
        self._busy_since_ns = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._patience_s = _HURRY_S

    def put(self, run: Callable[[], object], stream: Stream | None = None, nbytes: int = 0, lines: int = 1) -> bool:
        """Let the thread run a call that writes so many bytes and lines. Lose them, and return False, if too many wait."""
        call = _Call(run, stream, nbytes + _OF_A_CALL, lines)
        with self._changed:
            if self._held_bytes + call.nbytes > MOST_BYTES:
                self.lost.add(lines, _NOBODY)
                return False
            if not self._held_bytes:
                self._busy_since_ns = SYSTEM_CLOCK.now_ns()
            self._calls.append(call)
            self._held_bytes += call.nbytes
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fastps-output", daemon=True)
            self._thread.start()
        return True

    @property
    def is_slow(self) -> bool:
        """Whether what comes should wait: much is held for a reader that still takes some."""
        since_ns = max(self._busy_since_ns, *(stream.progressed_ns for stream in self._streams))
        return self._held_bytes > MANY_BYTES and SYSTEM_CLOCK.now_ns() - since_ns < _STUCK_NS

    def drain(self, hurries: Callable[[], bool]) -> bool:
        """Wait until all calls have run; while `hurries()`, until none has ended for a second. Returns whether they have."""
        with self._changed:
            while (held := self._held_bytes) and self._patience_s > 0:
                self._changed.wait(_LOOK_S)
                self._patience_s -= _LOOK_S * (hurries() and held == self._held_bytes)
            return not self._held_bytes

    def give_up(self) -> None:
        """Count what waits as lost, and end a write that does not end: the streams lead to nowhere from now on."""
        with self._changed:
            lines = sum(call.lines for call in self._calls) + sum(stream.waiting_lines for stream in self._streams)
            self.lost.add(lines, _NOBODY)
            self._calls.clear()
            self._held_bytes = 0
        for stream in self._streams:
            stream.silence()
        before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
        for _ in range(20):  # a signal to the thread lets its write begin again
            if self._thread is not None and self._thread.ident is not None and not self.close(_LOOK_S):
                signal.pthread_kill(self._thread.ident, signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, before)

    def close(self, limit_s: float | None = None) -> bool:
        """End the thread after its last call. Returns whether it has ended within the limit."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(limit_s)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._calls and not self._is_closed:
                    self._changed.wait()
                if not self._calls:
                    return
                calls = list(self._calls)
                self._calls.clear()
            self._run_all(calls)
            with self._changed:
                self._held_bytes = max(0, self._held_bytes - sum(call.nbytes for call in calls))  # 0 if it was given up
                self._changed.notify_all()

    def _run_all(self, calls: list[_Call]) -> None:
        before: Stream | None = None
        for call in calls:
            if call.stream is not before or call.stream is None:
                self._flush()
            before = call.stream
            try:
                call.run()
            except Exception as error:  # of any log handler: a thread that ended would write no more
                self.lost.add(call.lines, error)
        self._flush()

    def _flush(self) -> None:
        for stream in self._streams:
            stream.flush()


class StandardStreams:
    """This process's standard output and error, each with a thread; one thread for both where both are terminals."""

    def __init__(self) -> None:
        self.out, self.err = Stream(sys.stdout), Stream(sys.stderr)
        self._draws = False
        if self.out.isatty() and self.err.isatty():
            self._threads = [OutputThread("the terminal", self.out, self.err)]
        else:
            self._threads = [OutputThread("standard output", self.out), OutputThread("standard error", self.err)]

    def thread_of(self, stream: Stream) -> OutputThread:
        """The thread that writes to one of the two."""
        return self._threads[0 if stream is self.out else -1]

    def on_terminal(self, call: Callable[[], object]) -> bool:
        """Run a call that changes what a terminal shows, if one of the streams is a terminal."""
        return self.thread_of(self.out if self.out.isatty() else self.err).put(call, lines=0)

    def draw(self, call: Callable[[], object]) -> None:
        """Run a call that draws on a terminal. It is left out while an earlier one waits, since nobody reads the terminal."""

        def drawn() -> None:
            try:
                call()
            finally:
                self._draws = False

        if not self._draws:
            self._draws = True
            if not self.on_terminal(drawn):
                self._draws = False

    @contextlib.contextmanager
    def carrying_logs(self, hurries: Callable[[], bool]) -> Iterator[None]:
        """Within this context loggers of fastps write on the thread of standard error. At its end all is written or lost.

        A stream that takes nothing is waited for, as a program waits for its pager, unless `hurries()`. What was lost is told.
        """
        of_fastps = logging.getLogger("fastps")
        handlers, propagate = of_fastps.handlers, of_fastps.propagate
        of_fastps.handlers, of_fastps.propagate = [_Later(of_fastps, self._threads[-1])], False
        try:
            yield
        finally:
            for thread in self._threads:
                if not thread.drain(hurries):
                    thread.give_up()
                if thread.lost.lines:
                    logger.warning("%d lines to %s were lost: %s", thread.lost.lines, thread.name, thread.lost.reason)
            of_fastps.handlers, of_fastps.propagate = handlers, propagate
            for thread in self._threads:
                thread.close(_HURRY_S)


class _Later(logging.Handler):
    """Hands records to a thread, which calls the handlers that the logger had."""

    def __init__(self, of: logging.Logger, thread: OutputThread) -> None:
        super().__init__()
        self._before = logging.Logger(of.name)
        self._before.handlers, self._before.propagate, self._before.parent = of.handlers, of.propagate, of.parent
        self._thread = thread

    def emit(self, record: logging.LogRecord) -> None:
        self._thread.put(partial(self._before.callHandlers, record))
