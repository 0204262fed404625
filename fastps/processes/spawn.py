"""fastps.spawn: a function in several processes that train one model, for programs that no launcher starts.

It resembles torch.multiprocessing.spawn. The processes get copies of the model, because they share the arena instead, and the
final weights come back. The environment of each process gives its rank.
"""

import logging
import multiprocessing
import os
import pickle
import secrets
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

from fastps.errors import UsageError, WorkerDiedError
from fastps.job.environment import check_main_guard
from fastps.job.specs import parse_policy
from fastps.kernels.shm.arena import MAX_LANES
from fastps.system import exit_handlers
from fastps.system.clock import SYSTEM_CLOCK, Clock
from fastps.system.processes import ask_to_die_with_parent

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("fastps.spawn")

GRACE_NS = 2_000_000_000  # for the other workers after a failure, and again after SIGTERM
_START_METHODS = ("spawn", "fork", "forkserver")


class RemoteTraceback(Exception):  # noqa: N818  (the cause of an error, which only shows where it was raised)
    """The traceback of a worker's exception, as text."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


@dataclass
class _SpawnedWorker:
    rank: int
    process: Any
    results: connection.Connection
    outcome: tuple[str, Any] | None = None  # ("done", the model's state or None) or ("failed", (exception, traceback))
    has_ended: bool = False

    @property
    def error(self) -> BaseException | None:
        """The reason of the failure; None if the worker has not failed."""
        if not self.has_ended or (self.outcome is not None and self.outcome[0] == "done"):
            return None
        if self.outcome is None:
            return WorkerDiedError(self._ending(), self.rank)
        error, text = self.outcome[1]
        error.__cause__ = RemoteTraceback(text)
        return error  # type: ignore[no-any-return]

    def _ending(self) -> str:
        code = self.process.exitcode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return (
            f"worker {self.rank} (process {self.process.pid}) {how}: expected its function to return, found its process gone;"
            " see its own output for the reason"
        )


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    workers: int = 1,
    *,
    sync: str | None = None,
    model: "torch.nn.Module | None" = None,
    on_worker_loss: str | None = None,
    start_method: str = "spawn",
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Call `fn(rank, *args)` in `workers` processes, the workers of one job; return when all are done.

    A DistributedOptimizer in `fn` finds the other workers by itself. Arguments are pickled, so each process has copies. Guard
    the calling script by `if __name__ == "__main__":`.

    >>> def train(rank, model):
    ...     optimizer = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    ...     for _ in range(3):
    ...         optimizer.zero_grad()
    ...         model(torch.ones(1, 2)).sum().backward()
    ...         optimizer.step()
    >>> import fastps, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> fastps.spawn(train, (model,), workers=2, model=model, start_method="fork")

    Args:
        fn: a function of a module, which the processes can import.
        args: its arguments after the rank.
        workers: number of processes.
        sync: a spec such as "dssp:3,15" for optimizers without one.
        model: after the last step it gets the final weights, and worker 0's buffers: those of this model among worker 0's
            arguments, as `fn` leaves them there. An optimizer that is still open then waits for the other workers first.
        on_worker_loss: "continue" lets the other workers go on after a failure; default: all end.
        start_method: "spawn", "fork" or "forkserver", as of multiprocessing; "fork" takes functions that do not pickle, from a
            process that has not computed with several threads.

    Raises:
        UsageError: An option is wrong, or `fn` cannot run in a new process. No process has been started.
        PolicyError: `sync` is not a valid spec. No process has been started.
        WorkerDiedError: A process was killed, or ended without an exception.
        Exception: The exception of `fn` in the worker that failed first; its traceback is the error's cause.
    """
    check_main_guard()
    if not 1 <= workers <= MAX_LANES:
        raise UsageError(f"workers: expected 1 to {MAX_LANES}, found {workers}")
    if start_method not in _START_METHODS:
        raise UsageError(f"start_method: expected one of {', '.join(_START_METHODS)}, found {start_method!r}")
    variables = {"FASTPS_WORKERS": str(workers), "FASTPS_JOB": secrets.token_hex(8)}
    if sync is not None:
        variables["FASTPS_SYNC"] = parse_policy(sync).spec
    if on_worker_loss is not None:
        variables["FASTPS_ON_WORKER_LOSS"] = on_worker_loss
    work: Any = (fn, tuple(args), model)
    if start_method != "fork":
        work = _pickled(work)
    context: Any = multiprocessing.get_context(start_method)
    started: list[_SpawnedWorker] = []
    parent = 0 if start_method == "forkserver" else os.getpid()
    try:
        for rank in range(workers):
            results, its_end = context.Pipe(duplex=False)
            its_variables = {**variables, "FASTPS_RANK": str(rank)}
            arguments = (work, its_variables, its_end, parent)
            child = context.Process(target=_work, args=arguments, name=f"fastps worker {rank}")
            started.append(_SpawnedWorker(rank, child, results))
            child.start()
            its_end.close()
        logger.info("job %s: started %d workers", variables["FASTPS_JOB"], workers)
        _await(started, on_worker_loss == "continue", clock)
    finally:
        _end(started, clock)
    if model is not None:
        model.load_state_dict(pickle.loads(started[0].outcome[1]))  # type: ignore[index]  # our own child's


