"""Say where processes hang: the Python stacks of each, its state, and the kernel function in which it waits.

py-spy reads the stacks from outside. Where it may not trace, a child that `tests.support.processes` started prints its own, by
faulthandler, into the captured standard error.
"""

import contextlib
import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

_NUMBER = signal.SIGUSR2
_TIMEOUT_S = 10


def answer() -> None:
    """Let this process print its stacks when it gets the signal. Call it in a forked child."""
    faulthandler.register(_NUMBER, file=2, all_threads=True)


def show(process_ids: Iterable[int], why: str) -> None:
    """Print the stacks of processes to standard error, which pytest shows with the test's failure."""
    for process_id in process_ids:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            print(f"--- {why}: {_describe(process_id)}\n{_stacks(process_id)}", file=sys.stderr, flush=True)


def descendants(process_id: int) -> list[int]:
    """The children of all threads of a process, their children, and so on."""
    found, pending = [], [process_id]
    while pending:
        with contextlib.suppress(OSError):  # a thread or process that ended meanwhile
            for thread in Path(f"/proc/{pending.pop()}/task").iterdir():
                children = [int(number) for number in (thread / "children").read_text().split()]
                found += children
                pending += children
    return found


def _describe(process_id: int) -> str:
    process = Path(f"/proc/{process_id}")
    command = process.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    return f"process {process_id} ({command.strip()}), state {_status(process_id, 'State')}, waits in {_waits_in(process)}"


def _waits_in(process: Path) -> str:
    with contextlib.suppress(OSError):
        return process.joinpath("wchan").read_text() or "nothing"
    return "unknown"


def _status(process_id: int, name: str) -> str:
    lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name + ":")), "")


def _stacks(process_id: int) -> str:
    program = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    said = "py-spy is not installed"
    if program:
        command = [program, "dump", "--nonblocking", "--pid", str(process_id)]
        with contextlib.suppress(subprocess.TimeoutExpired):
            ended = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
            if ended.returncode == 0:
                return ended.stdout
            said = (ended.stderr.strip() or ended.stdout.strip()).splitlines()[-1]
    if int(_status(process_id, "SigCgt"), 16) & (1 << (_NUMBER - 1)):
        os.kill(process_id, _NUMBER)
        time.sleep(0.2)  # for it to write
        return f"{said}; its own words are above"
    return said
