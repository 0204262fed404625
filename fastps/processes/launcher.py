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
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from fastps.device.placement import placement
from fastps.errors import UsageError
from fastps.kernels.shm.counts import MAX_LANES
from fastps.membership import discovery
from fastps.network.place import End
from fastps.processes.beginning import Beginning
from fastps.processes.ending import Ending
from fastps.processes.forkserver import ForkServer
from fastps.processes.left_behind import LeftBehind
from fastps.processes.nodes import LaunchRendezvous, NodeOptions
from fastps.processes.options import JobOptions
from fastps.processes.outcome import LaunchedWorker, Outcome, end_of_node
from fastps.processes.output import JobOutput, LogOptions
from fastps.processes.output_thread import StandardStreams, Stream
from fastps.processes.program import Program
from fastps.processes.worker_environment import environment_of, inherited, style_of
from fastps.processes.worker_output import ErrorLines, Lines
from fastps.system.clock import SYSTEM_CLOCK, Clock
from fastps.system.descriptors import reserve
from fastps.system.launch_note import VARIABLE, LaunchNote
from fastps.system.memory_limits import oom_kills
from fastps.system.ports import free_port
from fastps.system.processes import AdoptedProcess, adopting_orphans, start_child
from fastps.tracing import parts as trace_parts

logger = logging.getLogger("fastps.launch")

_DRAIN_NS = 300_000_000  # reads output this long from pipes that a worker's own children hold open
_PAUSE_NS = 1_000_000  # until the next try to pass on output, while the launcher's own reader is slow
_FAULT_TICK_S = 0.02  # time between two calls of Injector.tick
_OF_A_GROUP = re.compile("nccl|process group|process_group|cuda", re.IGNORECASE)
_CAPTURED: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
START_METHODS = ("fork", "spawn")
NO_OPTIONS, NO_LOGS = JobOptions(), LogOptions()


def _input() -> int:
    """What worker 0 reads as its standard input: the launcher's, but no terminal, which belongs to the launcher's group."""
    try:
        os.fstat(0)
    except OSError:  # the program was started without one
        return subprocess.DEVNULL
    return subprocess.DEVNULL if os.isatty(0) else 0


def _first(failed: Iterable[LaunchedWorker]) -> LaunchedWorker | None:
    return min(failed, key=lambda worker: (worker.is_consequence, worker.ended_ns), default=None)


