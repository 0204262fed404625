"""A worker under pdb at the terminal: one step, for `fastps replay --pause`, or where the script calls `breakpoint()`.

Workers have groups of processes of their own, to which the terminal sends neither keys nor Ctrl-C. While pdb asks, the worker's
group has the terminal; then the launcher's has it again. Of several workers that stop, one asks at a time.
"""

import fcntl
import functools
import os
import pdb
import signal
import sys
from types import FrameType
from typing import Any

from fastps.errors import UsageError

_LIBRARIES = ("fastps", "torch")
"""Packages whose frames are not the script's."""


class _AtTerminal(pdb.Pdb):
    """pdb with the terminal instead of the standard streams, which are the launcher's. Raises OSError without a terminal."""

    def __init__(self, prompt: str) -> None:
        # Both stay open until the process ends.
        self._terminal = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
        super().__init__(stdin=os.fdopen(self._terminal, "r"), stdout=os.fdopen(os.dup(self._terminal), "w"), nosigint=True)
        self.prompt = prompt

    def cmdloop(self, intro: Any = None) -> None:
        """Ask, while this process's group has the terminal. Ctrl-Z would leave it with a group that stands still."""
        fcntl.flock(self._terminal, fcntl.LOCK_EX)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU, signal.SIGTSTP})
        before = os.tcgetpgrp(self._terminal)
        try:
            os.tcsetpgrp(self._terminal, os.getpgrp())
            super().cmdloop(intro)
        finally:
            os.tcsetpgrp(self._terminal, before)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            fcntl.flock(self._terminal, fcntl.LOCK_UN)


@functools.cache
def _asking(prompt: str) -> _AtTerminal:
    return _AtTerminal(prompt)


def pause(worker: int, step: int) -> None:
    """Stop in the script, where it goes on with this step, and let pdb ask at the terminal. Raises UsageError without one."""
    frame = _script_frame()
    try:
        debugger = _asking(f"(worker {worker}, step {step}) ")
    except OSError as error:
        raise UsageError(f"worker {worker}, step {step}: expected a terminal for pdb, found none ({error.strerror})") from None
    debugger.reset()
    debugger.set_next(frame)  # as set_trace does, but not in the library's calls on the way back
    outer: FrameType | None = frame
    while outer is not None:
        outer.f_trace = debugger.trace_dispatch
        debugger.botframe, outer = outer, outer.f_back
    sys.settrace(debugger.trace_dispatch)


def ask(*, header: str | None = None) -> None:
    """What `breakpoint()` calls: let pdb ask at the terminal where the script is. Without a terminal it is pdb's own."""
    try:
        debugger = _asking(f"(worker {os.environ.get('FASTPS_RANK', '0')}) ")
    except OSError:
        return pdb.set_trace(header=header)
    if header is not None:
        debugger.message(header)
    debugger.set_trace(sys._getframe().f_back)


def _script_frame() -> FrameType:
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        frame = frame.f_back
    return frame
