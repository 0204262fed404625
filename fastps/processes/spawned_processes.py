"""The processes of fastps.spawn's workers: how they start, how their end is noticed, and how all of them are ended.

By default a new process imports torch and forks the workers, as under `fastps run`: the state of the caller, its threads and
locks, does not reach them. Each worker leads a process group of its own, so Ctrl-C reaches only the caller, which passes it on.
"""

import contextlib
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from typing import IO, Any, Protocol

from fastps.processes import handover, spawned
from fastps.processes.forkserver_client import ForkServer
from fastps.processes.program import TORCH_IMPORTS
from fastps.system.clock import Clock
from fastps.system.interrupts import Interrupts
from fastps.system.memory_limits import oom_kills
from fastps.system.processes import adopting_orphans, ask_to_die_with_parent

logger = logging.getLogger("fastps.spawn")

GRACE_NS = 2_000_000_000  # between the signals that end workers
_IMPORT_NS = 120_000_000_000  # the longest time for the fork server's imports
_TICK_S = 0.05
# A new process has the caller's sys.path before it imports anything. It ends with the caller, even if that ends at once.
_BEGIN = """\
import json, sys
path, parent = json.loads(sys.argv.pop(1))
sys.path[:] = path
from fastps.system.processes import ask_to_die_with_parent
ask_to_die_with_parent(parent)
"""
_SERVER = _BEGIN + "from fastps.processes.forkserver import main\nmain()\n"
_WORKER = _BEGIN + "from fastps.processes.spawned import main\nmain()\n"


class Child(Protocol):
    """A child process of the caller."""

    @property
    def pid(self) -> int:
        """The process id."""

    def wait(self) -> int:
        """Wait for the end. Return the exit code, or -N if signal N ended it."""