class Launcher:
    """Runs `command` once for each worker. When `run` returns, every process that it started has ended.

    With the start method "fork" a fork server imports torch once and forks the workers, where the command is this interpreter
    with a script or `-m` and a module. Other commands, and "spawn", are a new process each.

    Raises UsageError for a number of workers or an option out of range.
    """

    def __init__(
        self,
        command: Sequence[str],
        workers: int,
        *,
        sync: str | None = None,  # a spec for FASTPS_SYNC; None leaves the choice to the script
        job: str | None = None,  # its name; random by default
        options: JobOptions = NO_OPTIONS,  # workers find them in their environment
        env: str = "auto",  # a worker's variables: of "fastps", also of "torchrun", or these if the script's text names them
        start_method: str = "fork",
        imports: Sequence[str] | None = None,  # the fork server's; default: torch, unless the script needs none
        silent: bool = False,  # whether the standard output is left out: each worker's last line is in the outcome
        nodes: NodeOptions | None = None,  # of several nodes this launcher starts one
        greets: bool = False,  # whether a line at the start says what runs, and the job's name
        logs: LogOptions = NO_LOGS,  # how what workers say is written down
        trace: Path | None = None,  # where all workers record the run; it is written when the run has ended
        tracebacks: bool | None = None,  # whether to pass on those of fastps' own errors; default: if the command has --debug
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
        if nodes is not None:
            nodes.check_beside(options)
        self._command, self._count, self._sync = list(command), workers, sync
        self._options = options
        self._style, self._chose_style = style_of(env, self._command), env == "auto"
        self._program = Program(self._command)
        self._forks = start_method == "fork" and self._program.can_fork
        self._imports = imports
        self._restarts_left, self._continues = options.restarts, options.continues
        self._port, self._nodes = 0, nodes
        self._rendezvous: LaunchRendezvous | None = None
        self._oom_kills = oom_kills()
        self._forkserver: ForkServer | None = None
        self._forkserver_worker: LaunchedWorker | None = None  # its process
        self._injector = options.injector(self.job, workers, clock) if options.injector is not None else None
        self._output, self._silent, self._greets = JobOutput(clock, logs), silent, greets
        self._trace = trace.resolve() if trace is not None else None
        self._clock, self._since_ns = clock, clock.unix_ns()
        self._workers: list[LaunchedWorker] = []
        self._selector = selectors.DefaultSelector()
        self._tracebacks = "--debug" in sys.argv if tracebacks is None else tracebacks
        self._beginning = Beginning(self.job, clock)
        self._streams: StandardStreams  # of the time when `run` is called
        self._open_pipes = 0
        self._is_draining = False
        self._ending = Ending(self._workers, options.grace_s, clock)
        self._are_on_gpus = bool(os.environ.get("FASTPS_GPUS")) and placement(workers) == "device"
        self._left = LeftBehind(clock)
        self._note_name = ""  # where workers note that they use fastps, while `run` is called
        self._blamed: LaunchedWorker | None = None

    def run(self, on_tick: Callable[[], None] | None = None, tick_s: float = 0.1) -> Outcome:
        """Start all workers and wait until all have ended. Calls `on_tick` about every `tick_s` seconds."""
        began_ns = self._clock.now_ns()
        self._streams = StandardStreams()
        with (
            contextlib.closing(LaunchNote()) as note,
            self._ending.listening(),
            adopting_orphans(),
            self._streams.carrying_logs(self._is_interrupted),
        ):
            self._note_name = note.name
            try:
                self._start()
                while any(worker.exit_code is None for worker in self._workers):
                    is_quick = self._injector is not None or self._beginning.is_watched
                    self._handle_events(min(tick_s, _FAULT_TICK_S) if is_quick else tick_s)
                    if self._injector is not None and not self._ending.interrupts:
                        self._injector.tick([worker for worker in self._workers if worker.exit_code is None])
                    if self._continues:
                        self._beginning.tick()
                    self._check_rendezvous()
                    self._left.check(self._own)
                    if on_tick is not None:
                        on_tick()
                self._end_forkserver()
                self._drain()
                first_failure = None if self._ending.number else self._root_cause()
                end = self._part(first_failure)
            finally:
                self._finish()
            ended_by = self._ending.number
            if ended_by or first_failure is not None:
                self._left.end(self._own)
            elif not note.has_come():
                self._tell_of_nothing()
        seconds = (self._clock.now_ns() - began_ns) / 1e9
        faults = self._injector.row() if self._injector is not None else None
        place = self._rendezvous.place if self._rendezvous is not None else None
        hint = self._hint(first_failure)
        return Outcome(self._workers, first_failure, ended_by, seconds, began_ns, faults, hint, end, place)

    def _check_rendezvous(self) -> None:
        """Name the loss of the rendezvous. With retries the workers end, because the nodes meet again."""
        if self._rendezvous is not None and self._rendezvous.has_lost():
            logger.warning("%s: no node can join the job any more", self._rendezvous.loss)
            if self._rendezvous.options.retries:
                self._ending.begin(are_on_gpus=self._are_on_gpus)

    def _part(self, first_failure: LaunchedWorker | None) -> End | None:
        """How the job of several nodes ended, as the launchers agree."""
        if (met := self._rendezvous) is None:
            return None
        own = end_of_node(self._ending.number, first_failure, met.loss)
        return met.part(own, self._ending, partial(self._handle_events, 0))

    def _is_interrupted(self) -> bool:
        return self._ending.interrupts > 0

    def blame(self, ranks: Container[int]) -> bool:
        """Name a failed worker of these ranks, if there is one, as the job's failure. Returns whether there is one."""
        self._blamed = self._blamed or _first(worker for rank, worker in self._lasts.items() if worker.failed and rank in ranks)
        return self._blamed is not None

    @property
    def _lasts(self) -> dict[int, LaunchedWorker]:
        """By rank, the last of the workers that replace each other."""
        return {worker.rank: worker for worker in self._workers}

    def draw(self, call: Callable[[], None]) -> None:
        """Let a call of `on_tick` draw on the terminal, without a wait for its reader."""
        self._streams.draw(call)

    def _finish(self) -> None:
        if self._injector is not None:
            self._injector.close()
        self._kill_all()
        if self._rendezvous is not None:
            self._rendezvous.close()
        self._selector.close()
        if self._trace is not None:
            own = self._trace if self._rendezvous is None else trace_parts.of_node(self._trace, self._rendezvous.place.number)
            trace_parts.end(own, self.arena, self._endings(), self._since_ns)

    @property
    def arena(self) -> str:
        """The name of the first arena of this launcher's workers: the job's, and of several nodes also the node's number."""
        return self.job if self._rendezvous is None else f"{self.job}.node{self._rendezvous.place.number}"

    def _endings(self) -> dict[int, dict[str, Any]]:
        """What a trace cannot know by itself: how each failed worker's process ended, and when injected stops took place."""
        found: dict[int, dict[str, Any]] = {}
        for worker in self._lasts.values():
            if worker.failed and worker.ended_ns:
                found.setdefault(worker.rank, {})["end"] = {"at_ns": worker.ended_ns, "exit_code": worker.exit_code}
        for rank, begin_ns, end_ns in self._injector.stops_ns if self._injector is not None else ():
            found.setdefault(rank, {}).setdefault("stops", []).append((begin_ns, end_ns))
        return found

    def _root_cause(self) -> LaunchedWorker | None:
        """Return the first failure by time, except workers whose error names another worker as the cause.

        Where the user has asked for jobs that continue after a loss, a worker that was lost is no failure if another one ended
        well later. A warning names it. To ask for restarts is to ask for a replacement.
        """
        if self._blamed is not None:
            return self._blamed
        failed = [worker for worker in self._lasts.values() if worker.failed]
        done_ns = max((worker.ended_ns for worker in self._workers if worker.exit_code == 0), default=0)
        may_lose = self._continues and (not self._options.restarts or self._options.says_continue)
        survived = [worker for worker in failed if may_lose and worker.ended_ns < done_ns]
        for worker in survived:
            logger.warning("worker %d (%s) was not replaced; the job went on without it", worker.rank, worker.ending)
        others = [worker for worker in failed if worker not in survived]
        return _first(others)

    def _tell_of_nothing(self) -> None:
        """Warn of options that no worker has read, and of several workers that share nothing."""
        given = {"--sync": self._sync, "--trace": self._trace}
        given |= {"--checkpoint": self._options.checkpoint, "--resume": self._options.resume}
        unread = [name for name, value in given.items() if value]
        behind = [name for name in given if name in self._program.arguments]
        if unread or (self._count > 1 and self._style == "fastps"):
            logger.warning(
                "no worker made a fastps.DistributedOptimizer: each of the %d has run the script for itself%s; wrap the"
                " script's optimizer (docs/how-to/own-script.md)%s",
                self._count,
                f", and {', '.join(unread)} had no effect" if unread else "",
                f"; behind the script {', '.join(behind)} is its own option: put fastps' before it" if behind else "",
            )

    def _hint(self, failure: LaunchedWorker | None) -> str:
        """A remedy where the variables that this launcher chose may be the cause: they let a script start a process group."""
        text = "\n".join(failure.errors.tail) if failure is not None else ""
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
            self._rendezvous = LaunchRendezvous(self._nodes, self._count, self._options.resume)
        else:
            self._greet()
        if self._forks:
            self._start_forkserver()
        if self._rendezvous is not None and self._rendezvous.wait(self._is_interrupted, partial(self._handle_events, 0)):
            self.job, self._options = self._rendezvous.place.job, self._rendezvous.adopted(self._options)
            self._beginning = Beginning(self.arena, self._clock)
            self._greet()
        for rank in range(self._count):
            if self._ending.interrupts:
                return
            self._workers.append(self._new_worker(rank, 0))
        if not (self._restarts_left or self._options.joins):
            self._end_forkserver()
        logger.info("job %s: started %d workers", self.job, self._count)

    def _greet(self) -> None:
        """Say in a line what runs, and how to look at it. A script that names its discipline itself may run by another."""
        if self._greets:
            node = f"node {self._rendezvous.place.number}: " if self._rendezvous is not None else ""
            workers = f"{self._count} worker{'s' * (self._count > 1)}"
            sync = self._sync or "bsp unless the script names another"
            text = f"fastps: {node}{workers}, {sync}, job {self.job} (fastps top {shlex.quote(self.job)})"
            sink = self._streams.err
            self._streams.thread_of(sink).put(partial(self._output.say, text, sink, job=self.job), sink, len(text))

    def _new_worker(self, rank: int, restart: int) -> LaunchedWorker:
        """Fork a worker, or start a new process if no fork server is ready."""
        variables = self._variables(rank, restart)
        reads = rank == 0 and self._first_rank == 0
        process = self._forked(variables, reads)
        if process is None:
            process = start_child(self._command, env=variables, stdin=_input() if reads else subprocess.DEVNULL, **_CAPTURED)
        return self._listen(rank, restart, process)

    def _variables(self, rank: int, restart: int) -> dict[str, str]:
        base = {**inherited(), **self._options.environment(), VARIABLE: self._note_name}
        if restart and self.job in discovery.listening():
            base["FASTPS_JOINS"] = "1"  # the worker joins the running job instead of creating it again
        variables = environment_of(
            rank, self._count, self._port, self.job, self._sync, base,
            style=self._style, restart=restart, restarts=self._options.restarts, trace=self._trace,
        )  # fmt: skip
        if self._rendezvous is not None:
            return {**variables, **self._rendezvous.variables(rank, self._style)}
        return {**variables, "FASTPS_RUN": f"{self.job} {self._since_ns}"}  # two launches may have a name

    def _listen(self, rank: int, restart: int, process: "subprocess.Popen[bytes] | AdoptedProcess") -> LaunchedWorker:
        worker = LaunchedWorker(
            rank, process, restart, errors=ErrorLines(whole=self._tracebacks), began_ns=self._clock.now_ns()
        )
        self._selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, (worker, None, None))
        for stream, sink in ((process.stdout, self._streams.out), (process.stderr, self._streams.err)):
            pipe = cast("IO[bytes]", stream)
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, (worker, sink, Lines()))
            self._open_pipes += 1
        return worker

    def _start_forkserver(self) -> None:
        """Start the fork server and wait for its imports, handling events meanwhile."""
        variables = self._variables(0, 0)
        del variables["FASTPS_RANK"]  # /proc would show it of each worker, and of what a worker forks
        imports = self._program.imports if self._imports is None else self._imports
        server = self._forkserver = ForkServer(variables, self._program.path, imports)
        with server.inherited as inherited:
            process = start_child(server.command, env=variables, stdin=_input(), pass_fds=[inherited.fileno()], **_CAPTURED)
            self._forkserver_worker = self._listen(0, 0, process)
        self._selector.register(server.control, selectors.EVENT_READ, None)
        server.await_ready(self._is_interrupted, partial(self._handle_events, _FAULT_TICK_S), self._clock)
        self._selector.unregister(server.control)
        if server.refusal and not self._ending.interrupts:
            logger.warning("workers are new processes: the fork server is not ready: %s", server.refusal)
            self._end_forkserver(kill=True)

    def _end_forkserver(self, kill: bool = False) -> None:
        """Let the fork server end by itself, or kill it: a stopped one would still obey its last order once continued."""
        if self._forkserver is not None:
            self._forkserver.close()
            self._forkserver = None
        if kill and self._forkserver_worker is not None:
            self._forkserver_worker.send(signal.SIGKILL)

    def join(self, rank: int) -> None:
        """Start a worker that joins the job in a lane whose worker has ended. For `on_tick` only."""
        earlier = sum(worker.rank == rank for worker in self._workers)
        self._workers.append(self._new_worker(rank, max(1, earlier)))

    def _replace(self, lost: LaunchedWorker) -> None:
        self._restarts_left -= 1
        lost.lost_steps = self._beginning.replaced(lost.rank)
        self._workers.append(self._new_worker(lost.rank, lost.restart + 1))
        self._workers[-1].replaced_ns = self._clock.now_ns()
        logger.warning("worker %d %s; started another, %d restarts left", lost.rank, lost.ending, self._restarts_left)
        if not self._restarts_left:
            self._end_forkserver()

    def _forked(self, variables: dict[str, str], reads: bool) -> "AdoptedProcess | subprocess.Popen[bytes] | None":
        if self._forkserver is None or not self._forkserver.is_ready:
            return None
        forked = self._forkserver.fork(variables, self._program.arguments, reads=reads)
        if forked is None:
            logger.warning("the fork server made no worker: workers are new processes from now on")
            self._end_forkserver(kill=True)
        return forked

    def _handle_events(self, timeout_s: float) -> None:
        self._ending.obey()
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:  # a message of the fork server
                continue
            worker, sink, cut = key.data
            if sink is not None:
                if self._streams.thread_of(sink).is_slow and not (self._is_draining or self._ending.interrupts):
                    self._clock.sleep_ns(_PAUSE_NS)
                else:
                    self._pass_on(key, worker, sink, cut)
                continue
            self._selector.unregister(key.fileobj)
            os.close(key.fd)
            worker.exit_code = self._wait(worker)
            worker.ended_ns = self._clock.now_ns()
            logger.info("worker %d: %s", worker.rank, worker.ending)
            if worker is self._forkserver_worker:
                self._end_forkserver()
            elif worker.failed:
                self._on_loss(worker)

    def _wait(self, worker: LaunchedWorker) -> int:
        """Reap a worker that has ended. What it has started ends with it, unless it ended well."""
        ended = os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOWAIT)
        if ended is not None and (ended.si_code != os.CLD_EXITED or ended.si_status):
            rank = self._first_rank + worker.rank if worker is not self._forkserver_worker else -1
            self._left.end_with(worker.process.pid, self.job, rank, self._own)
        return worker.process.wait()

    @property
    def _first_rank(self) -> int:
        return self._rendezvous.place.first_rank if self._rendezvous is not None else 0

    @property
    def _started(self) -> list[LaunchedWorker]:
        return self._workers if self._forkserver_worker is None else [*self._workers, self._forkserver_worker]

    @property
    def _own(self) -> set[int]:
        running = {worker.process.pid for worker in self._started if worker.exit_code is None}
        return running | {self._ending.probe_id, self._rendezvous.process_id if self._rendezvous is not None else 0}

    def _on_loss(self, worker: LaunchedWorker) -> None:
        self._streams.on_terminal(self._output.hide_bars)  # log lines would be written into the bars
        worker.was_out_of_memory = worker.exit_code == -signal.SIGKILL and oom_kills() > self._oom_kills
        self._oom_kills += worker.was_out_of_memory  # each kill explains one death
        self._continues = self._continues or self._beginning.continues()
        if self._ending.interrupts or not self._continues:
            self._ending.begin(are_on_gpus=self._are_on_gpus)
        elif self._restarts_left and not self._is_over():
            self._replace(worker)
        else:
            if self._restarts_left:
                logger.warning("worker %d %s; it is not replaced: the script's first job has ended", worker.rank, worker.ending)
            self._beginning.lose(worker.rank)

    def _is_over(self) -> bool:
        """Whether no other worker trains, or a replacement could not join: it would begin with the script's first job."""
        codes = [worker.exit_code for worker in self._workers]
        return (0 in codes and None not in codes) or self._beginning.is_over()

    def _pass_on(
        self, key: selectors.SelectorKey, worker: LaunchedWorker, sink: Stream, cut: Lines, at_end: bool = False
    ) -> None:
        """Pass on whole lines, each with its worker's number, and `at_end` the rest; keep the last of stderr for the report."""
        data = os.read(key.fd, 65536) if not at_end else b""
        lines = cut.feed(data) if data else cut.rest()
        if sink is self._streams.err:
            lines = worker.errors.feed(lines) + ([] if data else worker.errors.rest())
        else:
            worker.last_line = next((line for line in reversed(lines) if line.strip()), worker.last_line)
            lines = [] if self._silent else lines
        if not data:
            self._selector.unregister(key.fileobj)
            cast("IO[bytes]", key.fileobj).close()
            self._open_pipes -= 1
        rank = self._first_rank + worker.rank
        texts = [line.decode("utf-8", "surrogateescape") for line in [*lines, *([cut.bar + b"\r"] if cut.bar else [])]]
        if texts:
            name = "stderr" if sink is self._streams.err else "stdout"
            write = partial(self._output.write_all, rank, texts, sink, name)
            lines_written = sum(not text.endswith("\r") for text in texts)
            self._streams.thread_of(sink).put(write, sink, sum(map(len, texts)), lines_written)
        if not data and worker is not self._forkserver_worker:  # the fork server shares the number of a worker that goes on
            self._streams.thread_of(sink).put(partial(self._output.end, rank, sink), sink, lines=0)

    def _drain(self) -> None:
        """Read the rest of the pipes, for a limited time: a worker's own child may keep one open."""
        self._is_draining = True
        deadline_ns = self._clock.now_ns() + _DRAIN_NS
        while self._open_pipes and self._clock.now_ns() < deadline_ns:
            self._handle_events(0.05)
        for key in [key for key in self._selector.get_map().values() if key.data is not None and key.data[1] is not None]:
            worker, sink, cut = key.data
            self._pass_on(key, worker, sink, cut, at_end=True)

    def _kill_all(self) -> None:
        self._end_forkserver()
        for worker in self._started:
            if worker.exit_code is None:
                worker.send(signal.SIGKILL)
                worker.exit_code = self._wait(worker)
        for key in self._selector.get_map().values():
            if isinstance(key.fileobj, int):
                os.close(key.fileobj)
            else:
                cast("IO[bytes]", key.fileobj).close()
