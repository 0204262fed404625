"""Writing that never holds up the launcher: threads write what bounded queues hold.

A pager that was stopped, Ctrl-S, a full disk or a closed pipe cost lines, which are counted and told at the end.
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
from typing import IO

logger = logging.getLogger("fastps.launch")

MOST_BYTES = 8 << 20  # held for a stream that takes none
_OF_A_CALL = 256  # bytes that a call takes besides its text
_HURRY_S = 1.0  # for the rest of the output once the job shall end
_LOOK_S = 0.05
_NOBODY = "nobody has taken them"


class Stream:
    """A standard stream. Text that was decoded with "surrogateescape" is written as the bytes that it was.

    >>> Stream(sys.stdout).write("loss 0.5\\n")
    loss 0.5
    """

    def __init__(self, stream: IO[str] | None) -> None:
        """`stream`: None for one that is closed, as sys.stdout is then."""
        self._stream = stream
        self._file = -1
        if isinstance(stream, io.TextIOWrapper):  # others take no bytes, or are more than their file
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
                self._file = stream.fileno()

    def write(self, text: str) -> None:
        """Write and flush. Raises OSError, and what a stream without a file raises."""
        data = text.encode("utf-8", "surrogateescape")
        if self._file < 0:
            if self._stream is None:
                raise OSError("it is closed")
            self._stream.write(data.decode("utf-8", "replace"))
            self._stream.flush()
            return
        while data:
            try:
                data = data[os.write(self._file, data) :]
            except BlockingIOError:  # another process has made the terminal or the pipe non-blocking
                select.select([], [self._file], [])

    def flush(self) -> None:
        """Do nothing: `write` flushes."""

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


class OutputThread:
    """Runs calls that write to the streams, in order. The thread begins with the first call.

    Attributes:
        name: where the calls write, in words.
        lost: lines that were not written.
        reason: why the first of them was not.
    """

    def __init__(self, name: str, *streams: Stream) -> None:
        self.name = name
        self.lost = 0
        self.reason = ""
        self._streams = streams
        self._calls: deque[tuple[Callable[[], object], int, int]] = deque()
        self._held_bytes = self._held_lines = 0  # with the call in progress
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._patience_s = _HURRY_S

    def put(self, call: Callable[[], object], nbytes: int = 0, lines: int = 1) -> bool:
        """Let the thread run a call that writes so many bytes and lines. Lose them, and return False, if too many wait."""
        size = nbytes + _OF_A_CALL
        with self._changed:
            if self._held_bytes + size > MOST_BYTES:
                self._lose(lines, _NOBODY)
                return False
            self._calls.append((call, size, lines))
            self._held_bytes += size
            self._held_lines += lines
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fastps-output", daemon=True)
            self._thread.start()
        return True

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
            self._lose(self._held_lines, _NOBODY)
            self._calls.clear()
            self._held_bytes = self._held_lines = 0
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
                call, size, lines = self._calls.popleft()
            reason = _failure_of(call)
            with self._changed:
                if self._held_bytes:  # not given up meanwhile
                    self._held_bytes -= size
                    self._held_lines -= lines
                    self._lose(lines if reason else 0, reason)
                self._changed.notify_all()

    def _lose(self, lines: int, reason: str) -> None:
        self.lost += lines
        self.reason = self.reason or (reason if lines else "")


def _failure_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:  # of any kind of stream and log handler: a thread that ended would write no more
        return getattr(error, "strerror", None) or str(error) or type(error).__name__
    return ""


class StandardStreams:
    """This process's standard output and error, each with a thread; one thread for both where both are terminals.

    Attributes:
        out, err: the streams.
    """

    def __init__(self) -> None:
        self.out, self.err = Stream(sys.stdout), Stream(sys.stderr)
        self._draws = False
        if self.out.isatty() and self.err.isatty():
            self._threads = [OutputThread("the terminal", self.out, self.err)]
        else:
            self._threads = [OutputThread("standard output", self.out), OutputThread("standard error", self.err)]

    def put(self, stream: Stream, call: Callable[[], object], nbytes: int = 0, lines: int = 1) -> bool:
        """Run a call that writes to a stream, after those before it. It returns at once: False if the call is left out."""
        return self._threads[0 if stream is self.out else -1].put(call, nbytes, lines)

    def on_terminal(self, call: Callable[[], object]) -> bool:
        """Run a call that changes what a terminal shows, if one of the streams is a terminal."""
        return self.put(self.out if self.out.isatty() else self.err, call, lines=0)

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
                if thread.lost:
                    logger.warning("%d lines to %s were lost: %s", thread.lost, thread.name, thread.reason)
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
