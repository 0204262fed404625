"""How a process ends: workers that were not closed leave at exit, in good order or with the exception that ended the program.

A program that raises would otherwise look like one that finished, for both run the exit handlers. A child that multiprocessing
made runs none of atexit's, but its own. Refuses to handle signals.
"""

import atexit
import os
import sys
from collections.abc import Callable
from multiprocessing import process, util
from types import TracebackType
from typing import Any

_closers: dict[int, Callable[[str | None], None]] = {}
_finishers: dict[int, Callable[[], None]] = {}
_failure: list[str] = []
_installed: list[Any] = []
_finalized_in: list[int] = []


def register(owner: object, close: Callable[[str | None], None], finish: Callable[[], None] | None = None) -> None:
    """Call `close(failure)` at exit unless `forget(owner)` came first; failure is one line, or None.

    `finish` waits for the other workers and takes their last results; see `close_all`.
    """
    if not _installed:
        _installed.append(sys.excepthook)
        sys.excepthook = _note_failure
        atexit.register(_close_all)
    if process.parent_process() is not None and os.getpid() not in _finalized_in:
        _finalized_in.append(os.getpid())
        util.Finalize(None, _close_all, exitpriority=0)
    _closers[id(owner)] = close
    if finish is not None:
        _finishers[id(owner)] = finish


def forget(owner: object) -> None:
    """The owner was closed."""
    _closers.pop(id(owner), None)
    _finishers.pop(id(owner), None)


def _note_failure(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _failure.append(f"{kind.__name__}: {error}")
    _installed[0](kind, error, trace)


def close_all(failure: str | None = None, *, finish: bool = False) -> None:
    """Close what is open before the process ends; with `finish` what every other worker did is taken first."""
    if finish:
        for wait in list(_finishers.values()):
            wait()
    for close in list(_closers.values()):
        close(failure)


def _close_all() -> None:
    close_all(_failure[0] if _failure else _failure_on_its_way())


def _failure_on_its_way() -> str | None:
    """Of a child that multiprocessing made: it ends within the exception's own way out."""
    error = sys.exc_info()[1]
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return None
    return f"{type(error).__name__}: {error}"
