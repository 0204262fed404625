"""What tests start ends with their process, however that ends: by itself, by Ctrl-C, or by SIGKILL.

A forked child asks the kernel to die with the process of the tests. A program cannot be asked, so a guardian, a process of its
own, waits for the end of the tests' process. Then it kills all processes with this run's mark in the environment that they were
started with; their children inherit the mark.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

_MARK = "STARTED_BY_TESTS"
_LONGEST_S = 5.0
_started: list["subprocess.Popen[bytes]"] = []


def guard() -> None:
    """Start the guardian of this process, and mark what this process will start."""
    from fastps.system.processes import ask_to_die_with_parent

    tests, is_asked = os.getpid(), [False]

    def before() -> None:  # the kernel sends the signal when the thread ends that forked, not the process
        is_asked[0] = os.getpid() == tests and threading.current_thread() is threading.main_thread()

    def after() -> None:
        if is_asked[0]:
            ask_to_die_with_parent(tests)

    os.register_at_fork(before=before, after_in_child=after)
    mark = f"{tests}-{time.monotonic_ns()}"
    unmarked = {name: value for name, value in os.environ.items() if name != _MARK}
    command = [sys.executable, "-S", "-E", __file__, str(tests), mark]
    _started.append(subprocess.Popen(command, env=unmarked, stdin=subprocess.DEVNULL, start_new_session=True))
    os.environ[_MARK] = mark


def process_ids() -> list[int]:
    """The guardian's process id, which is no test's child."""
    return [process.pid for process in _started]


def _marked(mark: str) -> list[int]:
    """The processes that were started with this mark."""
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if process.name.isdecimal() and f"{_MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


def _main(tests: int, mark: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends after the tests
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(tests)], [], [])
    deadline = time.monotonic() + _LONGEST_S
    while (found := _marked(mark)) and time.monotonic() < deadline:
        for process_id in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        time.sleep(0.02)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2])