class SpawnedWorker:
    """A worker's process and its report.

    Attributes:
        rank: the worker's number.
        pid: its process id.
        exit_code: its exit code, or -N if signal N ended it; None while it runs.
        outcome: what it reported; None while it runs, and if it ended without a report.
    """

    def __init__(self, rank: int, child: Child, report: IO[bytes]) -> None:
        self.rank = rank
        self.pid = child.pid
        self.exit_code: int | None = None
        self.outcome: handover.Outcome | None = None
        self._child = child
        self._report = report
        self.sentinel = os.pidfd_open(child.pid)

    def look(self) -> None:
        """Notice the worker's end. What a failed worker started itself, in its process group, ends with it."""
        if self.exit_code is not None or not connection.wait([self.sentinel], 0):
            return
        self.outcome = handover.reported(self._report)
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)  # until it is reaped, no other process gets its number
            if self.outcome is None or self.outcome.error is not None:
                os.killpg(self.pid, signal.SIGKILL)
        self.exit_code = self._child.wait()
        os.close(self.sentinel)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to a worker that runs."""
        self.look()
        if self.exit_code is None:
            os.kill(self.pid, number)


@dataclass
class _Forked:
    """A child that multiprocessing forked."""

    process: Any

    @property
    def pid(self) -> int:
        return self.process.pid  # type: ignore[no-any-return]

    def wait(self) -> int:
        self.process.join()
        code: int = self.process.exitcode
        self.process.close()
        return code


class Crew:
    """The workers of one call, which `start` appends to `workers`.

    Args:
        work: what they do.
        variables: each worker's own environment variables, by rank; the rest is the caller's.
        environment: the whole environment of each worker where it is a new process.
    """

    def __init__(self, environments: Sequence[Mapping[str, str]], interrupts: Interrupts, clock: Clock) -> None:
        self.workers: list[SpawnedWorker] = []
        self.killed_before = oom_kills()
        self._environments = environments
        self._interrupts = interrupts
        self._clock = clock
        self._reports = [handover.memory_file("outcome") for _ in environments]

    def start(self, work: handover.Work, file: IO[bytes] | None, start_method: str) -> None:
        """Start all workers; fewer if Ctrl-C comes first. `file` has the work, except for "fork"."""
        if file is None:
            self._fork(work)
        elif start_method == "spawn" or not self._serve(file):
            for rank in range(len(self.workers), len(self._environments)):
                if not self._interrupts.count:
                    reports = [self._reports[rank].fileno()]
                    arguments = [str(rank), str(file.fileno()), str(reports[0])]
                    self._add(_new_process(_WORKER, arguments, self._environments[rank], [file.fileno(), *reports]))

    def _add(self, child: Child) -> None:
        self.workers.append(SpawnedWorker(len(self.workers), child, self._reports[len(self.workers)]))

    def _fork(self, work: handover.Work) -> None:
        for rank, environment in enumerate(self._environments):
            arguments = (work, rank, environment, self._reports[rank].fileno(), os.getpid())
            process = multiprocessing.get_context("fork").Process(target=_work, args=arguments, name=f"fastps worker {rank}")
            process.start()
            self._add(_Forked(process))

    def _serve(self, file: IO[bytes]) -> bool:
        """Let a fork server fork the workers. Returns whether it did; the log says why not."""
        reports = [report.fileno() for report in self._reports]
        imports = TORCH_IMPORTS if "torch" in sys.modules else ()
        server = ForkServer(self._environments[0], "", imports)
        with server.inherited as inherited:
            arguments = [str(inherited.fileno()), *imports]
            passed = [inherited.fileno(), file.fileno(), *reports]
            process = _new_process(_SERVER, arguments, self._environments[0], passed)
        try:
            self._await_imports(server, process)
            if server.is_ready and not self._interrupts.count:
                program = ["-m", spawned.__name__]
                with adopting_orphans():
                    for rank, environment in enumerate(self._environments):
                        order = [*program, str(rank), str(file.fileno()), ",".join(map(str, reports))]
                        child = server.fork(environment, order, captured=False)
                        if child is None:
                            server.refusal = "it made no worker"
                            break
                        self._add(child)
            if server.refusal:
                logger.warning("workers are new processes: the fork server is not ready: %s", server.refusal)
            return not server.refusal
        finally:
            server.close()
            if server.refusal or self._interrupts.count:
                process.kill()
            process.wait()

    def _await_imports(self, server: ForkServer, process: "subprocess.Popen[bytes]") -> None:
        deadline_ns = self._clock.now_ns() + _IMPORT_NS
        while not (server.is_ready or server.refusal or self._interrupts.count):
            connection.wait([server.control], _TICK_S)
            if self._clock.now_ns() >= deadline_ns:
                server.refusal = "out of time"

    def look(self, timeout_s: float = _TICK_S) -> None:
        """Wait until a worker ends, for a limited time, and notice what has ended."""
        connection.wait([worker.sentinel for worker in self.running], timeout_s)
        for worker in self.running:
            worker.look()

    @property
    def running(self) -> list[SpawnedWorker]:
        """The workers whose end has not been noticed."""
        return [worker for worker in self.workers if worker.exit_code is None]

    def end(self) -> None:
        """End all running workers: by SIGINT after Ctrl-C, then by SIGTERM, then by SIGKILL; at a second Ctrl-C by SIGKILL."""
        for number in [signal.SIGINT] * (self._interrupts.count > 0) + [signal.SIGTERM, signal.SIGKILL]:
            if self._interrupts.count > 1:
                number = signal.SIGKILL
            for worker in self.running:
                worker.send(number)
            deadline_ns = self._clock.now_ns() + GRACE_NS
            while self.running and self._clock.now_ns() < deadline_ns:
                if self._interrupts.count > 1 and number != signal.SIGKILL:
                    break
                self.look()
        while self.running:
            self.look()
        for report in self._reports:
            report.close()


def _new_process(
    program: str, arguments: Sequence[str], environment: Mapping[str, str], passed: Sequence[int]
) -> "subprocess.Popen[bytes]":
    """Start a Python process that inherits the descriptors `passed`, and standard output."""
    setting = json.dumps([sys.path, os.getpid()])
    command = [sys.executable, "-c", program, setting, *arguments]
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, pass_fds=passed, process_group=0)


def _work(work: handover.Work, rank: int, environment: Mapping[str, str], outcome: int, parent: int) -> None:
    """Run a worker that was forked from the caller."""
    os.setpgid(0, 0)
    ask_to_die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)
    spawned.run(lambda: work, rank, outcome)
