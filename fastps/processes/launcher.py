"""The launcher: starts a job's workers on this machine, passes on their output, and ends all of them when one fails.

The launcher reports the first worker that fails as the root cause. The other workers get a moment to end by themselves, because
they raise an error that names the failed one. A fork server imports torch once and forks the workers and, with restarts, their
replacements. The launcher itself never imports torch, so usage errors appear at once.
"""

import contextlib
import logging
import os
import re
import secrets
import selectors
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from fastps.errors import NodeLostError, UsageError, WorkerDiedError
from fastps.kernels.shm.arena import MAX_LANES
from fastps.membership import discovery
from fastps.processes.absent_workers import NoShows
from fastps.processes.fault_injection import FaultInjector, FaultReport
from fastps.processes.forkserver_client import ForkServer
from fastps.processes.nodes import LaunchRendezvous, NodeOptions
from fastps.processes.options import JobOptions
from fastps.processes.output import JobOutput
from fastps.processes.program import Program
from fastps.processes.worker_environment import environment_of, inherited, style_of
from fastps.processes.worker_output import ErrorLines, Lines
from fastps.system.clock import SYSTEM_CLOCK, Clock
from fastps.system.descriptors import reserve
from fastps.system.ports import free_port
from fastps.system.processes import AdoptedProcess, adopting_orphans, die_with_parent
from fastps.system.shared_memory import oom_kills
from fastps.tracing import parts as trace_parts

logger = logging.getLogger("fastps.launch")

GRACE_NS = 2_000_000_000  # for survivors to end by themselves, and again after SIGTERM; Ctrl-C takes at most twice as long
_DRAIN_NS = 300_000_000  # reads output this long from pipes that a worker's own children hold open
_IMPORT_NS = 120_000_000_000  # the longest time for the fork server's imports
_FAULT_TICK_S = 0.02  # time between two calls of FaultInjector.tick
_OF_A_GROUP = re.compile("nccl|process group|process_group|cuda", re.IGNORECASE)
_OUT_OF_MEMORY = ", for want of memory: the control group's limit was reached; use fewer workers or raise it"
# A traceback's last line names the type so.
_CONSEQUENCES = tuple(f"{kind.__module__}.{kind.__qualname__}:" for kind in (WorkerDiedError, NodeLostError))
START_METHODS = ("fork", "spawn")
NO_OPTIONS = JobOptions()


@dataclass
class LaunchedWorker:
    """One worker process: its exit, and its output on stderr.

    `restart` counts the earlier processes of the same rank.
    """

    rank: int
    process: "subprocess.Popen[bytes] | AdoptedProcess"
    restart: int = 0
    exit_code: int | None = None
    ended_ns: int = 0
    errors: ErrorLines = field(default_factory=ErrorLines)
    was_out_of_memory: bool = False

    @property
    def tail(self) -> deque[str]:
        """The last lines of stderr, as shown."""
        return self.errors.tail

    @property
    def process_id(self) -> int:
        """Process id."""
        return self.process.pid

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self.exit_code is None:
            self.process.send_signal(number)

    @property
    def failed(self) -> bool:
        """Whether the process ended with an error or a signal."""
        return self.exit_code not in (None, 0)

    @property
    def is_consequence(self) -> bool:
        """Whether the loss of another worker or node ended the worker."""
        return any(line.startswith(_CONSEQUENCES) for line in self.tail)

    @property
    def ending(self) -> str:
        """The exit in words."""
        if self.exit_code is None:
            return "still running"
        if self.exit_code < 0:
            return f"ended by {signal.Signals(-self.exit_code).name}{_OUT_OF_MEMORY if self.was_out_of_memory else ''}"
        return f"exit code {self.exit_code}"


@dataclass(frozen=True)
class Outcome:
    """The end of a job: all workers with those replaced, the first failure (or None), and whether Ctrl-C ended the job.

    A lost worker is no failure if the job went on to its end. `faults` reports injected faults. `began_ns` is the launcher's
    start, before any import of a worker. `hint` is a remedy, or empty.
    """

    workers: list[LaunchedWorker]
    first_failure: LaunchedWorker | None
    interrupted: bool
    seconds: float
    began_ns: int
    faults: FaultReport | None = None
    hint: str = ""

    @property
    def exit_code(self) -> int:
        """0: done. 1: a worker failed. 130: ended by Ctrl-C."""
        return 130 if self.interrupted else 1 if self.first_failure else 0


