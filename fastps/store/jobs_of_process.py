"""The jobs of one process: which job its next optimizer joins, and that a new optimizer for each epoch loses no pushes.

In a launch JOB is for the script's first optimizer, JOB.1 for the next, and so on. Each process counts its own optimizers. If
the counts differ because one process lives longer than another (a pool, a Ray actor), the process joins a job that still
expects a worker of this rank. Jobs that the script names (`job=`) are not counted.

A job that is open when its parameters are wrapped again ends first, on worker 0 after all others have left it. If worker 0 has
closed its own while others still pushed, the next job waits for them, and is refused if they changed the weights since.
"""

import logging
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fastps.errors import ArenaError, AttachError, Error, TimeoutExceededError, UsageError
from fastps.job import environment
from fastps.job.environment import Identity
from fastps.kernels.shm.arena import LANE_FREE
from fastps.membership import discovery
from fastps.membership.job_memory import JobMemory
from fastps.store.elsewhere import Elsewhere
from fastps.store.observer import observe
from fastps.store.worker import Worker
from fastps.system.clock import Clock

logger = logging.getLogger("fastps.torch")

_POLL_NS = 10_000_000
_ASK_S = 0.2

_next = [0]


@dataclass(frozen=True)
class _Open:
    """A worker's job that has these parts. It keeps nothing alive."""

    worker: "weakref.ref[Worker]"
    parts: "list[weakref.ref[Any]]"
    leave: "weakref.WeakMethod[Callable[[], None]]"
    close: "weakref.WeakMethod[Callable[[], None]]"
    finish: "weakref.WeakMethod[Callable[[], None]]"

    @property
    def is_open(self) -> bool:
        """Whether the worker is still in the job."""
        return (worker := self.worker()) is not None and not worker.closed and not worker.forked

    def end(self) -> None:
        """Leave the job; worker 0 after all others."""
        worker, close, finish = self.worker(), self.close(), self.finish()
        if worker is None or close is None or finish is None or worker.closed or worker.forked:
            return
        if worker.rank == 0:
            finish()
        close()


@dataclass(frozen=True)
class _Left:
    """A job that worker 0 has left while others were in it, with its weights' version. `waits`: all make the same steps."""

    parts: "list[weakref.ref[Any]]"
    job: str
    version: int
    waits: bool


_open: list[_Open] = []
_left: list[_Left] = []


def register(
    worker: Worker, parts: list[Any], leave: Callable[[], None], close: Callable[[], None], finish: Callable[[], None]
) -> None:
    """Call `close` before another job begins with any of these parts, on worker 0 after `finish`: methods of one object.

    `leave` ends the worker's pushes, where another job of the process waits for its end.
    """
    _open[:] = [each for each in _open if (open_worker := each.worker()) is not None and not open_worker.closed]
    found, methods = [weakref.ref(part) for part in parts], [weakref.WeakMethod(each) for each in (leave, close, finish)]
    _open.append(_Open(weakref.ref(worker), found, *methods))


def elsewhere(worker: Worker) -> list[Elsewhere]:
    """This process's open jobs beside a worker's, in which it still pushes."""
    found = [(each.worker(), each.leave()) for each in _open if each.is_open]
    return [Elsewhere(its, leave) for its, leave in found if its not in (worker, None) and leave and not its.has_left]


def is_any_open() -> bool:
    """Whether this process is in a job of these."""
    return any(each.is_open for each in _open)


def open_worker() -> Worker | None:
    """The worker of this process's first open job; None without one."""
    return next((worker for each in _open if each.is_open and (worker := each.worker()) is not None), None)


def trained() -> set[int]:
    """The parts of this process's open jobs, by id."""
    return {part for each in _open if each.is_open for part in _alive(each.parts)}


def open_stores() -> list[JobMemory]:
    """The memory of each open job of this process."""
    return [worker.store for each in _open if each.is_open and (worker := each.worker()) is not None]


def forget(worker: Worker) -> None:
    """Forget an open job that a worker has left."""
    _open[:] = [each for each in _open if each.worker() not in (worker, None)]  # torch may refuse weak references


