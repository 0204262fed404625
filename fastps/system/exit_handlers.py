"""Exit handlers: at exit, open workers leave normally, or with the exception that ended the program.

Python runs the exit handlers whether a program finishes or raises, so the exception has to be recorded separately. A child of
multiprocessing does not run atexit's handlers, but multiprocessing's own finalizers. Signals are not handled here.
"""

import atexit
import os
import sys
from collections.abc import Callable
from multiprocessing import process, util
from types import TracebackType
from typing import Any

from fastps.system.noted_signals import EndedBySignalError

_closers: dict[int, Callable[[str | None], None]] = {}
_finishers: dict[int, Callable[[], None]] = {}
_finishes: list[bool] = []
_failure: list[str] = []
_installed: list[Any] = []
_finalized_in: list[int] = []


def register(owner: object, close: Callable[[str | None], None], finish: Callable[[], None] | None = None) -> None:
    """Call `close(failure)` at exit unless `forget(owner)` is called first. `failure` is one line, or None.

    `finish` waits for the other workers and pulls their last results; see `close_all`.
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
    """Remove the handlers of an owner that was closed."""
    _closers.pop(id(owner), None)
    _finishers.pop(id(owner), None)


def _note_failure(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _failure.append(f"{kind.__name__}: {error}")
    _installed[0](kind, error, trace)


def finish_at_close() -> None:
    """Let owners that close in order call their `finish` functions first: this process's results are the job's."""
    _finishes.append(True)


def finishes() -> bool:
    """Whether `finish_at_close` was called."""
    return bool(_finishes)


def close_all(failure: str | None = None, *, finish: bool = False) -> None:
    """Close all registered owners before the process ends. With `finish`, call their `finish` functions first."""
    if finish:
        for wait in list(_finishers.values()):
            wait()
    for close in list(_closers.values()):
        close(failure)


def failure_of(error: BaseException | None) -> str | None:
    """The one line for an exception that ends a program; None for what ends it in order."""
    in_order = isinstance(error, EndedBySignalError) or (isinstance(error, SystemExit) and error.code in (None, 0))
    return None if error is None or in_order else f"{type(error).__name__}: {error}"


def _close_all() -> None:
    # A child of multiprocessing runs its finalizers while the exception still propagates.
    close_all(_failure[0] if _failure else failure_of(sys.exc_info()[1]))