def _pickled(work: tuple[Callable[..., Any], tuple[Any, ...], Any]) -> bytes:
    """Pickle without multiprocessing's reductions, which would move tensors into shared memory."""
    name = getattr(work[0], "__name__", repr(work[0]))
    main = sys.modules.get("__main__")
    if getattr(work[0], "__module__", "") == "__main__" and not hasattr(main, "__file__"):
        raise UsageError(
            f"spawn cannot hand {name!r} over from an interactive session: expected a function of a module; put it into a file"
            " and import it, or give start_method='fork'"
        )
    try:
        return pickle.dumps(work)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"spawn cannot hand {name!r} and its arguments over: expected what pickles, found {error}; define the function at"
            " the top of a module, or give start_method='fork'"
        ) from error


def _work(work: Any, variables: Mapping[str, str], results: connection.Connection, parent: int) -> None:
    """Run a worker in its process and report its end. It ends with the process `parent`; 0: with the fork server."""
    if parent:
        ask_to_die_with_parent(parent)
    os.environ.update(variables)
    try:
        fn, args, model = pickle.loads(work) if isinstance(work, bytes) else work
        fn(int(variables["FASTPS_RANK"]), *args)
        is_first = variables["FASTPS_RANK"] == "0"
        exit_handlers.close_all(finish=is_first and model is not None)
        state = pickle.dumps(model.state_dict()) if is_first and model is not None else None
        results.send_bytes(pickle.dumps(("done", state)))
    except BaseException as error:
        if isinstance(error, SystemExit):
            if not error.code:
                results.send_bytes(pickle.dumps(("done", None)))
            raise
        exit_handlers.close_all(f"{type(error).__name__}: {error}")
        results.send_bytes(_told(error))
        sys.exit(1)


def _told(error: BaseException) -> bytes:
    """Return an exception and its traceback for the parent; an exception that does not pickle becomes its text."""
    text = "".join(traceback.format_exception(error))
    try:
        told = pickle.dumps(("failed", (error, text)))
        pickle.loads(told)
    except Exception:
        told = pickle.dumps(("failed", (RuntimeError(f"{type(error).__name__}: {error}"), text)))
    return told


def _await(workers: Sequence[_SpawnedWorker], continues: bool, clock: Clock) -> None:
    """Wait until all workers have ended, or until one fails and the grace period is over. Raises the first failure."""
    deadline_ns: int | None = None
    failures: list[_SpawnedWorker] = []
    while running := [worker for worker in workers if not worker.has_ended]:
        if deadline_ns is not None and clock.now_ns() >= deadline_ns:
            break
        connection.wait([of for worker in running for of in _waited_for(worker)], timeout=0.1)
        for worker in running:
            _look_at(worker)
            if worker.error is None:
                continue
            failures.append(worker)
            if not continues:
                deadline_ns = deadline_ns or clock.now_ns() + GRACE_NS
    if not failures:
        return
    if continues and any(worker.error is None for worker in workers):
        for worker in failures:
            logger.warning("worker %d failed, and the others went on: %s", worker.rank, worker.error)
        if workers[0].error is None:
            return
    first = min(failures, key=lambda worker: isinstance(worker.error, WorkerDiedError) and worker.outcome is not None)
    assert first.error is not None
    raise first.error


def _waited_for(worker: _SpawnedWorker) -> list[Any]:
    return [worker.process.sentinel] if worker.outcome is not None else [worker.process.sentinel, worker.results]


def _look_at(worker: _SpawnedWorker) -> None:
    """Read a worker's report and whether its process has ended."""
    has_ended = not worker.process.is_alive()  # read this first: an earlier report is then in the pipe
    if worker.outcome is None and worker.results.poll():
        try:
            worker.outcome = pickle.loads(worker.results.recv_bytes())
        except EOFError:
            has_ended = worker.process.join(1) or not worker.process.is_alive()
    worker.has_ended = has_ended


def _end(workers: Sequence[_SpawnedWorker], clock: Clock) -> None:
    """End all running workers by SIGTERM, then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        running = [worker for worker in workers if worker.process.pid is not None and worker.process.is_alive()]
        for worker in running:
            os.kill(worker.process.pid, number)
        deadline_ns = clock.now_ns() + GRACE_NS
        for worker in running:
            worker.process.join(max(0.0, (deadline_ns - clock.now_ns()) / 1e9))
    for worker in workers:
        worker.results.close()
        if worker.process.pid is not None:
            worker.process.join()
            worker.process.close()
