"""The GPU check as a whole: each part in a process of its own with a time limit, and the report written after each part.

A part that raises, hangs, crashes or runs out of memory is a row of the report. The process of a part hands its rows over in a
file, one by one, so that none is lost with it.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fastps.bench.gpu.report import Report, not_run
from fastps.bench.gpu.surroundings import gpu_of_this_machine
from fastps.bench.measure import Row
from fastps.system.interrupts import deferred_interrupts
from fastps.system.memory_limits import oom_kills, oom_reason
from fastps.system.processes import die_with_parent

EXIT_OK, EXIT_FAILED = 0, 1
_STACK_S, _KILL_S = 10.0, 30.0  # that a process has to print where it hangs, and to end after SIGKILL
_TAIL_LINES = 40


@dataclass(frozen=True)
class Part:
    """A part of the check: its time limit, the GPUs it needs, the tool under which it runs, and whether it is in --quick."""

    limit_s: float
    gpus: int = 1
    tool: tuple[str, ...] = ()
    in_quick: bool = True


@dataclass(frozen=True)
class Settings:
    """What the process of a part is told."""

    gpus: int = 1
    quick: bool = False

    @property
    def parameters(self) -> int:
        """The size of what is timed."""
        return 1_000_000 if self.quick else 100_000_000


PARTS = {
    "kernels": Part(600),
    "bandwidth": Part(600),
    "IPC": Part(300),
    "one process": Part(600),
    "two processes": Part(900),
    "peers": Part(900, gpus=2),
    "several GPUs": Part(1800, gpus=2),
    "faults": Part(900),
    "training": Part(1800, in_quick=False),
    "step": Part(900),
    "step with overlap": Part(900),
    "compute-sanitizer": Part(1800, tool=("compute-sanitizer", "--error-exitcode", "9"), in_quick=False),
}
COMMAND = (sys.executable, "-m", "fastps.bench.gpu.check")


def check(report: Report, settings: Settings, tell: Callable[[str], object]) -> int:
    """Run all parts, write the report after each, and return the exit code: 0 if all that could run passed, else 1."""
    report.expect(PARTS)
    for name, part in PARTS.items():
        began_s = time.monotonic()
        reason = _left_out(part, settings)
        rows = [not_run(name, "all", reason)] if reason else run_part(name, part, settings)
        tell(report.add(name, rows, time.monotonic() - began_s))
    return EXIT_OK if report.passed else EXIT_FAILED


def _left_out(part: Part, settings: Settings) -> str:
    """Why a part does not run here; empty if it does."""
    if settings.gpus < part.gpus:
        return f"needs {part.gpus} GPUs, found {settings.gpus}"
    if settings.quick and not part.in_quick:
        return "left out by --quick"
    if part.tool and shutil.which(part.tool[0]) is None:
        return f"{part.tool[0]} is not installed"
    return ""


def run_part(name: str, part: Part, settings: Settings) -> list[Row]:
    """Return the rows of a part, and one more if its process did not end well: how it ended, and where."""
    with tempfile.TemporaryDirectory(prefix="fastps-gpu-check-") as folder:
        handed_over, log = Path(folder) / "rows", Path(folder) / "log"
        handed_over.touch()
        with log.open("wb") as output:
            command = [*part.tool, *COMMAND, name, json.dumps(asdict(settings)), str(handed_over)]
            ending = _run(command, output.fileno(), part.limit_s)
        whole, _, _ = handed_over.read_text().rpartition("\n")  # what follows the last line end was cut off
        rows: list[Row] = [json.loads(line) for line in whole.splitlines()]
        lines = log.read_text(errors="replace").splitlines()
    if not ending and rows:
        return rows
    reached = f"after {len(rows)} rows, the last {rows[-1]['name']}" if rows else "before its first row"
    said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    text = f"{ending or 'it ended'} {reached}; what follows was not reached{f': {said}' if said else ''}"
    return [*rows, {"check": name, "name": "its process", "ok": False, "missing": text, "output": lines[-_TAIL_LINES:]}]


def _run(command: Sequence[str], output: int, limit_s: float) -> str:
    """Run a command in a session of its own; returns how it failed, or nothing. Nothing of its session is left."""
    killed_before = oom_kills()
    with contextlib.ExitStack() as stack:
        with deferred_interrupts(lambda number, frame: None):  # it could come between the start and the next line
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with_parent(os.getpid()),
            )
            stack.callback(_end, process)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # faulthandler prints the stack of each thread
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STACK_S)
            return f"it did not end within {limit_s:g} s,"
    if code < 0:
        was_out_of_memory = code == -signal.SIGKILL and oom_kills() > killed_before
        return f"it was ended by {signal.Signals(-code).name}{oom_reason() if was_out_of_memory else ''}"
    return f"it ended with exit code {code}" if code else ""


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_S)  # one that a driver holds is left to the kernel


def make_report(file: Path | None, quick: bool) -> tuple[Report, Settings]:
    """The report, still empty, and the settings for this machine. Raises DeviceError without a GPU, and as `Report`."""
    gpu = gpu_of_this_machine()
    return Report(gpu, file, quick), Settings(int(gpu["count"]), quick)
