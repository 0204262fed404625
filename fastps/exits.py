"""How a process ends: workers that were not closed leave at exit, in good order or with the exception that ended the program.

A program that raises would otherwise look like one that finished, for both run the exit handlers. Refuses to handle signals.
"""

import atexit
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

_closers: dict[int, Callable[[str | None], None]] = {}
_failure: list[str] = []
_installed: list[Any] = []


def register(owner: object, close: Callable[[str | None], None]) -> None:
    """Call `close(failure)` at exit unless `forget(owner)` came first; failure is one line, or None."""
    if not _installed:
        _installed.append(sys.excepthook)
        sys.excepthook = _note_failure
        atexit.register(_close_all)
    _closers[id(owner)] = close


def forget(owner: object) -> None:
    """The owner was closed."""
    _closers.pop(id(owner), None)


def _note_failure(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _failure.append(f"{kind.__name__}: {error}")
    _installed[0](kind, error, trace)


def _close_all() -> None:
    for close in list(_closers.values()):
        close(_failure[0] if _failure else None)
