"""Ctrl-C as a count: code that starts processes ends them before KeyboardInterrupt leaves it.

Python raises KeyboardInterrupt between any two instructions, also between the start of a process and the line that records it.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interrupts:
    """How often SIGINT has come within the context of `counted_interrupts`."""

    def __init__(self) -> None:
        self.count = 0

    def note(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        self.count += 1


@contextlib.contextmanager
def counted_interrupts() -> Iterator[Interrupts]:
    """Within this context SIGINT is counted. At its end the handler of before is called, and KeyboardInterrupt is raised.

    Nothing changes, and the count stays 0, where Python handles no signal: outside of the main thread, and where SIGINT is
    ignored or kills.

    >>> with counted_interrupts() as interrupts:
    ...     interrupts.count
    0
    """
    interrupts = Interrupts()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield interrupts
        return
    signal.signal(signal.SIGINT, interrupts.note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
        if interrupts.count:
            with contextlib.suppress(KeyboardInterrupt):
                before(signal.SIGINT, None)
            raise KeyboardInterrupt from None
