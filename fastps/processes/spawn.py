"""fastps.spawn: a function in several processes that train one model, for notebooks and programs that no launcher starts.

It resembles torch.multiprocessing.spawn. The processes get copies of the model, because they share the arena instead, and the
final weights come back. The environment of each process gives its rank.

By default a new process imports torch and forks the workers, as under `fastps run`: the state of the caller, its threads and
locks, does not reach them. Each worker leads a process group of its own, so Ctrl-C reaches only the caller, which passes it on.
"""

import contextlib
import inspect
import json
import logging
import multiprocessing
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import connection
from multiprocessing.pool import RemoteTraceback  # type: ignore[attr-defined]  # typeshed lacks it
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fastps.errors import UsageError, WorkerDiedError
from fastps.job.environment import check_main_guard, rank, world_size
from fastps.job.options import value_of
from fastps.job.specs import parse_policy
from fastps.kernels.shm.counts import MAX_LANES
from fastps.processes import handover, spawned
from fastps.processes.beginning import Beginning
from fastps.processes.ending import Ending
from fastps.processes.forkserver import ForkServer, seed_generators
from fastps.processes.options import GRACE_S
from fastps.processes.outcome import Child, LaunchedWorker, how_it_ended
from fastps.processes.program import TORCH_IMPORTS
from fastps.processes.worker_environment import environment_of, inherited
from fastps.system.clock import SYSTEM_CLOCK, Clock
from fastps.system.descriptors import reserve
from fastps.system.interrupts import deferred_interrupts
from fastps.system.memory_limits import OUT_OF_MEMORY, oom_kills, oom_reason
from fastps.system.processes import adopting_orphans, ask_to_die_with_parent, import_path
from fastps.telemetry.tensorboard import written

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("fastps.spawn")

_START_METHODS = ("forkserver", "spawn", "fork")
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

    def check(self) -> None:
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
            for number in range(len(self.workers), len(self._environments)):
                if not self.ending.interrupts:
                    reports = [self._reports[number].fileno()]
                    arguments = [str(number), str(file.fileno()), str(reports[0])]
                    self._add(_new_process(_WORKER, arguments, self._environments[number], [file.fileno(), *reports]))

    def _add(self, child: Child) -> None:
        rank = len(self.workers)
        self.workers.append(SpawnedWorker(rank, child, self._reports[rank]))

    def _fork(self, work: handover.Work) -> None:
        for number, environment in enumerate(self._environments):
            arguments = (work, number, environment, self._reports[number].fileno(), os.getpid())
            process = multiprocessing.get_context("fork").Process(target=_work, args=arguments, name=f"fastps worker {number}")
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
                    for number, environment in enumerate(self._environments):
                        order = [*program, str(number), str(file.fileno()), ",".join(map(str, reports))]
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

    def check(self) -> None:
        """Wait until a worker ends, for a limited time, and notice what has ended. Pass signals on."""
        self.ending.obey()
        connection.wait([worker.sentinel for worker in self.running], _TICK_S)
        for worker in self.running:
            worker.check()

    @property
    def running(self) -> list[SpawnedWorker]:
        """The workers whose end has not been noticed."""
        return [worker for worker in self.workers if worker.exit_code is None]

    def close(self) -> None:
        """End the workers that still run."""
        self.ending.begin()
        while self.running:
            self.check()
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


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    workers: int = 1,
    *,
    sync: str | None = None,
    model: "torch.nn.Module | None" = None,
    on_worker_loss: str | None = None,
    start_method: str = "forkserver",
    tensorboard: str | os.PathLike[str] | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Call `fn(rank, *args)` in `workers` processes, the workers of one job; return when all are done.

    A DistributedOptimizer in `fn` finds the other workers by itself. Each process has copies of the arguments. What the calling
    program itself defines is copied as it is now, with the names that it uses: functions of a notebook, lambdas, closures.
    Functions of modules are imported. Ctrl-C, or the interrupt of a notebook, ends all processes.

    >>> def train(rank, model):
    ...     optimizer = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    ...     for _ in range(3):
    ...         optimizer.zero_grad()
    ...         model(torch.ones(1, 2)).sum().backward()
    ...         optimizer.step()
    >>> import fastps, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> fastps.spawn(train, (model,), workers=2, model=model)

    Args:
        fn: the function that each process calls.
        args: its arguments after the rank.
        workers: number of processes.
        sync: a spec such as "dssp:3,15" for optimizers without one.
        model: after the last step it gets the final weights, and worker 0's buffers: those of this model among worker 0's
            arguments, as `fn` leaves them there. Worker 0's optimizer waits for the other workers before it closes.
        on_worker_loss: "continue" lets the other workers go on after a failure; default: all end, unless the optimizer says
            "continue".
        start_method: "forkserver": a new process imports torch and forks the workers. "spawn": a new process each. "fork":
            forks of this process, which pickle nothing; it must not have computed with several threads, nor used a GPU.
        tensorboard: a folder for the job's figures as TensorBoard reads them; this process writes them.

    Raises:
        UsageError: An option is wrong, `fn` or an argument cannot be copied, or this process is a worker itself. No process has
            been started. From a worker: it cannot import what `fn` needs.
        PolicyError: `sync` is not a valid spec. No process has been started.
        WorkerDiedError: A process was killed, or ended without an exception.
        KeyboardInterrupt: Ctrl-C. All processes have ended.
        Exception: The exception of `fn` in the worker that failed first; its traceback is the error's cause.
    """
    _check(fn, args, workers, start_method)
    if model is None:
        _warn_of_copies(args)
    continues = value_of("FASTPS_ON_WORKER_LOSS", on_worker_loss) == "continue"
    spec = parse_policy(sync).spec if sync is not None else None
    reserve(4 * workers + 16, f"{workers} workers")
    base = {**inherited(), **({"FASTPS_ON_WORKER_LOSS": on_worker_loss} if on_worker_loss is not None else {})}
    job = secrets.token_hex(8)
    environments = [environment_of(number, workers, 0, job, spec, base) for number in range(workers)]
    work = handover.Work(fn, tuple(args), model)
    with handover.write(work) if start_method != "fork" else contextlib.nullcontext() as file:
        folder = Path(tensorboard) if tensorboard is not None else None
        crew = Crew(environments, clock)
        with deferred_interrupts(crew.ending.note), written(folder, lambda: job, clock) as tick, contextlib.closing(crew):
            crew.start(work, file, start_method)
            logger.info("job %s: started %d workers", job, workers)
            _await(crew, Beginning(job, clock), continues, tick)
    if model is not None:
        outcome = crew.workers[0].outcome
        assert outcome is not None
        model.load_state_dict(outcome.state)


def _check(fn: Any, args: Any, workers: Any, start_method: str) -> None:
    check_main_guard()
    if not isinstance(workers, int) or not 1 <= workers <= MAX_LANES:
        raise UsageError(f"workers: expected 1 to {MAX_LANES}, found {workers!r}")
    if start_method not in _START_METHODS:
        raise UsageError(f"start_method: expected one of {', '.join(_START_METHODS)}, found {start_method!r}")
    if not callable(fn):
        raise UsageError(f"fn: expected a function that takes a rank and args, found {fn!r}; pass it without calling it")
    if not isinstance(args, list | tuple):
        raise UsageError(f"args: expected a tuple of the arguments after the rank, found {type(args).__name__}; write (it,)")
    if "FASTPS_RANK" in os.environ or world_size() > 1:
        raise UsageError(
            f"spawn starts workers: expected a process that is no worker itself, found worker {rank()} of {world_size()}; start"
            " the program without a launcher, or train in this worker with a DistributedOptimizer"
        )
    if start_method == "fork" and multiprocessing.current_process().daemon:
        raise UsageError(
            "start_method='fork': expected a process that may have children, found a daemon of multiprocessing (a pool's"
            " process, say); use 'forkserver' or 'spawn', or start the process with daemon=False"
        )
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        raise UsageError(
            "spawn needs the exit codes of its workers: expected SIGCHLD to have its default action or a handler, found it"
            " ignored; call signal.signal(signal.SIGCHLD, signal.SIG_DFL) before spawn"
        )
    _check_signature(fn, args)


def _warn_of_copies(args: Sequence[Any]) -> None:
    """Warn of a model in torch's shared memory, where the caller would look for the final weights in vain."""
    torch = sys.modules.get("torch")
    for number, argument in enumerate(args):
        is_model = torch is not None and isinstance(argument, torch.nn.Module)
        if is_model and any(parameter.is_shared() for parameter in argument.parameters()):
            told = (
                "args[%d] lies in shared memory, but the workers train copies of it: pass it as model=, too, to get the weights"
            )
            logger.warning(told, number)


