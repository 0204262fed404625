"""The GPU check as a whole: each part in a process of its own with a time limit, and the report written as rows come.

A part that raises, hangs, crashes or runs out of memory is a row of the report. The process of a part hands its rows over in a
file, one by one, so that none is lost with it.
"""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from fastps.bench.gpu.report import Report, not_run
from fastps.bench.gpu.surroundings import gpu_of_this_machine
from fastps.bench.measure import Row
from fastps.system.interrupts import deferred_interrupts
from fastps.system.memory_limits import oom_kills, oom_reason
from fastps.system.processes import die_with_parent

EXIT_OK, EXIT_FAILED = 0, 1
_STACK_S, _KILL_S = 10.0, 30.0  # that a process has to print where it hangs, and to end after SIGKILL
_CHECK_S = 1.0  # between two checks for new rows of a part that runs
LEAST_S = 20.0  # of --minutes for a part: its process starts torch and CUDA first
_TAIL_LINES = 40


@dataclass(frozen=True)
class Part:
    """A part of the check: its time limit, the GPUs it needs, the tool under which it runs, and whether it is in --quick.

    `has_run`: a GPU has run all of it. With --minutes such parts come last.
    """

    limit_s: float
    gpus: int = 1
    tool: tuple[str, ...] = ()
    in_quick: bool = True
    has_run: bool = False


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
    "kernels": Part(600, has_run=True),
    "bandwidth": Part(600, has_run=True),
    "IPC": Part(300, has_run=True),
    "one process": Part(600, has_run=True),
    "two processes": Part(900, has_run=True),
    "peers": Part(900, gpus=2),
    "several GPUs": Part(1800, gpus=2),
    "several GPUs on one": Part(1800),
    "faults": Part(900, has_run=True),
    "training": Part(1800, in_quick=False),
    "step": Part(900),
    "step with overlap": Part(900),
    "compute-sanitizer": Part(1800, tool=("compute-sanitizer", "--error-exitcode", "9"), in_quick=False),
}
COMMAND = (sys.executable, "-m", "fastps.bench.gpu.check")


def check(report: Report, settings: Settings, tell: Callable[[str], object], minutes: float | None = None) -> int:
    """Run all parts, write the report as rows come, and return the exit code: 0 if all that could run passed, else 1.

    Within `minutes`, parts that no GPU has run come first. Each gets a share of the minutes that are left, by its limit.
    """
    report.expect(PARTS)
    ends_s = time.monotonic() + (60 * minutes if minutes is not None else math.inf)
    waiting = {name: part for name, part in PARTS.items() if not _left_out(part, settings)}
    for name, part in sorted(PARTS.items(), key=lambda each: minutes is not None and each[1].has_run):
        began_s, reason = time.monotonic(), _left_out(part, settings)
        left_s = ends_s - began_s
        if not reason and left_s < LEAST_S:
            reason = f"{max(0, left_s):.0f} s of --minutes {minutes:g} were left, expected at least {LEAST_S:.0f} s"
        limited, add = replace(part, limit_s=_limit_s(part, waiting.values(), left_s)), partial(report.add, name)
        rows = [not_run(name, "all", reason)] if reason else run_part(name, limited, settings, add)
        waiting.pop(name, None)
        tell(add(rows, time.monotonic() - began_s))
    return EXIT_OK if report.passed else EXIT_FAILED


def _limit_s(part: Part, waiting: Iterable[Part], left_s: float) -> float:
    """The time limit of a part where all of `waiting`, itself among them, have `left_s` seconds: at least LEAST_S.

    >>> _limit_s(Part(600), [Part(600), Part(1800)], 100.0)
    25.0
    """
    share = part.limit_s / max(part.limit_s, sum(each.limit_s for each in waiting))
    return min(part.limit_s, max(LEAST_S, left_s * share))


def _left_out(part: Part, settings: Settings) -> str:
    """Why a part does not run here; empty if it does."""
    if settings.gpus < part.gpus:
        return f"needs {part.gpus} GPUs, found {settings.gpus}"
    if settings.quick and not part.in_quick:
        return "left out by --quick"
    if part.tool and shutil.which(part.tool[0]) is None:
        return f"{part.tool[0]} is not installed"
    return ""


def run_part(name: str, part: Part, settings: Settings, add: Callable[[Sequence[Row], float], object]) -> list[Row]:
    """Return the rows of a part, and one more if its process did not end well: how it ended, and where.

    While the process runs, `add` gets the rows so far whenever there are more, and the seconds that it has run.
    """
    with tempfile.TemporaryDirectory(prefix="fastps-gpu-check-") as folder:
        handed_over, log = Path(folder) / "rows", Path(folder) / "log"
        handed_over.touch()
        began_s, known = time.monotonic(), 0

        def check_rows() -> None:
            nonlocal known
            rows = _whole_rows(handed_over)
            if len(rows) > known:
                known = len(rows)
                reason = f"the check ended after {known} rows of this part"
                add([*rows, not_run(name, "the rest", reason)], time.monotonic() - began_s)

        with log.open("wb") as output:
            command = [*part.tool, *COMMAND, name, json.dumps(asdict(settings)), str(handed_over)]
            ending = _run(command, output.fileno(), part.limit_s, check_rows)
        rows = _whole_rows(handed_over)
        lines = log.read_text(errors="replace").splitlines()
    if not ending and rows:
        return rows
    reached = f"after {len(rows)} rows, the last {rows[-1]['name']}" if rows else "before its first row"
    said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    text = f"{ending or 'it ended'} {reached}; what follows was not reached{f': {said}' if said else ''}"
    return [*rows, {"check": name, "name": "its process", "ok": False, "missing": text, "output": lines[-_TAIL_LINES:]}]


def _whole_rows(handed_over: Path) -> list[Row]:
    """The rows that a part's process has written so far. What follows the last line end is cut off."""
    whole, _, _ = handed_over.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def _run(command: Sequence[str], output: int, limit_s: float, check_rows: Callable[[], None]) -> str:
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
        ends_s = time.monotonic() + limit_s
        while (code := _code_within(process, _CHECK_S)) is None:
            check_rows()
            if time.monotonic() > ends_s:
                process.send_signal(signal.SIGABRT)  # faulthandler prints the stack of each thread
                _code_within(process, _STACK_S)
                return f"it did not end within {limit_s:.4g} s,"
    if code < 0:
        was_out_of_memory = code == -signal.SIGKILL and oom_kills() > killed_before
        return f"it was ended by {signal.Signals(-code).name}{oom_reason() if was_out_of_memory else ''}"
    return f"it ended with exit code {code}" if code else ""


def _code_within(process: "subprocess.Popen[bytes]", timeout_s: float) -> int | None:
    """The exit code of a process that ends within `timeout_s`, else None."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(timeout_s)
    return None


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    _code_within(process, _KILL_S)  # one that a driver holds is left to the kernel


def make_report(file: Path | None, quick: bool) -> tuple[Report, Settings]:
    """The report, still empty, and the settings for this machine. Raises DeviceError without a GPU, and as `Report`."""
    gpu = gpu_of_this_machine()
    return Report(gpu, file, quick), Settings(int(gpu["count"]), quick)