class Launcher:
    """Runs `command` once for each worker. When `run` returns, every process that it started has ended.

    Args:
        command: program and arguments, the same for all workers.
        workers: number of workers, at least 1.
        sync: a spec for FASTPS_SYNC; None leaves the choice to the script.
        job: the job's name; random by default.
        options: restarts, losses, checkpoints, injected faults; workers find them in their environment.
        env: the variables that give a worker its rank: "fastps" (only FASTPS_RANK and the like), "torchrun" (also RANK and the
            like), or "auto" (torchrun's if the script's own text names them).
        start_method: "fork": a fork server imports torch once and forks the workers, where the command is this interpreter with
            a script or `-m` and a module; other commands, and "spawn": a new process each.
        imports: what the fork server imports; None: torch, unless the script imports the standard library alone.
        prefix: whether each line of output begins with its worker's number.
        nodes: the options of a job of several nodes, of which this launcher starts one; None: this machine is alone.
        trace: a file into which all workers record the run; it is written when the run has ended.
        tracebacks: whether to pass on tracebacks of fastps' own errors; default: only if the command has --debug.

    Raises:
        UsageError: The number of workers or an option is out of range.
    """

    def __init__(
        self,
        command: Sequence[str],
        workers: int,
        *,
        sync: str | None = None,
        job: str | None = None,
        options: JobOptions = NO_OPTIONS,
        env: str = "auto",
        start_method: str = "fork",
        imports: Sequence[str] | None = None,
        prefix: bool = True,
        nodes: NodeOptions | None = None,
        trace: Path | None = None,
        tracebacks: bool | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if workers < 1:
            raise UsageError(f"expected at least 1 worker, found {workers}: use -n 1 or more")
        if workers > MAX_LANES:
            raise UsageError(f"expected at most {MAX_LANES} workers, found {workers}: use a smaller -n")
        if 0 < options.max_workers < workers:
            raise UsageError(f"--max-workers: expected {workers} or more, the number of workers, found {options.max_workers}")
        if start_method not in START_METHODS:
            raise UsageError(f"--start-method: expected fork or spawn, found {start_method!r}")
        self.job = job or secrets.token_hex(8)
        if trace is not None and options.restarts:
            raise UsageError("a trace has one worker a lane: expected no restarts beside --trace")
        if nodes is not None:
            nodes.check_beside(options)
        self._command = list(command)
        self._count = workers
        self._sync = sync
        self._options = options
        self._style, self._chose_style = style_of(env, self._command), env == "auto"
        self._program = Program(self._command)
        self._forks = start_method == "fork" and self._program.can_fork
        self._imports = imports
        self._restarts_left = options.restarts
        self._port = 0
        self._nodes = nodes
        self._rendezvous: LaunchRendezvous | None = None
        self._oom_kills = oom_kills()
        self._forkserver: ForkServer | None = None
        self._forkserver_worker: LaunchedWorker | None = None  # its process
        self._adopting = contextlib.ExitStack()
        self._injector = FaultInjector(options.faults, self.job, workers, clock) if options.faults is not None else None
        self._no_shows = NoShows(self.job, clock)
        self._output = JobOutput(clock, prefix)
        self._trace = trace.resolve() if trace is not None else None
        self._clock = clock
        self._workers: list[LaunchedWorker] = []
        self._selector = selectors.DefaultSelector()
        self._lines: dict[int, Lines] = {}
        self._tracebacks = "--debug" in sys.argv if tracebacks is None else tracebacks
        self._has_begun = False  # whether an arena was seen
        self._open_pipes = 0
        self._signals = [signal.SIGTERM, signal.SIGKILL]  # sent in order, one after each deadline
        self._deadline_ns: int | None = None
        self._interrupts = 0

    def run(self, on_tick: Callable[[], None] | None = None, tick_s: float = 0.1) -> Outcome:
        """Start all workers and wait until all have ended. Calls `on_tick` about every `tick_s` seconds."""
        began_ns = self._clock.now_ns()
        ends = (signal.SIGINT, signal.SIGTERM)
        previous = [signal.signal(number, self._on_interrupt) for number in ends]
        try:
            self._start()
            while any(worker.exit_code is None for worker in self._workers):
                self._handle_events(min(tick_s, _FAULT_TICK_S) if self._injector is not None else tick_s)
                self._enforce_deadline()
                if self._injector is not None and not self._interrupts:
                    self._injector.tick([worker for worker in self._workers if worker.exit_code is None])
                self._look_at_job()
                if on_tick is not None:
                    on_tick()
            self._end_forkserver()
            self._drain()
        finally:
            if self._injector is not None:
                self._injector.close()
            self._kill_all()
            if self._rendezvous is not None:
                self._rendezvous.close()
            self._adopting.close()
            for number, handler in zip(ends, previous, strict=True):
                signal.signal(number, handler)
            self._selector.close()
            if self._trace is not None:
                self._finish_trace(self._trace)
        seconds = (self._clock.now_ns() - began_ns) / 1e9
        report = self._injector.report if self._injector is not None else None
        first_failure = None if self._interrupts else self._root_cause()
        return Outcome(self._workers, first_failure, self._interrupts > 0, seconds, began_ns, report, self._hint(first_failure))

    @property
    def arena(self) -> str:
        """The name of the first arena of this launcher's workers: the job's, and of several nodes also the node's number."""
        return self.job if self._rendezvous is None else f"{self.job}.node{self._rendezvous.number}"

    def _finish_trace(self, file: Path) -> None:
        own = file if self._rendezvous is None else trace_parts.of_node(file, self._rendezvous.number)
        trace_parts.annotate(trace_parts.finish(own, self.arena) or [own], self._endings())

    def _endings(self) -> dict[int, dict[str, Any]]:
        """What a trace cannot know by itself: how each failed worker's process ended, and when injected stops took place."""
        found: dict[int, dict[str, Any]] = {}
        for worker in self._workers:
            if worker.failed and worker.ended_ns:
                found.setdefault(worker.rank, {})["end"] = {"at_ns": worker.ended_ns, "exit_code": worker.exit_code}
        for rank, begin_ns, end_ns in self._injector.report.stops_ns if self._injector is not None else ():
            found.setdefault(rank, {}).setdefault("stops", []).append((begin_ns, end_ns))
        return found

    def _look_at_job(self) -> None:
        if self._options.continues:
            self._has_begun = self._has_begun or bool(discovery.arenas_of(self.job))
            self._no_shows.tick()

    def _root_cause(self) -> LaunchedWorker | None:
        """Return the first failure by time, except workers whose error names another worker as the cause.

        Where jobs go on after a loss, a worker that was lost is no failure if another one ended well later. A warning names it.
        """
        lasts = {worker.rank: worker for worker in self._workers}  # of those that replace each other, the last
        failed = [worker for worker in lasts.values() if worker.failed]
        done_ns = max((worker.ended_ns for worker in self._workers if worker.exit_code == 0), default=0)
        survived = [worker for worker in failed if self._options.continues and worker.ended_ns < done_ns]
        for worker in survived:
            logger.warning("worker %d (%s) was not replaced; the job went on without it", worker.rank, worker.ending)
        others = [worker for worker in failed if worker not in survived]
        return min(others, key=lambda worker: (worker.is_consequence, worker.ended_ns), default=None)

    def _hint(self, failure: LaunchedWorker | None) -> str:
        """A remedy where the variables that this launcher chose may be the cause: they let a script start a process group."""
        text = "\n".join(failure.tail) if failure is not None else ""
        if not self._chose_style or self._style != "torchrun" or not _OF_A_GROUP.search(text):
            return ""
        return (
            "the script names RANK or WORLD_SIZE, so the workers have torchrun's variables: if it should start no process group"
            " of its own, run it with --env fastps"
        )

    def _start(self) -> None:
        reserve(3 * self._count + 32, f"the pipes of {self._count} workers")
        self._port = free_port()  # for scripts that start torch.distributed themselves
        if self._nodes is not None:
            self._rendezvous = LaunchRendezvous(self._nodes, self._count)
        if self._forks:
            self._start_forkserver()
        if self._rendezvous is not None and self._rendezvous.wait(lambda: self._interrupts > 0):
            self.job = self._rendezvous.job
        for rank in range(self._count):
            if self._interrupts:
                return
            self._workers.append(self._new_worker(rank, 0))
        if not self._restarts_left:
            self._end_forkserver()
        logger.info("job %s: started %d workers", self.job, self._count)

    def _new_worker(self, rank: int, restart: int) -> LaunchedWorker:
        """Fork a worker, or start a new process if no fork server is ready."""
        variables = self._variables(rank, restart)
        forked = self._forked(variables)
        if forked is not None:
            return self._listen(LaunchedWorker(rank, forked, restart))
        return self._launch(rank, restart, self._command, variables)

    def _variables(self, rank: int, restart: int) -> dict[str, str]:
        base = {**inherited(), **self._options.environment()}
        if restart and self.job in discovery.listening():
            base["FASTPS_JOINS"] = "1"  # the worker joins the running job instead of creating it again
        variables = environment_of(
            rank,
            self._count,
            self._port,
            self.job,
            self._sync,
            base,
            style=self._style,
            restart=restart,
            restarts=self._options.restarts,
            trace=self._trace,
        )
        return variables if self._rendezvous is None else {**variables, **self._rendezvous.variables(rank, self._style)}

    def _launch(
        self, rank: int, restart: int, command: list[str], variables: dict[str, str], inherited: Sequence[int] = ()
    ) -> LaunchedWorker:
        """Start a process, and watch its output and its end."""
        process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=inherited,
            process_group=0,  # Ctrl-C at the terminal reaches only the launcher, which passes it on
            preexec_fn=die_with_parent(os.getpid()),
        )
        return self._listen(LaunchedWorker(rank, process, restart))

    def _listen(self, worker: LaunchedWorker) -> LaunchedWorker:
        process, worker.errors = worker.process, ErrorLines(whole=self._tracebacks)
        self._selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, (worker, None))
        for stream, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            pipe = cast("IO[bytes]", stream)
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, (worker, sink))
            self._open_pipes += 1
        return worker

    def _start_forkserver(self) -> None:
        """Start the fork server and wait for its imports, handling events meanwhile."""
        self._adopting.enter_context(adopting_orphans())
        variables = self._variables(0, 0)
        imports = self._program.imports if self._imports is None else self._imports
        server = self._forkserver = ForkServer(variables, self._program.path, imports)
        with server.inherited as inherited:
            self._forkserver_worker = self._launch(0, 0, server.command, variables, [inherited.fileno()])
        self._selector.register(server.control, selectors.EVENT_READ, None)
        deadline_ns = self._clock.now_ns() + _IMPORT_NS
        while not (server.is_ready or server.refusal or self._interrupts or self._clock.now_ns() >= deadline_ns):
            self._handle_events(_FAULT_TICK_S)
        self._selector.unregister(server.control)
        if not server.is_ready and not self._interrupts:
            logger.warning("workers are new processes: the fork server is not ready: %s", server.refusal or "out of time")
            self._end_forkserver(kill=True)

    def _end_forkserver(self, kill: bool = False) -> None:
        """Let the fork server end by itself, or kill it: a stopped one would still obey its last order once continued."""
        if self._forkserver is not None:
            self._forkserver.close()
            self._forkserver = None
            self._adopting.close()
        if kill and self._forkserver_worker is not None:
            self._forkserver_worker.send(signal.SIGKILL)

    def _replace(self, lost: LaunchedWorker) -> None:
        """Start a replacement for a lost worker."""
        self._restarts_left -= 1
        self._workers.append(self._new_worker(lost.rank, lost.restart + 1))
        logger.warning("worker %d %s; started another, %d restarts left", lost.rank, lost.ending, self._restarts_left)
        if not self._restarts_left:
            self._end_forkserver()

    def _forked(self, variables: dict[str, str]) -> AdoptedProcess | None:
        """Register a worker that the fork server forked."""
        if self._forkserver is None or not self._forkserver.is_ready:
            return None
        forked = self._forkserver.fork(variables, self._program.arguments)
        if forked is None:
            logger.warning("the fork server made no worker: workers are new processes from now on")
            self._end_forkserver(kill=True)
        return forked

    def _handle_events(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:  # a message of the fork server
                continue
            worker, sink = key.data
            if sink is not None:
                self._pass_on(key, worker, sink)
                continue
            self._selector.unregister(key.fileobj)
            os.close(key.fd)
            worker.exit_code = worker.process.wait()
            worker.ended_ns = self._clock.now_ns()
            logger.info("worker %d: %s", worker.rank, worker.ending)
            if worker is self._forkserver_worker:
                self._end_forkserver()
            elif worker.failed:
                self._on_loss(worker)

    def _on_loss(self, worker: LaunchedWorker) -> None:
        """Handle a failed worker: end the others, go on without it, or replace it while restarts are left."""
        self._output.hide_bars()  # log lines would be written into the bars
        killed, self._oom_kills = oom_kills() - self._oom_kills, oom_kills()
        worker.was_out_of_memory = killed > 0 and worker.exit_code == -signal.SIGKILL
        if self._interrupts or not self._options.continues:
            self._deadline_ns = self._deadline_ns or worker.ended_ns + GRACE_NS
        elif self._restarts_left and not self._is_over():
            self._replace(worker)
        else:
            self._no_shows.add(worker.rank)

    def _is_over(self) -> bool:
        """Whether no other worker trains, so a replacement could not join them."""
        codes = [worker.exit_code for worker in self._workers]
        if 0 in codes and None not in codes:
            return True
        return self._has_begun and not discovery.arenas_of(self.job)

    def _pass_on(self, key: selectors.SelectorKey, worker: LaunchedWorker, sink: IO[str]) -> None:
        """Pass on whole lines, each with its worker's number; keep the last lines of stderr for the report."""
        data = os.read(key.fd, 65536)
        cut = self._lines.setdefault(key.fd, Lines())
        lines = cut.feed(data) if data else cut.rest()
        if sink is sys.stderr:
            lines = worker.errors.feed(lines) + ([] if data else worker.errors.rest())
        if not data:
            del self._lines[key.fd]
            self._selector.unregister(key.fileobj)
            cast("IO[bytes]", key.fileobj).close()
            self._open_pipes -= 1
        for line in [*lines, *([cut.bar + b"\r"] if cut.bar else [])]:
            self._output.write(self._first_rank + worker.rank, line.decode("utf-8", "replace"), sink)
        if not data and worker is not self._forkserver_worker:  # the fork server shares the number of a worker that goes on
            self._output.end(self._first_rank + worker.rank, sink)

    @property
    def _first_rank(self) -> int:
        """The number, among the workers of all nodes, of this node's first worker."""
        return self._rendezvous.first_rank if self._rendezvous is not None else 0

    def _on_interrupt(self, number: int, frame: object) -> None:
        """Pass on the first Ctrl-C, then send SIGTERM and SIGKILL after deadlines. Kill at once on the second."""
        self._interrupts += 1
        self._signal_all(signal.SIGINT if self._interrupts == 1 else signal.SIGKILL)
        self._deadline_ns = self._clock.now_ns() + GRACE_NS

    def _enforce_deadline(self) -> None:
        if self._deadline_ns is None or self._clock.now_ns() < self._deadline_ns:
            return
        self._signal_all(self._signals.pop(0) if len(self._signals) > 1 else self._signals[0])
        self._deadline_ns = self._clock.now_ns() + GRACE_NS

    def _signal_all(self, number: signal.Signals) -> None:
        for worker in self._workers:
            if worker.exit_code is None:
                worker.process.send_signal(number)

    def _drain(self) -> None:
        """Read the rest of the pipes, for a limited time: a worker's own child may keep one open."""
        deadline_ns = self._clock.now_ns() + _DRAIN_NS
        while self._open_pipes and self._clock.now_ns() < deadline_ns:
            self._handle_events(0.05)

    def _kill_all(self) -> None:
        self._end_forkserver()
        for worker in [*self._workers, *([self._forkserver_worker] if self._forkserver_worker is not None else [])]:
            if worker.exit_code is None:
                worker.process.kill()
                worker.exit_code = worker.process.wait()
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
            if isinstance(key.fileobj, int):
                os.close(key.fileobj)
            else:
                cast("IO[bytes]", key.fileobj).close()
