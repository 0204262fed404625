"""What Linux does for processes that belong together: die with one's parent, be the parent of orphans, be started by fork.

Refuses to know what the processes are for.
"""

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from typing import IO

from fastps.errors import Error

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_libc = ctypes.CDLL(None, use_errno=True)


def ask_to_die_with_parent(parent: int) -> None:
    """Be killed when the parent dies; ends this process at once where that has happened already."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def die_with_parent(parent: int) -> Callable[[], None]:
    """What a new process does first (`preexec_fn`): ask to be killed with its parent."""
    return lambda: ask_to_die_with_parent(parent)


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Descendants whose parents end become this process's children meanwhile. Raises Error where Linux refuses."""
    before = ctypes.c_int()
    _libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1):
        raise Error(f"expected that orphans can be adopted, found: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value)


class AdoptedProcess:
    """A child that another process has forked, with what `subprocess.Popen` offers for one of its own.

    Until `wait` has returned its number is not used again, so signals reach nobody else.
    """

    stdin: IO[bytes] | None = None

    def __init__(self, process_id: int, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.pid = process_id
        self.stdout: IO[bytes] | None = stdout
        self.stderr: IO[bytes] | None = stderr
        self.returncode: int | None = None

    def wait(self) -> int:
        """Wait for its end; its exit code, or -N where signal N ended it."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it was waited for."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, unless it was waited for."""
        self.send_signal(signal.SIGKILL)
