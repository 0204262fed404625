"""Process control on Linux: children that die with their parent, adopted orphans, and children that another process forked."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from fastps.errors import Error

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_libc = ctypes.CDLL(None, use_errno=True)
_has_computed = [False]  # whether this is a fork of a process that may have


def is_fork() -> bool:
    """Whether this process is a fork of one that may have computed: OpenMP would wait for ever for its parent's threads."""
    return _has_computed[0]


def note_fork(may_have_computed: bool = True) -> None:
    """Note in a fork whether its parent may have computed. A fork server has not."""
    _has_computed[0] = may_have_computed


os.register_at_fork(after_in_child=note_fork)


def ask_to_die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies. Exit at once if the parent is already dead."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def die_with_parent(parent: int) -> Callable[[], None]:
    """A `preexec_fn` that asks the kernel to kill the new process when its parent dies."""
    return lambda: ask_to_die_with_parent(parent)


def start_child(command: Sequence[str], **how: Any) -> "subprocess.Popen[bytes]":
    """Start a process that ends with this one, in a group of its own: Ctrl-C at the terminal reaches only this process.

    `how` has other arguments of Popen; without one there, it has no standard input.
    """
    how.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.Popen(command, process_group=0, preexec_fn=die_with_parent(os.getpid()), **how)


def import_path() -> list[str]:
    """The entries of sys.path that Python looks at: it passes by what is no text, such as a Path."""
    return [entry for entry in sys.path if isinstance(entry, str)]


def start_module(module: str, *arguments: str, **how: Any) -> "subprocess.Popen[bytes]":
    """Start a module in a Python that finds what this one does. It reads a pipe; `how` has other arguments of Popen."""
    path = os.pathsep.join(filter(None, import_path()))
    environment = {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-P", "-m", module, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, **how)


def name_of_signal(number: int) -> str:
    """What messages call a signal; most real-time signals have no name.

    >>> name_of_signal(9), name_of_signal(40)
    ('SIGKILL', 'signal 40')
    """
    return signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Within this context, descendants whose parents end become children of this process. Raises Error if Linux refuses."""
    before = ctypes.c_int()
    _libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1):
        raise Error(f"expected that orphans can be adopted, found: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value)


class AdoptedProcess:
    """A child that another process forked, with the methods that `subprocess.Popen` has for its own children.

    The kernel does not reuse the process id until `wait` has returned, so a signal cannot reach another process.
    """

    def __init__(self, process_id: int, stdout: IO[bytes] | None = None, stderr: IO[bytes] | None = None) -> None:
        self.pid = process_id
        self.stdout = stdout
        self.stderr = stderr
        self.returncode: int | None = None

    def wait(self) -> int:
        """Wait until the process ends. Return its exit code, or -N if signal N ended it."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode
