"""A lock on a file or folder, waited for up to a limit: the process that holds it may hang in a call of a file system."""

import fcntl

from fastps.system.clock import SYSTEM_CLOCK
from fastps.system.deadline import Deadline

_POLL_NS = 10_000_000


def lock(descriptor: int, limit_s: float) -> None:
    """Lock an open file or folder until its descriptor is closed. Raises TimeoutError if another process keeps it longer."""
    deadline = Deadline(SYSTEM_CLOCK.now_ns(), int(limit_s * 1e9))
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if deadline.is_over(SYSTEM_CLOCK.now_ns()):
                raise TimeoutError(f"another process has written there for more than {limit_s:g} s") from None
        SYSTEM_CLOCK.sleep_ns(_POLL_NS)
