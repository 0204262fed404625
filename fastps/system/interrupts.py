"""Ctrl-C that waits: code that starts processes ends them before KeyboardInterrupt leaves it.

Python raises KeyboardInterrupt between any two instructions, also between the start of a process and the line that records it.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker


@contextlib.contextmanager
def deferred_interrupts(note: Callable[[int, object], object]) -> Iterator[None]:
    """Within this context `note` gets SIGINT. At its end the handler of before is called, and KeyboardInterrupt is raised.

    Nothing changes where Python handles no signal: outside of the main thread, and where SIGINT is ignored or kills.

    >>> with deferred_interrupts(print):
    ...     pass
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[int] = []

    def handle(number: int, frame: object) -> None:
        came.append(number)
        note(number, frame)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            with contextlib.suppress(KeyboardInterrupt):
                before(signal.SIGINT, None)
            raise KeyboardInterrupt from None


@contextlib.contextmanager
def ignored_by_children() -> Iterator[None]:
    """Processes that start within this context ignore SIGINT: this process ends them, and they print no traceback.

    KeyboardInterrupt is raised at the end of the context. In the middle of a start it would leave a child without its work.
    """
    resource_tracker.ensure_running()  # its start, with that of the first process of multiprocessing, would unblock SIGINT
    with deferred_interrupts(lambda number, frame: None):  # a library's thread may get SIGINT, although this one blocks it
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
