"""A worker's wait for other workers outside of the store: in a collective of torch.distributed, say.

A discipline may need pushes of the worker that waits there. So the worker combines meanwhile and looks for deaths. Where all
others wait too, some of them for a grant that needs its pushes, it makes pushes without a gradient until that has come.
"""

import logging
import math
import weakref
from collections.abc import Callable, Collection

from torch.distributed import Store  # type: ignore[attr-defined]

from fastps.errors import TimeoutExceededError
from fastps.kernels.protocol.lane import Lane
from fastps.kernels.shm.arena import LANE_LIVE
from fastps.store.worker import Worker
from fastps.system.clock import SYSTEM_CLOCK, Clock
from fastps.system.deadline import Deadline
from fastps.torch.optimizer import DistributedOptimizer

logger = logging.getLogger("fastps.integrations")

_AWAKE_NS = 2_000_000  # a collective of small tensors takes less if all have come
_AWAKE_PAUSE_NS = 50_000
_PAUSE_NS = 500_000
_NOTICE_NS = 20_000_000  # from then on a waiting worker tells the others, and looks whether they wait for it, so often
_AGAIN_NS = 1_000_000  # and so soon again while it pushes for them
_MOST_POSTED = 4  # pushes of this worker that nobody has folded yet; the ring has room for 8

_optimizers: "weakref.WeakSet[DistributedOptimizer]" = weakref.WeakSet()


class Board:
    """Where the waiting workers of one meeting say that they have come: keys in their store, only while a wait is long."""

    def __init__(self, store: Store, number: int, rank: int) -> None:
        self._store, self._number, self.rank = store, number, rank
        self._has_come = False

    def come(self) -> None:
        """Say that this worker has come, once."""
        if not self._has_come:
            self._has_come = True
            self._store.set(self._key(self.rank), "1")

    def have_come(self, ranks: Collection[int]) -> bool:
        """Whether all of these workers have said so."""
        return bool(self._store.check([self._key(rank) for rank in ranks])) if ranks else True

    def leave(self) -> None:
        """Remove what `come` wrote: the meeting is over, so nobody asks for it any more."""
        if self._has_come:
            self._store.delete_key(self._key(self.rank))

    def _key(self, rank: int) -> str:
        return f"{self._number}/{rank}"


def keep_going(optimizer: DistributedOptimizer) -> None:
    """Let this optimizer's job go on in every meeting of this process, until the optimizer is closed."""
    _optimizers.add(optimizer)


def open_workers() -> list[Worker]:
    """The workers of the optimizers given to `keep_going` that still push."""
    workers = [optimizer.worker for optimizer in list(_optimizers)]
    return [worker for worker in workers if not worker.has_left and not worker.forked]


def wait(
    is_over: Callable[[], bool], what: str, board: Board, limit_s: float, *, pushes: bool = True, clock: Clock = SYSTEM_CLOCK
) -> None:
    """Wait until `is_over`, and keep this process's jobs going; with `pushes` also by pushes without a gradient.

    `limit_s` is the longest wait where no worker is open; an open worker has its own.

    Raises WorkerDiedError, TimeoutExceededError that quotes `what`, and whatever combining raises.
    """
    workers = open_workers()
    began_ns = clock.now_ns()
    deadline = Deadline(began_ns, int(limit_s * 1e9))
    while not is_over():
        now_ns = clock.now_ns()
        if now_ns < began_ns + _AWAKE_NS:
            clock.sleep_ns(_AWAKE_PAUSE_NS)
        elif workers:
            _wait_with(workers, is_over, (board.rank, what), Attendance(workers, board, clock) if pushes else None)
            return
        elif deadline.is_over(now_ns):
            raise TimeoutExceededError(_late(board.rank, limit_s, what))
        else:
            clock.sleep_ns(_PAUSE_NS)


def _wait_with(
    workers: list[Worker], is_over: Callable[[], bool], late: tuple[int, str], attendance: "Attendance | None"
) -> None:
    def reached() -> bool:
        if is_over():
            return True
        if attendance is not None:
            attendance.check()
        return False

    first, *others = workers
    rank, what = late
    text = _late(rank, first.store.timeout_s, what)
    first.wait_until(reached, _PAUSE_NS, lambda: text, combines=True, beside=others)


def _late(rank: int, limit_s: float, what: str) -> str:
    return (
        f"worker {rank} waited {limit_s:g} s for the other workers {what}: expected every worker to come to it equally often,"
        " and over several nodes after equally many steps; call it in all workers alike, or raise FASTPS_TIMEOUT if they are"
        " only slow"
    )


class Attendance:
    """The workers that have come to a meeting, and those that wait for a push of one that has."""

    def __init__(self, workers: Collection[Worker], board: Board, clock: Clock) -> None:
        self._jobs = [_Job(worker) for worker in workers]
        self._board, self._clock = board, clock
        self._next_ns = clock.now_ns() + _NOTICE_NS

    def check(self) -> None:
        """If it is time: say that this worker has come, and push without a gradient where nobody computes any more."""
        now_ns = self._clock.now_ns()
        if now_ns < self._next_ns:
            return
        self._next_ns = now_ns + _NOTICE_NS
        self._board.come()
        for job in self._jobs:
            stuck = job.still_stuck()
            if stuck and self._board.have_come([lane for lane in job.others() if lane not in stuck]):
                job.push_nothing(stuck)
                self._next_ns = now_ns + _AGAIN_NS


class _Job:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._arena, self._layout = worker.store.arena, worker.store.layout
        self._told = False
        self._posted: dict[int, int] = {}  # of the lanes that were stuck at the last look

    def others(self) -> list[int]:
        """The lanes of the others that push, or will once they have attached."""
        return self._worker.store.others(self._worker.rank)

    def still_stuck(self) -> set[int]:
        """The lanes of the others whose last push is posted and whose next step has not begun, now and at the last look.

        A worker that leaves the meeting before this one sees its end, and makes a step, is rarely taken for one of these.
        """
        before = self._posted
        self._posted = {lane: self._arena.counters(lane)["posted"] for lane in self.others() if self._is_stuck(lane)}
        return {lane for lane, posted in self._posted.items() if before.get(lane) == posted}

    def _is_stuck(self, lane: int) -> bool:
        if self._arena.lane_state(lane) != LANE_LIVE:
            return False
        if self._layout.policy.at_once:  # it waits for nothing but a free slot
            counters = self._arena.counters(lane)
            return counters["posted"] - counters["done"] >= self._layout.slots
        shards, words = range(self._arena.shards), Lane(self._arena, lane)
        granted = sum(words.granted(shard) > self._arena.clock(lane, shard) for shard in shards)
        return granted < math.ceil(self._layout.policy.pull * len(shards) - 1e-9)

    def push_nothing(self, stuck: Collection[int]) -> None:
        """Push without a gradient if this worker may begin a step. Its weights stay: it may be inside of one."""
        worker = self._worker
        if self._layout.policy.warm_up:  # its steps are counted by those that have a gradient
            return
        if worker.lane.posted() - worker.lane.done() >= _MOST_POSTED or not worker.push_nothing() or self._told:
            return
        self._told = True
        others = ", ".join(f"worker {each}" for each in sorted(stuck))
        logger.info(
            "worker %d waits for other workers outside of the store, and %s for its pushes: it pushes without a gradient",
            worker.rank,
            others,
        )
