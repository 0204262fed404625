"""A wait for a thread that may hang, in a call of a file system say: it ends, and a line of the log says what it waits for."""

import logging
import threading

from fastps.system.clock import SYSTEM_CLOCK, Clock
from fastps.system.deadline import Deadline

logger = logging.getLogger("fastps.waiting")

_POLL_S = 0.2
_MOST_SILENT_NS = 5_000_000_000


def ends_within(thread: threading.Thread, limit_s: float, what: str, clock: Clock = SYSTEM_CLOCK) -> bool:
    """Wait until a thread has ended, at most `limit_s`; return whether it has. `what` is what the thread does, for the log."""
    began_ns, limit_ns = clock.now_ns(), int(limit_s * 1e9)
    deadline, silent = Deadline(began_ns, limit_ns), True
    thread.join(min(_POLL_S, limit_s))
    while thread.is_alive() and not deadline.is_over(now_ns := clock.now_ns()):
        if silent and now_ns - began_ns >= min(_MOST_SILENT_NS, limit_ns // 4):
            logger.warning("waiting for at most %g s until %s", limit_s, what)
            silent = False
        thread.join(min(_POLL_S, limit_s))
    return not thread.is_alive()
