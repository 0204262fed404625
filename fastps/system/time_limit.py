"""Limits for what may hang: a call over a connection that is cut, or of a file system whose disk does not answer."""

import contextlib
import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from fastps.system.clock import SYSTEM_CLOCK, Clock
from fastps.system.deadline import Deadline

logger = logging.getLogger("fastps.waiting")

Result = TypeVar("Result")
_POLL_S = 0.2
_LOCK_POLL_NS = 10_000_000
_MOST_SILENT_NS = 5_000_000_000


def ends_within(thread: threading.Thread, limit_s: float, what: str, clock: Clock = SYSTEM_CLOCK) -> bool:
    """Wait until a thread has ended, at most `limit_s`; return whether it has. The log says `what` is waited for, if not ""."""
    began_ns, limit_ns = clock.now_ns(), int(limit_s * 1e9)
    deadline, silent = Deadline(began_ns, limit_ns), bool(what)
    thread.join(min(_POLL_S, limit_s))
    while thread.is_alive() and not deadline.is_over(now_ns := clock.now_ns()):
        if silent and now_ns - began_ns >= min(_MOST_SILENT_NS, limit_ns // 4):
            logger.warning("waiting for at most %g s until %s", limit_s, what)
            silent = False
        thread.join(min(_POLL_S, limit_s))
    return not thread.is_alive()


def call_within(
    limit_s: float, call: Callable[[], Result], what: str = "", discard: Callable[[Result], object] = lambda late: None
) -> Result:
    """Call, and return the result or raise the error. After the limit a later result is handed to `discard`.

    The call runs in a thread of its own, which lives on after the limit; where no thread can be started, here and without a
    limit. The log says `what` is waited for, if not "". Raises TimeoutError.

    >>> call_within(1.0, lambda: 3)
    3
    """
    answer: Future[Result] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    thread = threading.Thread(target=run, name="fastps-time-limit", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # of Python, which names no cause
        logger.warning("no thread can be started (%s), so nothing limits the wait until %s", error, what or "a call ends")
        return call()
    if not (ends_within(thread, limit_s, what) or answer.done()):
        answer.add_done_callback(lambda late: late.exception() or discard(late.result()))
        raise TimeoutError(f"expected an answer within {limit_s:g} s")
    return answer.result()


@contextlib.contextmanager
def locked(folder: Path, limit_s: float) -> Iterator[int]:
    """Lock a folder, and yield its open descriptor. Raises TimeoutError if another process keeps it locked for longer."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = Deadline(SYSTEM_CLOCK.now_ns(), int(limit_s * 1e9))
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if deadline.is_over(SYSTEM_CLOCK.now_ns()):
                    raise TimeoutError(f"another process has written there for more than {limit_s:g} s") from None
            SYSTEM_CLOCK.sleep_ns(_LOCK_POLL_NS)
        yield descriptor
    finally:
        os.close(descriptor)