def leave(worker: Worker, parts: Iterable[Any]) -> None:
    """As worker 0, which leaves a job: say how many others still train, and remember the job for `end`."""
    others = len(worker.store.others(worker.rank))
    if worker.rank or not others or worker.has_left or environment.is_virtual():
        return
    if not worker.store.layout.policy.waits_for_fold:
        logger.warning(
            "worker 0 closes while others train (%d of them), and what they push from now on is not in its weights: call"
            " wait_for_others() before the last use of its weights, and unwrap() before the next optimizer of these parameters",
            others,
        )
    refs = [weakref.ref(part) for part in parts]
    _left.append(_Left(refs, worker.store.job, worker.version, worker.store.layout.policy.waits_for_fold))


def end(parts: Iterable[Any], timeout_s: float, clock: Clock) -> None:
    """End the earlier jobs of these parts.

    Raises UsageError if an open job shares some of them and each has others, or if others have changed the weights since worker
    0 closed; TimeoutExceededError if they do not leave.
    """
    ids = {id(part) for part in parts}
    for each in _open:
        if (alive := _alive(each.parts)) & ids and alive - ids and ids - alive and each.is_open:
            raise UsageError(
                "some of these parameters are in another open optimizer, and each has others, too: two open optimizers cannot"
                " share parameters; give one optimizer all of them (what has no gradient in a step stays as it is), or close()"
                " the other in every worker if it is not used any more"
            )
    for each in [each for each in _open if ids & _alive(each.parts)]:
        each.end()
    for left in list(_left):
        alive = _alive(left.parts)
        if ids & alive or not alive:
            _left.remove(left)
        if ids & alive:
            _await_end(left, timeout_s, clock)


def _alive(parts: "list[weakref.ref[Any]]") -> set[int]:
    return {id(part) for part in (reference() for reference in parts) if part is not None}


def _await_end(left: _Left, timeout_s: float, clock: Clock) -> None:
    """Wait until the others have left. They leave nothing behind, so the version is read while they are there."""
    try:
        observer = observe(left.job, clock=clock)
    except Error:  # they have left
        if left.waits:
            return
        raise _refusal("may have made updates") from None
    deadline_ns = clock.now_ns() + int(timeout_s * 1e9)
    while not observer.look().over:
        if clock.now_ns() >= deadline_ns:
            raise TimeoutExceededError(
                f"worker 0 waited {timeout_s:g} s for the others to leave the earlier job of these parameters, which it closed:"
                " let every worker close it, or call unwrap() in all of them"
            )
        clock.sleep_ns(_POLL_NS)
    missed = observer.version - left.version
    observer.close()
    if missed > 0:
        raise _refusal(f"made {missed} updates")


def _refusal(what: str) -> UsageError:
    return UsageError(
        f"the earlier job of these parameters {what} more after worker 0 closed, and a new job would begin without them: call"
        " unwrap() in place of close(), which waits for the others' last pushes"
    )


def count_next() -> int:
    """The number of this process's next optimizer. Each call advances the count."""
    _next[0] += 1
    return _next[0] - 1


def find_job(identity: Identity, timeout_s: float, clock: Clock) -> Identity:
    """Wait for the job to join: the job that the count names, else the first that expects this worker.

    The count continues from the job that is found. After the timeout, return the job that the count names, although it does not
    exist.
    """
    deadline_ns = clock.now_ns() + int(timeout_s * 1e9)
    while True:
        instances = discovery.instances_of(identity.job)
        if identity.instance in instances:
            return identity
        for instance in sorted(instances):
            if _expects(identity.of_instance(instance), clock):
                _next[0] = instance + 1
                return identity.of_instance(instance)
        if clock.now_ns() >= deadline_ns:
            return identity
        clock.sleep_ns(_POLL_NS)


def _expects(identity: Identity, clock: Clock) -> bool:
    """Whether the job has a lane of this rank to which no worker has attached yet."""
    try:
        arena = discovery.arena_of(identity.name, _ASK_S, clock)
    except (AttachError, ArenaError):
        return False
    return identity.rank < arena.lanes and arena.lane_state(identity.rank) == LANE_FREE
