"""The waits of one attached lane. A waiting worker combines: it takes free shard locks and folds what is posted."""

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from fastps.errors import UsageError, damaged
from fastps.job import limits
from fastps.kernels.protocol.lane import BUSY, DONE
from fastps.kernels.protocol.wait import Wait
from fastps.kernels.protocol.worker_lane import WorkerLane
from fastps.membership.job_memory import JobMemory
from fastps.membership.membership import Membership, Owner
from fastps.membership.stalls import Stalls, patience_ns
from fastps.store import drive
from fastps.store.core_sharing import Cores
from fastps.store.late_responses import LateResponses
from fastps.system import proc
from fastps.system.deadline import Deadline

_Found = TypeVar("_Found")


class LaneWaiter:
    """Lane `rank` of a store: it waits, and combines while it waits, or calls the server.

    Only one thread may use it; with overlap, the push thread combines too.

    Attributes:
        rank: this worker's lane.
        forked: whether this process is a forked child of the process that attached, and so may only read.
        combine_lock: see Driven.
    """

    _membership: Membership

    def __init__(self, store: JobMemory, rank: int) -> None:
        self.store = store
        self.rank = rank
        self.lane = self._make_lane()
        self.forked = False
        self.step_wait = Wait(self.lane)
        self.cores = Cores(store.arena, self.step_wait, store.layout, store.layout.workers + self.lane.served)
        self._policy = store.layout.policy
        self._clock = store.clock
        self._timeout_ns = int(store.timeout_s * 1e9)
        self._checked_ns = self._clock.now_ns()
        self._shards = store.arena.shards
        self._responses = LateResponses(0.0, 0, 0, self._clock)
        self.combine_lock = threading.RLock()
        self._stalls = Stalls(self.lane, store.descriptor, patience_ns(store))

    def _make_lane(self) -> WorkerLane:
        try:
            lane = WorkerLane(self.store.arena, self.rank)
        except ValueError as error:
            raise damaged(f"the policy of a shard ({error})") from error
        lane.set_user_rule(self.store.layout.rule.address)
        lane.leave_to_server(self.store.arena.is_served())
        return lane

    # -- what a driver asks for ----------------------------------------------------------------------

    def check_peers(self, now_ns: int | None = None) -> None:
        """Handle every peer that has died. Raises WorkerDiedError if the job ends with a lost worker."""
        self._checked_ns = self._clock.now_ns() if now_ns is None else now_ns
        self.cores.look()
        self._membership.look(self._checked_ns)

    def check_progress(self, now_ns: int, tell: Callable[[int], None]) -> None:
        """Go on without a peer that holds up this lane because it is stopped."""
        self._stalls.look(now_ns, tell)

    def take_over(self) -> None:
        """Combine from now on, because the server is gone."""
        with self.combine_lock:
            self.lane.leave_to_server(False)
            self.cores.share_among(self.store.layout.workers)

    def tell_expelled(self) -> None:
        """Log every worker that was expelled. Raises ExpelledError if this is one."""
        self._membership.tell_expelled()

    def explain_failure(self) -> bool:
        """A worker knows no cause; a DeviceWorker looks for one where it calls."""
        return False

    # -- shard locks ---------------------------------------------------------------------------------

    def try_combine(self) -> None:
        """Combine on every shard whose lock is free. Raises ProtocolError; UsageError in a forked child or if fenced."""
        self._check_not_forked()
        with self.combine_lock:
            self._settle(self.lane.try_combine(self._clock.now_ns()))

    def _settle(self, outcome: int) -> None:
        """Handle an outcome of try_combine, or of a push. Raises ExpelledError if this worker was expelled."""
        if outcome not in (DONE, BUSY):
            drive.settle(self, outcome, self._unsettled_text)

    def recover_lock(self, owner: Owner, now_ns: int) -> None:
        """Recover the shard locks of a lane's owner. The caller has proved that the owner's process has ended."""
        with self.combine_lock:
            self.lane.recover_lock(owner[0], now_ns, owner[1])

    def recover_stale_locks(self, now_ns: int) -> None:
        """Recover the shard locks of ended owners whose successor in the lane died before it could recover them."""
        with self.combine_lock:
            self.lane.recover_stale_locks(now_ns)

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
        self._check_not_forked()
        for shard in range(self._shards):
            try:
                self.wait_until(partial(self.lane.hold, shard), 100_000, partial(self._held_text, shard))
            except BaseException:
                self._release(range(shard), False)
                raise

    def unlock_shards(self, publish: bool) -> None:
        """Release every shard lock. With `publish`, publish the spare buffers of all shards first."""
        self._release(range(self._shards), publish)
        if self.lane.served:
            self.try_combine()  # the server, for the pushes that were posted meanwhile

    def _release(self, shards: range, publish: bool) -> None:
        with self.combine_lock:
            for outcome in [self.lane.release(publish, shard, self._clock.now_ns()) for shard in shards]:
                self._settle(outcome)

    # -- waits ---------------------------------------------------------------------------------------

    def wait_until(self, reached: Callable[[], _Found | None], pause_ns: int, timeout_text: Callable[[], str]) -> _Found:
        """Poll `reached` every `pause_ns` until its result is true, check the peers meanwhile, and return the result.

        Raises TimeoutExceededError with `timeout_text`, and the errors of `check_peers`.
        """
        return drive.poll(self, reached, pause_ns, timeout_text)

    def wait_to_join(self, timeout_text: Callable[[], str]) -> None:
        """Wait until every shard counts this worker. Raises as `wait_until`."""
        wait = Wait(self.lane)
        wait.begin_join(self._clock.now_ns())
        drive.drive(self, wait, timeout_text)

    def _wait_for_step(self, granted: int, done: int, shards: int) -> int:
        """Wait until the lane is done with `done` pushes, and `shards` shards have granted `granted` steps and responded.

        Return the time at which the wait ended, in ns. Raises TimeoutExceededError.
        """
        self.step_wait.begin_step(granted, done, self._clock.now_ns(), shards)
        drive.drive(self, self.step_wait, self._timeout_text)
        if self._responses.late:
            self.wait_until(partial(self._have_responded, granted, shards), 1_000, self._timeout_text)
        return self._clock.now_ns()

    def _wait_for_room(self) -> None:
        """Wait until the ring has room for one more descriptor. Raises ExpelledError, after which it never has."""
        if self.lane.is_expelled():
            self.tell_expelled()
        posted = self.lane.posted()
        if self.lane.done() > posted:  # a damaged count; the ring would never have room
            raise damaged(f"the ring of worker {self.rank} ({posted} posted, {self.lane.done()} done with)")
        wait = Wait(self.lane)  # of its own: with overlap the push thread waits beside the worker's
        wait.begin_step(0, posted - limits.RING_SIZE + 1, self._clock.now_ns())
        drive.drive(self, wait, self._timeout_text)

    def _have_responded(self, granted: int, shards: int) -> bool:
        """Whether enough of the shards that granted the step have responded. If not, sleep until the next late response."""
        self.try_combine()
        self._responses.arrive()
        if sum(self._is_fresh(shard, granted) for shard in range(self._shards)) >= shards:
            return True
        self._responses.sleep(limits.SLICE_NS)
        return False

    def _wait_for_more(self, granted: int) -> int:
        """Wait up to the pull timeout for shards that are not fresh yet (tau2 of PSP-SGD). Return the time it ended, in ns."""
        until_ns = self._clock.now_ns() + int(self._policy.pull_timeout * 1e9)
        while (now_ns := self._clock.now_ns()) < until_ns:
            self._responses.arrive()
            if all(self._is_fresh(shard, granted) for shard in range(self._shards)):
                break
            self.lane.wait(granted, 0, 0, min(until_ns - now_ns, 1_000_000))
            self.try_combine()
        return now_ns

    def _is_fresh(self, shard: int, granted: int) -> bool:
        return self.lane.granted(shard) >= granted and shard not in self._responses.late

    def _timeout_text(self) -> str:
        others = ", ".join(self._membership.waited_for()) or "a grant"
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
            f" for {others}; raise FASTPS_TIMEOUT if they are only slow{served}"
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
            raise self._forked_error()

    def _forked_error(self) -> UsageError:
        return UsageError(
            f"this process ({os.getpid()}) was forked from worker {self.rank} and may only read: call fastps in the worker"
            " itself, not in its children (such as DataLoader workers)"
        )
