"""The waits of one attached lane. A waiting worker combines: it takes free shard locks and folds what is posted.

Every wait is sliced. Between slices the worker tries to combine, Python runs signal handlers (Ctrl-C), and the peers are
checked every 50 ms, so a death is reported within 100 ms and no wait hangs. The scheduler makes all decisions.
"""

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from fastps.errors import TimeoutExceededError, UsageError, damaged, raise_for_outcome
from fastps.job import limits
from fastps.kernels.protocol.lane import AWAITING, BAD_DESCRIPTOR, FENCED
from fastps.kernels.protocol.worker_lane import EXPELLED, WorkerLane
from fastps.membership.job_memory import JobMemory
from fastps.membership.membership import Membership, Owner, expel
from fastps.membership.stalls import Stalls, patience_ns
from fastps.store.core_sharing import Cores
from fastps.store.late_responses import LateResponses
from fastps.system.deadline import Deadline

_Found = TypeVar("_Found")


class LaneWaiter:
    """Lane `rank` of a store: it waits, and combines while it waits.

    Only one thread may use it; with overlap, the push thread combines too.

    Attributes:
        rank: this worker's lane.
        forked: whether this process is a forked child of the process that attached, and so may only read.
    """

    _membership: Membership

    def __init__(self, store: JobMemory, rank: int) -> None:
        self.store = store
        self.rank = rank
        self.lane = self._make_lane()
        self.forked = False
        self.cores = Cores(store.arena, self.lane, store.layout, self._takers())
        self._policy = store.layout.policy
        self._clock = store.clock
        self._timeout_ns = int(store.timeout_s * 1e9)
        self._looked_ns = self._clock.now_ns()
        self._shards = store.arena.shards
        self._responses = LateResponses(0.0, 0, 0, self._clock)
        self._combine_lock = threading.RLock()
        self._stalls = Stalls(self.lane, store.descriptor, patience_ns(store))

    def _make_lane(self) -> WorkerLane:
        try:
            lane = WorkerLane(self.store.arena, self.rank)
        except ValueError as error:
            raise damaged(f"the policy of a shard ({error})") from error
        lane.set_user_rule(self.store.layout.rule.address)
        return lane

    def _takers(self) -> int:
        """The number of processes that the job keeps busy, which share its cores."""
        return self.store.layout.workers

    # -- shard locks ---------------------------------------------------------------------------------

    def try_combine(self) -> None:
        """Combine on every shard whose lock is free. Raises ProtocolError; UsageError in a forked child or if fenced."""
        if self.forked:
            raise self._forked_error()
        with self._combine_lock:
            self._settle(self.lane.try_combine(self._clock.now_ns()))

    def _settle(self, outcome: int) -> None:
        """Handle an outcome of try_combine: finish a fold that waits for its helpers, and raise the error of a failed one.

        A worker whose words are damaged is expelled, if the job goes on without it. Raises ExpelledError if this is it.
        """
        if outcome == AWAITING:
            outcome = self._end_turn()
        while outcome == BAD_DESCRIPTOR and expel(self.store, self.lane.bad_lane, self.lane.damage):
            self._membership.tell_expelled()
            outcome = self._end_turn()
        if outcome == EXPELLED:
            self._membership.tell_expelled()
        if outcome < 0 or outcome == FENCED:
            raise_for_outcome(outcome, self.lane.bad_lane, self.store.arena.buffers)

    def _end_turn(self) -> int:
        """Finish a fold whose shard lock this worker holds, and whose helper is stopped or has died."""
        deadline = Deadline(self._clock.now_ns(), self._timeout_ns)
        while (outcome := self.lane.try_combine(self._clock.now_ns())) == AWAITING:
            now_ns = self._clock.now_ns()
            self._look_if_due(now_ns)
            self._pass_by_if_stopped(now_ns)
            if deadline.is_over(now_ns):
                raise TimeoutExceededError(
                    f"worker {self.rank} waited {self._timeout_ns / 1e9:g} s for another worker's part of a fold: that one is"
                    " stopped, or has no core; raise FASTPS_TIMEOUT if it is only slow"
                )
        return outcome

    def take_over(self) -> None:
        """Combine from now on, because the server is gone. A worker of a job without a server combines anyway."""

    def look_around(self) -> None:
        """Handle every peer that has died. Raises WorkerDiedError if the job ends with a lost worker."""
        self._membership.look(self._clock.now_ns())

    def recover_lock(self, owner: Owner, now_ns: int) -> None:
        """Recover the shard locks of a lane's owner. The caller has proved that the owner's process has ended."""
        with self._combine_lock:
            self.lane.recover_lock(owner[0], now_ns, owner[1])

    def recover_stale_locks(self, now_ns: int) -> None:
        """Recover the shard locks of ended owners whose successor in the lane died before it could recover them."""
        with self._combine_lock:
            self.lane.recover_stale_locks(now_ns)

    def _pass_by_if_stopped(self, now_ns: int) -> None:
        """Go on without a peer that holds up this lane because it is stopped."""
        with self._combine_lock:
            self._stalls.look(now_ns, self._settle)

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
        if self.lane.is_expelled():
            self._membership.tell_expelled()
        for shard in range(self._shards):
            try:
                self.wait_until(partial(self.lane.hold, shard), 100_000, partial(self._held_text, shard))
            except BaseException:
                self._release(range(shard), False)
                raise

    def _held_text(self, shard: int) -> str:
        return f"worker {self.rank} waited for the lock of shard {shard}, which worker {self.lane.owner(shard)} holds"

    def unlock_shards(self, publish: bool) -> None:
        """Release every shard lock. With `publish`, publish the spare buffers of all shards first."""
        self._release(range(self._shards), publish)

    def _release(self, shards: range, publish: bool) -> None:
        with self._combine_lock:
            for outcome in [self.lane.release(publish, shard, self._clock.now_ns()) for shard in shards]:
                self._settle(outcome)

    # -- waits ---------------------------------------------------------------------------------------

    def _wait(self, granted: int, done: int, shards: int = 0) -> int:
        """Wait until the lane is done with `done` pushes, and `shards` shards have granted `granted` steps and responded.

        `shards` 0 means all. Return the time at which the wait ended, in ns. Raises TimeoutExceededError.
        """
        began_ns, cores, deadline = self._clock.now_ns(), self.cores, None
        if cores.yields and self.lane.due_ns() < 0:  # a yield may take long, and miss a timer
            self._wait_awake(granted, done, shards, began_ns)
        while not self.lane.wait(granted, done, cores.spins, self._slice_ns(), shards) or (
            self._responses.late and not self._responded(granted, shards)
        ):
            self.try_combine()
            now_ns = self._clock.now_ns()
            self._look_if_due(now_ns)
            self._pass_by_if_stopped(now_ns)
            deadline = deadline or Deadline(began_ns, self._timeout_ns)
            if deadline.is_over(now_ns):
                raise TimeoutExceededError(self._timeout_text())
        ended_ns = self._clock.now_ns()
        cores.last_wait_ns = ended_ns - began_ns
        return ended_ns

    def _wait_awake(self, granted: int, done: int, shards: int, began_ns: int) -> None:
        """Wait for a short time without sleep: yield the core and try to combine, until the wait is over or takes too long."""
        for _ in range(limits.ROUNDS_AWAKE):
            if self.lane.wait_awake(granted, done, limits.POLLS_AWAKE, shards):
                return
            self.try_combine()
            if self._clock.now_ns() - began_ns >= limits.SHORT_WAIT_NS:
                return

    def _wait_for_room(self) -> None:
        """Wait until the ring has room for one more descriptor. Raises ExpelledError, after which it never has."""
        if self.lane.is_expelled():
            self._membership.tell_expelled()
        posted = self.lane.posted()
        if self.lane.done() > posted:  # a damaged count; the ring would never have room
            raise damaged(f"the ring of worker {self.rank} ({posted} posted, {self.lane.done()} done with)")
        self._wait(0, posted - limits.RING_SIZE + 1)

    def _look_if_due(self, now_ns: int) -> None:
        if now_ns - self._looked_ns > limits.LIVENESS_NS:
            self._look(now_ns)

    def _look(self, now_ns: int) -> None:
        self._looked_ns = now_ns
        self.cores.look()
        self._membership.look(now_ns)

    def _slice_ns(self) -> int:
        """The longest sleep of a wait: until the next timer is due, because waiting workers fire the timers."""
        due_ns = self.lane.due_ns()
        if due_ns < 0:
            return limits.SLICE_NS
        left_ns = due_ns - self._clock.now_ns()
        # An overdue timer is the combiner's to fire, and the combiner may be stopped for long: sleep rather than spin.
        return min(limits.SLICE_NS, left_ns if left_ns > 0 else limits.OVERDUE_NS)

    def _responded(self, granted: int, shards: int) -> bool:
        """Whether enough of the shards that granted the step have responded. If not, sleep until the next late response."""
        if shards == 0:
            return True
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
            self.lane.wait(granted, 0, 0, min(until_ns - now_ns, self._slice_ns(), 1_000_000))
            self.try_combine()
        return now_ns

    def _is_fresh(self, shard: int, granted: int) -> bool:
        return self.lane.granted(shard) >= granted and shard not in self._responses.late

    def _timeout_text(self) -> str:
        others = ", ".join(self._membership.waited_for()) or "a grant"
        return (
            f"worker {self.rank} waited {self._timeout_ns / 1e9:g} s at step {self.lane.steps} under {self._policy.spec}"
            f" for {others}; raise FASTPS_TIMEOUT if they are only slow"
        )

    def wait_until(self, reached: Callable[[], _Found | None], pause_ns: int, timeout_text: Callable[[], str]) -> _Found:
        """Poll `reached` every `pause_ns` until its result is true, check the peers meanwhile, and return the result.

        Raises TimeoutExceededError with `timeout_text`, and the errors of `look_around`.
        """
        deadline = Deadline(self._clock.now_ns(), self._timeout_ns)
        while not (found := reached()):
            now_ns = self._clock.now_ns()
            self._membership.look(now_ns)
            self._pass_by_if_stopped(now_ns)
            if deadline.is_over(now_ns):
                raise TimeoutExceededError(timeout_text())
            self._clock.sleep_ns(pause_ns)
        return found

    def _check_not_forked(self) -> None:
        if self.forked:
            raise self._forked_error()

    def _forked_error(self) -> UsageError:
        return UsageError(
            f"this process ({os.getpid()}) was forked from worker {self.rank} and may only read: call fastps in the worker"
            " itself, not in its children (such as DataLoader workers)"
        )
