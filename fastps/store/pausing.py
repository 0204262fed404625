"""One step of a worker under pdb, at the terminal, for `fastps replay --pause`: only this worker's process has the keyboard."""

import os
import pdb
import signal
import sys
from types import FrameType

from fastps.errors import UsageError

_LIBRARIES = ("fastps", "torch")
"""Packages whose frames are not the script's."""


def pause(worker: int, step: int) -> None:
    """Stop in the script, where it goes on with this step, and let pdb ask at the terminal. Raises UsageError without one."""
    frame = _script_frame()
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
        _read_from(terminal)
    except OSError as error:
        raise UsageError(f"worker {worker}, step {step}: expected a terminal for pdb, found none ({error.strerror})") from None
    # The debugger keeps both open until the process ends.
    debugger = pdb.Pdb(stdin=os.fdopen(terminal, "r"), stdout=os.fdopen(os.dup(terminal), "w"), nosigint=True)
    debugger.prompt = f"(worker {worker}, step {step}) "
    debugger.reset()
    debugger.set_next(frame)  # as set_trace does, but not in the library's calls on the way back
    outer: FrameType | None = frame
    while outer is not None:
        outer.f_trace = debugger.trace_dispatch
        debugger.botframe, outer = outer, outer.f_back
    sys.settrace(debugger.trace_dispatch)


def _script_frame() -> FrameType:
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        frame = frame.f_back
    return frame


def _read_from(terminal: int) -> None:
    """Make this process's group the one that may read from the terminal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        os.tcsetpgrp(terminal, os.getpgrp())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
