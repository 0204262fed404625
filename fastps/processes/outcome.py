"""How the workers of a launched job ended, each and together, and what a failed job shows."""

import contextlib
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rich.panel import Panel
from rich.text import Text

from fastps.errors import TRY_AGAIN, NodeLostError, WorkerDiedError
from fastps.network.place import End, Place
from fastps.processes.worker_output import ErrorLines
from fastps.system.memory_limits import OUT_OF_MEMORY, oom_reason
from fastps.system.processes import name_of_signal

# A traceback's last line names the type so.
_CONSEQUENCES = tuple(f"{kind.__module__}.{kind.__qualname__}:" for kind in (WorkerDiedError, NodeLostError))


def how_it_ended(code: int) -> str:
    """A process's exit code in words; -N if signal N ended it."""
    return f"was ended by {name_of_signal(-code)}" if code < 0 else f"ended with exit code {code}"


class Child(Protocol):
    """A child process of this one."""

    @property
    def pid(self) -> int:
        """The process id."""

    def wait(self) -> int:
        """Wait for the end. Return the exit code, or -N if signal N ended it."""


@dataclass
class LaunchedWorker:
    """One worker process: its exit, and its output on stderr. It is a Member."""

    rank: int
    process: Child
    restart: int = 0  # the number of earlier processes of the same rank
    exit_code: int | None = None
    began_ns: int = 0
    replaced_ns: int = 0
    ended_ns: int = 0
    errors: ErrorLines = field(default_factory=ErrorLines)
    was_out_of_memory: bool = False
    last_line: bytes = b""  # of its standard output
    lost_steps: int | None = 0  # with its arena, because no other worker had attached; None: unknown
    was_told_to_end: bool = False

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"worker {self.rank}"

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended. SIGTSTP stops, and SIGCONT wakes, what it has started, too."""
        if self.exit_code is not None:
            return
        self.was_told_to_end = self.was_told_to_end or number in (signal.SIGTERM, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # it is not yet the leader of its group
            if number in (signal.SIGTSTP, signal.SIGCONT):
                os.killpg(self.process.pid, signal.SIGSTOP if number == signal.SIGTSTP else number)
            else:
                os.kill(self.process.pid, number)  # Popen.send_signal would reap it, which the launcher's own wait does

    @property
    def failed(self) -> bool:
        """Whether the process ended with an error or a signal."""
        return self.exit_code not in (None, 0)

    @property
    def is_consequence(self) -> bool:
        """Whether the loss of another worker or node ended the worker, or the launcher did."""
        return self.was_told_to_end or any(line.startswith(_CONSEQUENCES) for line in self.errors.tail)

    @property
    def was_lost(self) -> bool:
        """Whether a signal ended the worker, or the loss of another one: nothing that its script did."""
        return self.is_consequence or (self.exit_code or 0) < 0

    @property
    def ending(self) -> str:
        """The exit in words."""
        if self.exit_code is None:
            return "still running"
        if self.exit_code < 0:
            return f"ended by {name_of_signal(-self.exit_code)}{oom_reason() if self.was_out_of_memory else ''}"
        return f"exit code {self.exit_code}"


@dataclass(frozen=True)
class Outcome:
    """The end of a job."""

    workers: list[LaunchedWorker]  # with those that were replaced
    first_failure: LaunchedWorker | None  # a lost worker is none if the job went on to its end
    ended_by: int  # the signal that ended the job, or 0
    seconds: float
    began_ns: int  # the launcher's start, before any import of a worker
    faults: Mapping[str, Any] | None = None  # what was injected, and its cost, as a JSON row
    hint: str = ""  # a remedy
    end: End | None = None  # of a job of several nodes, as their launchers have agreed
    place: Place | None = None  # this node's in such a job

    @property
    def exit_code(self) -> int:
        """0: done. 1: a worker failed. 75: a node was lost. 130: ended by Ctrl-C. 143: ended by SIGTERM."""
        if self.ended_by:
            return 128 + self.ended_by
        return self.end.code if self.end is not None else 1 if self.first_failure else 0

    @property
    def failed(self) -> bool:
        """Whether the job failed by itself."""
        return self.first_failure is not None or (self.end is not None and self.end.code > 0 and not self.ended_by)


def end_of_node(ended_by: int, first: LaunchedWorker | None, loss: str) -> End:
    """How a node ended: by a signal, by the first failure of its workers, by the loss of its rendezvous, or well."""
    if ended_by:
        return End(128 + ended_by, f"it was ended by {name_of_signal(ended_by)}")
    if first is not None:
        last = f": {first.errors.tail[-1]}" if first.errors.tail else ""
        reason = loss if loss and first.is_consequence else f"worker {first.rank} failed first: {first.ending}{last}"
        return End(TRY_AGAIN if first.was_lost else 1, reason)
    return End(0)


def failure_lines(outcome: Outcome) -> list[str]:
    """The first failure of a job, how the other workers ended, the worker's last line, and remedies."""
    first, end = outcome.first_failure, outcome.end
    of_job = [f"the job ended because of {end.reason}"] if end is not None and end.code and end.reason else []
    if first is None:
        return [*of_job, "the workers of this node had ended well"]
    lines = [*of_job, f"worker {first.rank} failed first: {first.ending}"]
    others = [f"worker {worker.rank}: {worker.ending}" for worker in outcome.workers if worker is not first]
    lines += [f"the others: {', '.join(others)}"] if others else []
    lines += [f"the last line of its stderr: {first.errors.tail[-1]}"] if first.errors.tail else ["it wrote nothing to stderr"]
    lines += [outcome.hint] if outcome.hint else []
    lines += [OUT_OF_MEMORY] if any(worker.was_out_of_memory for worker in outcome.workers) else []
    return lines


def failure_panel(outcome: Outcome) -> Panel:
    """Format the first failure of a job, the worker's last line, and how the other workers ended."""
    # Text, not a string: rich would take a user's [words] for styles, and :100: for an emoji.
    return Panel(Text.from_ansi("\n".join(failure_lines(outcome))), title="fastps: the job failed", border_style="red")
