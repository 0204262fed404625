"""One attached lane: what its process reads, and its waits. A waiting worker combines: it takes free shard locks and folds."""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NoReturn, Protocol, TypeVar

from fastps.errors import UsageError, damaged
from fastps.job import limits
from fastps.kernels.protocol.lane import BUSY, DONE, Lane
from fastps.kernels.protocol.wait import Wait
from fastps.membership.job_memory import JobMemory
from fastps.membership.membership import Membership
from fastps.membership.stalls import Stalls, patience_ns
from fastps.store import drive
from fastps.store.core_sharing import Cores
from fastps.system import proc
from fastps.system.deadline import Deadline
from fastps.tracing.recorder import Recorder

logger = logging.getLogger("fastps.membership")

_Found = TypeVar("_Found")


class Answers(Protocol):
    """What the lane asks of the part that folds: see Combining."""

    def after_lock(self) -> None:
        """Called with all shard locks held, before the worker reads or writes what they guard."""

    def before_release(self, publish: bool) -> None:
        """Called before the locks are released."""

    def on_server_end(self) -> None:
        """Let the workers combine, or raise the error that ends the job."""

    def explain_failure(self) -> bool:
        """Raise the cause of a failed fold, if it is known. True: go on all the same."""


class AttachedLane:
    """Lane `rank` of a store: it waits, and combines while it waits, or calls the server. `Worker` adds what changes it.

    Only one thread may use it; with overlap, the push thread combines too.
    """

    begun_at: int
    generation: int
    recorder: Recorder | None
    combining: Answers
    _membership: Membership
    check: Callable[[], None] | None = None  # called with each check of the peers: raises what else ends a wait in a node

    def __init__(self, store: JobMemory, rank: int) -> None:
        self.store = store
        self.rank = rank
        self.lane = self._make_lane()
        self.forked = False  # whether this process is a forked child of the one that attached, and so may only read
        self.step_wait = Wait(self.lane)
        self.cores = Cores(store.arena, self.step_wait, store.layout, store.layout.workers + self.lane.served)
        self._policy = store.layout.policy
        self._clock = store.clock
        self._timeout_ns = int(store.timeout_s * 1e9)
        self._checked_ns = self._clock.now_ns()
        self._shards = store.arena.shards
        self.combine_lock = threading.RLock()
        self.stalls = Stalls(self.lane, store.descriptor, patience_ns(store))
        self.buffers = [0] * self._shards
        self.closed = self._left = False

    def _make_lane(self) -> Lane:
        try:
            lane = Lane(self.store.arena, self.rank)
        except ValueError as error:
            raise damaged(f"the policy of a shard ({error})") from error
        lane.set_user_rule(self.store.layout.rule.address)
        lane.leave_to_server(self.store.arena.is_served())
        return lane

    @property
    def steps(self) -> int:
        """Steps pushed so far, as the scheduler counts them: a late joiner begins at the slowest worker's count."""
        return self.lane.steps

    @property
    def own_steps(self) -> int:
        """The number of steps that this worker has pushed itself."""
        return self.lane.steps - self.begun_at

    @property
    def slot(self) -> int:
        """The slot of the next push."""
        return self.lane.slot

    @property
    def posts(self) -> int:
        """The number of pushes and null pushes so far; with overlap the last may still be in flight."""
        return self.lane.posts

    @property
    def loss(self) -> float:
        """The training loss that observers see. It is sent with the next push."""
        return self.lane.loss

    @loss.setter
    def loss(self, loss: float) -> None:
        self.lane.loss = loss

    @property
    def stale_blocks(self) -> int:
        """The number of shards that were not fresh when a step began, summed over all steps (PSP-SGD's partial pull)."""
        return self.lane.stale_blocks

    @property
    def batch_size(self) -> int:
        """The batch size that the last grant carried (tune=true); 0: the worker chooses."""
        return self.lane.batch()

    @property
    def version(self) -> int:
        """The version of the last pull."""
        return self.lane.version

    @property
    def is_behind(self) -> bool:
        """Whether a shard has another version than this worker has pulled."""
        arena = self.store.arena
        return any(self.lane.shard_version(shard) != arena.shard_version(shard) for shard in range(arena.shards))

    @property
    def has_left(self) -> bool:
        """Whether this worker has left or is closed, and so makes no more pushes."""
        return self._left or self.closed

    @property
    def push_folded(self) -> bool:
        """Whether every push of this worker has been folded, dropped or rejected."""
        return self.lane.done() >= self.lane.posted()

    def check_peers(self, now_ns: int | None = None) -> None:
        """Handle every peer that has died. Raises WorkerDiedError if the job ends with a lost worker, and as `check`."""
        if self.check is not None:
            self.check()
        self._checked_ns = self._clock.now_ns() if now_ns is None else now_ns
        self.cores.check()
        self._membership.check(self._checked_ns)

    def take_over(self) -> None:
        """Go on without the server, which has ended, or raise the error that ends the job."""
        self.combining.on_server_end()

    def combine_itself(self) -> None:
        """Combine from now on, because the server is gone."""
        with self.combine_lock:
            self.lane.leave_to_server(False)
            self.cores.share_among(self.store.layout.workers)

    def tell_expelled(self) -> None:
        """Log every worker that was expelled. Raises ExpelledError if this is one."""
        self._membership.tell_expelled()

    def explain_failure(self) -> bool:
        """Raise the cause of a failed fold, if the part that folds knows it. True: go on all the same."""
        return self.combining.explain_failure()

    def try_combine(self) -> None:
        """Combine on every shard whose lock is free. Raises ProtocolError; UsageError in a forked child or if fenced."""
        self._check_not_forked()
        drive.combine(self, self._unsettled_text)

    def _finish_combine(self, outcome: int) -> None:
        """Handle an outcome of try_combine, or of a push. Raises ExpelledError if this worker was expelled."""
        if outcome not in (DONE, BUSY):
            drive.finish_combine(self, outcome, self._unsettled_text)

    def _combine_last(self) -> None:
        """Combine; where this worker was passed by, try for a short time to hold the lock, to write its late counters again."""
        self.try_combine()
        deadline = Deadline(self._clock.now_ns(), limits.SLICE_NS)
        while self.lane.was_passed_by() and not deadline.is_over(self._clock.now_ns()):
            self.try_combine()

    def lock_shards(self) -> None:
        """Take every shard lock, in order, and keep them to copy optimizer state. Call `unlock_shards` soon after.

        If an exception interrupts this method, it releases every lock.
        """
        self.try_combine()  # which ends a fold of this worker whose wait was interrupted
        for shard in range(self._shards):
            try:
                self.wait_until(partial(self.lane.hold, shard), 100_000, partial(self._held_text, shard))
            except BaseException:
                self._release(range(shard), False)
                raise
        try:
            self.combining.after_lock()
        except BaseException:
            self._release(range(self._shards), False)
            raise

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold every shard lock inside the block, which publishes nothing."""
        self.lock_shards()
        try:
            yield
        finally:
            self.unlock_shards(False)

    @contextlib.contextmanager
    def locked_if_free(self) -> Iterator[bool]:
        """Hold every shard lock inside the block, which publishes nothing, if all are free now; yields whether they are."""
        held = 0
        try:
            while held < self._shards and self.lane.hold(held):
                held += 1
            yield held == self._shards
        finally:
            self._release(range(held), False)

    def unlock_shards(self, publish: bool) -> None:
        """Release every shard lock. With `publish`, publish the spare buffers of all shards first."""
        is_done = False
        try:
            self.combining.before_release(publish)
            is_done = True
        finally:
            self._release(range(self._shards), publish and is_done)
        if self.lane.served:
            self.try_combine()  # the server, for the pushes that were posted meanwhile

    def release_version(self, publish: bool) -> None:
        """Release the lock of the only shard. With `publish`, what was written into the spare buffer is the next version."""
        self._release(range(1), publish, advances=True)

    def _release(self, shards: range, publish: bool, *, advances: bool = False) -> None:
        with self.combine_lock:
            for outcome in [self.lane.release(publish, shard, self._clock.now_ns(), advances) for shard in shards]:
                self._finish_combine(outcome)

    def wait_until(
        self,
        reached: Callable[[], _Found | None],
        pause_ns: int,
        timeout_text: Callable[[], str],
        *,
        combines: bool = False,
        beside: Sequence["AttachedLane"] = (),
    ) -> _Found:
        """Poll `reached` as `drive.poll` does, with the lanes `beside` that this process has in other jobs.

        Raises TimeoutExceededError with `timeout_text`, and errors of `check_peers`.
        """
        return drive.poll([self, *beside], reached, pause_ns, timeout_text, combines=combines)

    def wait_to_join(self, timeout_text: Callable[[], str]) -> None:
        """Wait until every shard counts this worker. Raises as `wait_until`."""
        wait = Wait(self.lane)
        wait.begin_join(self._clock.now_ns())
        drive.drive(self, wait, timeout_text)

    def wait_for_step(self, granted: int, done: int, shards: int) -> int:
        """Wait until the lane is done with `done` pushes, and `shards` shards have granted `granted` steps.

        Return the time at which the wait ended, in ns. Raises TimeoutExceededError.
        """
        return drive.drive_step(self, self.step_wait, (granted, done, shards), self.timeout_text)

    def wait_for_room(self) -> None:
        """Wait until the ring has room for one more descriptor. Raises ExpelledError, after which it never has."""
        if self.lane.is_expelled():
            self.tell_expelled()
        posted = self.lane.posted()
        if self.lane.done() > posted:  # a damaged count; the ring would never have room
            raise damaged(f"the ring of worker {self.rank} ({posted} posted, {self.lane.done()} done with)")
        wait = Wait(self.lane)  # of its own: with overlap the push thread waits beside the worker's
        wait.begin_step(0, posted - limits.RING_SIZE + 1, self._clock.now_ns())
        drive.drive(self, wait, self.timeout_text)

    def timeout_text(self) -> str:
        """Why the wait for a step ends; "" if it goes on, because all that it waits for live, and do something else."""
        others = ", ".join(self._membership.waited_for()) or "a grant"
        there = self._membership.where_they_wait()
        if not there and self._membership.are_busy():
            logger.warning(
                "worker %d has waited %g s at step %d for %s, and goes on waiting, because it lives",
                self.rank, self._timeout_ns / 1e9, self.lane.steps, others,
            )  # fmt: skip
            return ""
        served = ""
        if self.lane.served:
            process = self.store.arena.process_id(self.store.arena.server_lane)
            served = f"; process {process}, the job's server, " + (
                f"is stopped: wake it (kill -CONT {process}), or end it (kill -KILL {process}), and the workers combine"
                if proc.is_stopped(process)
                else "combines"
            )
        return (
            f"worker {self.rank} waited {self._timeout_ns / 1e9:g} s at step {self.lane.steps} under {self._policy.spec}"
            f" for {others}{there or '; raise FASTPS_TIMEOUT if they are only slow'}{served}"
        )

    def _held_text(self, shard: int) -> str:
        return f"worker {self.rank} waited for the lock of shard {shard}, which worker {self.lane.owner(shard)} holds"

    def _unsettled_text(self) -> str:
        return (
            f"worker {self.rank} waited {self._timeout_ns / 1e9:g} s for another worker's part of a fold: that one is"
            " stopped, or has no core; raise FASTPS_TIMEOUT if it is only slow"
        )

    def _check_not_forked(self) -> None:
        if self.forked:
            self._refuse()

    def _refuse(self) -> NoReturn:
        if self.forked:
            raise UsageError(
                f"this process ({os.getpid()}) was forked from worker {self.rank} and may only read: call fastps in the worker"
                " itself, not in its children (such as DataLoader workers)"
            )
        raise UsageError(
            f"worker {self.rank} is closed, by close(), or because another optimizer was given its parameters: two open"
            " optimizers cannot share some, so give one all of them, in param_groups; else wrap a torch optimizer again, or"
            " attach in a new job"
        )
