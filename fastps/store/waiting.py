"""Who waits takes turns: the waits of one attached lane, and the turns that it takes meanwhile.

Every wait is sliced; between slices the turn is tried, Ctrl-C obeyed, and the peers looked at, so that a death is named within
milliseconds and nothing hangs. Refuses to know what is pushed and pulled (worker.py), and to decide: the scheduler does.
"""

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from fastps.errors import TimeoutExceededError, UsageError, damaged, raise_for_outcome
from fastps.job import limits as config
from fastps.kernels.protocol.lane import AWAITING, FENCED
from fastps.kernels.protocol.worker_lane import WorkerLane
from fastps.membership.job_memory import JobMemory
from fastps.membership.membership import Membership, Owner
from fastps.store.core_sharing import Cores
from fastps.store.late_responses import LateResponses
from fastps.system.deadline import Patience

_Found = TypeVar("_Found")


class TurnTaker:
    """Lane `rank` of a store. Only one thread may use it; with overlap its push thread takes turns, too.

    Attributes:
        rank: this worker's lane.
        forked: whether this is a child of the process that attached, which may only read.
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
        self._turn_lock = threading.RLock()

    def _make_lane(self) -> WorkerLane:
        try:
            lane = WorkerLane(self.store.arena, self.rank)
        except ValueError as error:
            raise damaged(f"the policy of a shard ({error})") from error
        lane.set_user_rule(self.store.layout.rule.address)
        return lane

    def _takers(self) -> int:
        """How many processes the job keeps busy: they share its cores."""
        return self.store.layout.workers

    # -- turns ---------------------------------------------------------------------------------------

    def try_combine(self) -> None:
        """Run every shard's turn that is free. Raises ProtocolError; UsageError in a forked child."""
        if self.forked:
            raise self._forked_error()
        with self._turn_lock:
            self._settle(self.lane.try_combine(self._clock.now_ns()))

    def _settle(self, outcome: int) -> None:
        """What is to be done about a turn that ended so: go on with one that waits for its helpers, or raise ProtocolError."""
        if outcome == AWAITING:
            outcome = self._end_turn()
        if outcome < 0 or outcome == FENCED:
            raise_for_outcome(outcome, self.lane.bad_lane, self.store.arena.buffers)

    def _end_turn(self) -> int:
        """End a held turn whose fold is in a helper's hands: it is stopped, or it has died."""
        patience = Patience(self._clock.now_ns(), self._timeout_ns)
        while (outcome := self.lane.try_combine(self._clock.now_ns())) == AWAITING:
            now_ns = self._clock.now_ns()
            self._look_if_due(now_ns)
            if patience.is_over(now_ns):
                raise TimeoutExceededError(
                    f"worker {self.rank} waited {self._timeout_ns / 1e9:g} s for another worker's part of a fold: that one is"
                    " stopped, or has no core; raise FASTPS_TIMEOUT if it is only slow"
                )
        return outcome

    def take_over(self) -> None:
        """The job's server is gone; without one a worker takes the turns anyway."""

    def look_around(self) -> None:
        """Act on every peer that has died; raises WorkerDiedError where the job ends with one."""
        self._membership.look(self._clock.now_ns())

    def recover_lock(self, owner: Owner, now_ns: int) -> None:
        """Take the turns that a lane's owner holds, whose process is proved to have ended."""
        with self._turn_lock:
            self.lane.recover_lock(owner[0], now_ns, owner[1])

    def recover_stale_locks(self, now_ns: int) -> None:
        """The same of owners that whoever came after them knew to have ended, and did not live to say so."""
        with self._turn_lock:
            self.lane.recover_stale_locks(now_ns)

    def hold_turns(self) -> None:
        """Take every shard's turn and keep it, in order: for copies of rule state. Call `release_turns` soon after.

        Whoever is interrupted meanwhile holds none.
        """
        self._check_not_forked()
        for shard in range(self._shards):
            try:
                self.wait_until(partial(self.lane.hold, shard), 100_000, partial(self._held_text, shard))
            except BaseException:
                self._release(range(shard), False)
                raise

    def _held_text(self, shard: int) -> str:
        return f"worker {self.rank} waited for the turn that worker {self.lane.owner(shard)} holds"

    def release_turns(self, publish: bool) -> None:
        """Let go of every turn; with `publish` the spare buffers of all shards are published first."""
        self._release(range(self._shards), publish)

    def _release(self, shards: range, publish: bool) -> None:
        with self._turn_lock:
            for outcome in [self.lane.release(publish, shard, self._clock.now_ns()) for shard in shards]:
                self._settle(outcome)

    # -- waits ---------------------------------------------------------------------------------------

    def _wait(self, granted: int, done: int, shards: int = 0) -> int:
        """Wait until slots are free, and until so many shards have granted the step and their responses have come.

        Returns when that was over.
        """
        began_ns, cores, patience = self._clock.now_ns(), self.cores, None
        if cores.yields and self.lane.due_ns() < 0:  # who yields may be away for long, and late for a timer
            self._wait_awake(granted, done, shards, began_ns)
        while not self.lane.wait(granted, done, cores.spins, self._slice_ns(), shards) or (
            self._responses.late and not self._responded(granted, shards)
        ):
            self.try_combine()
            now_ns = self._clock.now_ns()
            self._look_if_due(now_ns)
            patience = patience or Patience(began_ns, self._timeout_ns)
            if patience.is_over(now_ns):
                raise TimeoutExceededError(self._timeout_text())
        ended_ns = self._clock.now_ns()
        cores.last_wait_ns = ended_ns - began_ns
        return ended_ns

    def _wait_awake(self, granted: int, done: int, shards: int, began_ns: int) -> None:
        """A short wait without sleep: others have the core, and turns are tried, until it has come or lasts too long."""
        for _ in range(config.ROUNDS_AWAKE):
            if self.lane.wait_awake(granted, done, config.POLLS_AWAKE, shards):
                return
            self.try_combine()
            if self._clock.now_ns() - began_ns >= config.SHORT_WAIT_NS:
                return

    def _look_if_due(self, now_ns: int) -> None:
        if now_ns - self._looked_ns > config.LIVENESS_NS:
            self._look(now_ns)

    def _look(self, now_ns: int) -> None:
        self._looked_ns = now_ns
        self.cores.look()
        self._membership.look(now_ns)

    def _slice_ns(self) -> int:
        """How long to sleep at most: until the next timer is due, for whoever waits fires it."""
        due_ns = self.lane.due_ns()
        if due_ns < 0:
            return config.SLICE_NS
        left_ns = due_ns - self._clock.now_ns()
        # Overdue: whoever holds the turn will fire it, and may be stopped for long; asking without a pause would eat a core.
        return min(config.SLICE_NS, left_ns if left_ns > 0 else config.OVERDUE_NS)

    def _responded(self, granted: int, shards: int) -> bool:
        """Whether enough of the shards that granted the step have answered; sleeps until the next late answer if not."""
        if shards == 0:
            return True
        self._responses.arrive()
        if sum(self._is_fresh(shard, granted) for shard in range(self._shards)) >= shards:
            return True
        self._responses.sleep(config.SLICE_NS)
        return False

    def _wait_for_more(self, granted: int) -> int:
        """Partial pull: up to the timeout for shards that are not fresh yet (tau2 of PSP-SGD). Returns when that was over."""
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
        """Ask again and again until the answer is true, watch the peers meanwhile, and return it.

        Raises TimeoutExceededError with that text, and what `look_around` raises.
        """
        patience = Patience(self._clock.now_ns(), self._timeout_ns)
        while not (found := reached()):
            now_ns = self._clock.now_ns()
            self._membership.look(now_ns)
            if patience.is_over(now_ns):
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
