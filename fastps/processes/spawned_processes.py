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
from functools import partial
from multiprocessing import connection
from typing import IO, Any

from fastps.processes import handover, spawned
from fastps.processes.ending import Ending
from fastps.processes.forkserver import ForkServer, seed_generators
from fastps.processes.options import GRACE_S
from fastps.processes.outcome import Child, LaunchedWorker
from fastps.processes.program import TORCH_IMPORTS
from fastps.system.clock import Clock
from fastps.system.memory_limits import oom_kills
from fastps.system.processes import adopting_orphans, ask_to_die_with_parent, import_path

logger = logging.getLogger("fastps.spawn")

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


class SpawnedWorker(LaunchedWorker):
    """A worker's process and its report."""

    def __init__(self, rank: int, process: Child, report: IO[bytes]) -> None:
        super().__init__(rank, process)
        self.outcome: handover.Outcome | None = None  # what it reported; None while it runs, and if it ended without
        self._report = report
        self.sentinel = os.pidfd_open(process.pid)  # readable once it has ended

    def look(self) -> None:
        """Notice the worker's end. What a failed worker started itself, in its process group, ends with it."""
        if self.exit_code is not None or not connection.wait([self.sentinel], 0):
            return
        self.outcome = handover.reported(self._report)
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)  # until it is reaped, nobody else gets its number
            if self.outcome is None or self.outcome.error is not None:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.exit_code = self.process.wait()
        os.close(self.sentinel)


class _Forked:
    def __init__(self, process: Any) -> None:
        self.pid: int = process.pid
        self._process = process

    def wait(self) -> int:
        self._process.join()
        code: int = self._process.exitcode
        self._process.close()
        return code


class Crew:
    """The workers of one call, which `start` appends to `workers`. `environments`: of each, by rank."""

    def __init__(self, environments: Sequence[Mapping[str, str]], clock: Clock) -> None:
        self.workers: list[SpawnedWorker] = []
        self.ending = Ending(self.workers, GRACE_S, clock)
        self.killed_before = oom_kills()
        self._environments = environments
        self._clock = clock
        self._reports = [handover.memory_file("outcome") for _ in environments]

    def start(self, work: handover.Work, file: IO[bytes] | None, start_method: str) -> None:
        """Start all workers; fewer if Ctrl-C comes first. `file` has the work, except for "fork"."""
        if file is None:
            self._fork(work)
        elif start_method == "spawn" or not self._serve(file):
            for rank in range(len(self.workers), len(self._environments)):
                if not self.ending.interrupts:
                    reports = [self._reports[rank].fileno()]
                    arguments = [str(rank), str(file.fileno()), str(reports[0])]
                    self._add(_new_process(_WORKER, arguments, self._environments[rank], [file.fileno(), *reports]))

    def _add(self, child: Child) -> None:
        rank = len(self.workers)
        self.workers.append(SpawnedWorker(rank, child, self._reports[rank]))

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
            pause = partial(connection.wait, [server.control], _TICK_S)
            server.await_ready(lambda: self.ending.interrupts > 0, pause, self._clock)
            if server.is_ready and not self.ending.interrupts:
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
            if server.refusal or self.ending.interrupts:
                process.kill()
            process.wait()

    def look(self) -> None:
        """Wait until a worker ends, for a limited time, and notice what has ended. Pass signals on."""
        self.ending.obey()
        connection.wait([worker.sentinel for worker in self.running], _TICK_S)
        for worker in self.running:
            worker.look()

    @property
    def running(self) -> list[SpawnedWorker]:
        """The workers whose end has not been noticed."""
        return [worker for worker in self.workers if worker.exit_code is None]

    def end(self) -> None:
        """End the workers that still run."""
        self.ending.begin()
        while self.running:
            self.look()
        for report in self._reports:
            report.close()


def _new_process(
    program: str, arguments: Sequence[str], environment: Mapping[str, str], passed: Sequence[int]
) -> "subprocess.Popen[bytes]":
    setting = json.dumps([import_path(), os.getpid()])
    command = [sys.executable, "-c", program, setting, *arguments]
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, pass_fds=passed, process_group=0)


def _work(work: handover.Work, rank: int, environment: Mapping[str, str], outcome: int, parent: int) -> None:
    os.setpgid(0, 0)
    ask_to_die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)
    seed_generators()
    spawned.run(lambda: work, rank, outcome)