def _check_signature(fn: Callable[..., Any], args: Sequence[Any]) -> None:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some functions of C say nothing about their parameters
        return
    try:
        signature.bind(0, *args)
    except TypeError as error:
        raise UsageError(
            f"spawn calls {handover.name_of(fn)}(rank, *args): expected it to take the rank and {len(args)} more, found"
            f" {signature}, {error}; make the rank its first parameter, and give the others in args"
        ) from None


def _error_of(worker: SpawnedWorker, killed_before: int) -> BaseException | None:
    """The reason of a worker's failure; None if it has not failed. `killed_before`: oom_kills() when the workers began."""
    code = worker.exit_code
    if code is None:
        return None
    if worker.outcome is not None:
        error = worker.outcome.error
        if error is not None:
            error.__cause__ = RemoteTraceback(f'\n"""\n{worker.outcome.traceback}"""')  # which only shows where it was raised
        return error
    how = how_it_ended(code)
    was_out_of_memory = code == -signal.SIGKILL and oom_kills() > killed_before
    why = f"{oom_reason()}; {OUT_OF_MEMORY}" if was_out_of_memory else "; see its own output for the reason"
    who = f"{worker.name} (process {worker.process.pid})"
    return WorkerDiedError(f"{who} {how}: expected its function to return, found its process gone{why}", worker.rank)


def _await(crew: Crew, beginning: Beginning, continues: bool, on_tick: Callable[[], None] | None) -> None:
    """Wait until all workers have ended; a failure and Ctrl-C end them. Calls `on_tick` meanwhile. Raises the first failure."""
    errors: dict[int, BaseException] = {}  # in the order of the failures, by rank
    while running := crew.running:
        crew.check()
        if continues:
            beginning.tick()
        if on_tick is not None:
            on_tick()
        for worker in running:
            if (error := _error_of(worker, crew.killed_before)) is not None:
                errors[worker.rank] = error
                continues = continues or beginning.continues()
                beginning.lose(worker.rank)
                if not continues:
                    crew.ending.begin()
    if not errors or crew.ending.interrupts:
        return
    if continues and len(errors) < len(crew.workers):
        for number, error in errors.items():
            logger.warning("worker %d failed, and the others went on: %s", number, error)
        if 0 not in errors:
            return
    # One that reported the death of another is a consequence.
    first = min(errors, key=lambda rank: isinstance(errors[rank], WorkerDiedError) and crew.workers[rank].outcome is not None)
    raise errors[first]
