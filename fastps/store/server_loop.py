"""The loop of a server: on a lane of its own it folds due pushes, fires due timers, and rests until a worker posts.

It pushes nothing, and no scheduler counts it. All its decisions lie in the arena.
"""

import logging
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fastps.errors import raise_for_outcome
from fastps.job import limits as config
from fastps.job.layout import Layout
from fastps.kernels.protocol.lane import AWAITING, BAD_DESCRIPTOR, FENCED, Lane
from fastps.membership import rendezvous
from fastps.membership.membership import expel
from fastps.membership.peers import Peers
from fastps.membership.stalls import Stalls, patience_ns
from fastps.store.core_sharing import Cores
from fastps.store.server_process import WORKER_PRESENT, Order
from fastps.store.store import Store

logger = logging.getLogger("fastps.server")

_ASK_TIMEOUT_S = 0.05
_NAME_TAKEN_NS = 5_000_000_000  # the server of an earlier job with this name may take that long to notice its end
_HELD_NS = 100_000  # between two tries to end a fold whose chunk a helper still has


class Server:
    """The loop of one server, on the server's lane of `store`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._arena = store.arena
        self._clock = store.clock
        layout, own = store.layout, store.arena.server_lane
        self._peers = Peers(store.arena, store.descriptor, store.job, own)
        self.lane = Lane(store.arena, own)
        self.lane.set_user_rule(layout.rule.address)
        self._cores = Cores(store.arena, self.lane, layout, takers=layout.workers + 1)
        self._stalls = Stalls(self.lane, store.descriptor, patience_ns(store))
        self._looked_ns = self._clock.now_ns()
        self._held = False  # whether a helper still has a chunk of a fold
        self._is_lost = False  # a worker's death has ended a job on devices: queue no more work

    def run(self) -> None:
        """Serve until the job is over. Raises ProtocolError, DeviceError."""
        try:
            while True:
                called = self.lane.event()
                self._combine()
                now_ns = self._clock.now_ns()
                if now_ns - self._looked_ns >= config.LIVENESS_NS:
                    self._looked_ns = now_ns
                    self._cores.look()
                    self._look(now_ns)
                    self._stalls.look(now_ns, self._settle)
                if self._is_over():
                    return
                rest_ns = self._rest_ns(now_ns)
                if rest_ns < config.SLICE_NS or not self._cores.yields or not self._is_called_soon(called, now_ns):
                    self.lane.await_call(called, self._cores.spins, rest_ns)
                self._cores.last_wait_ns = self._clock.now_ns() - now_ns
        finally:
            self._peers.close()

    def _is_called_soon(self, called: int, began_ns: int) -> bool:
        """Yield the core until the next call comes, or until the wait takes too long. Returns whether a call came.

        Do not call this while a timer is due soon: a process that yields may get the core back late.
        """
        while not self.lane.await_call_awake(called, config.POLLS_AWAKE):
            if self._clock.now_ns() - began_ns >= config.SHORT_WAIT_NS:
                return False
        return True

    def _combine(self) -> None:
        if self._is_lost:
            return
        self._settle(self.lane.try_combine(self._clock.now_ns()))

    def _settle(self, outcome: int) -> None:
        """Handle an outcome of try_combine. Raises ProtocolError, DeviceError."""
        while outcome == BAD_DESCRIPTOR and expel(self._store, self.lane.bad_lane, self.lane.damage):
            outcome = self.lane.try_combine(self._clock.now_ns())
        self._held = outcome == AWAITING
        if outcome < 0 and self.lane.fold_failure is not None:
            self._look(self._clock.now_ns())
            if not self._is_lost:
                raise self.lane.fold_failure
        elif outcome < 0 or outcome == FENCED:
            raise_for_outcome(outcome, self.lane.bad_lane, self._arena.buffers)

    def _rest_ns(self, now_ns: int) -> int:
        """Return the longest rest in ns: until the next timer is due."""
        due_ns = self.lane.due_ns()
        if self._held:
            return _HELD_NS
        return config.SLICE_NS if due_ns < 0 else min(config.SLICE_NS, max(due_ns - now_ns, config.OVERDUE_NS))

    def _look(self, now_ns: int) -> None:
        """Recover the locks of dead workers, and mark the workers dead if the job goes on without them.

        Raises DeviceError if work on a device has failed.
        """
        if not self._is_lost:
            self._store.check_devices()
        self.lane.recover_stale_locks(now_ns)
        while (dead := self._peers.dead()) is not None:
            self.lane.recover_lock(dead[0], now_ns, dead[1])
            if self._store.layout.faults.continues:
                error = self._peers.error(dead)
                if self._arena.mark_dead(*dead):
                    logger.warning("%s; the job goes on without it", error)
                self._peers.forget(dead)
                self._combine()
            else:
                # The other workers end with an error that names it. Its lane stays unchanged for them to see.
                self._peers.dismiss(dead)
                self._is_lost = bool(self._store.layout.owner_lanes)

    def _is_over(self) -> bool:
        """Whether no worker is left and none can join: a joiner connects to a worker or to the creator."""
        for lane, (generation, state) in enumerate(self._arena.members()):
            if state in WORKER_PRESENT and not self._peers.is_dismissed((lane, generation)):
                return False
        try:
            answer = rendezvous.observe(self._store.job, "host", _ASK_TIMEOUT_S)
        except rendezvous.Silent:
            return False
        except (rendezvous.Absent, rendezvous.AbiDiffers):
            return True
        # A restarted job has the same name and another arena.
        is_ours = os.path.sameopenfile(answer.memfd, self._store.descriptor)
        os.close(answer.memfd)
        os.close(answer.pidfd)
        return not is_ours


def answer_as_server(store: Store) -> None:
    """Listen at the server's name, so that workers get this process's pidfd."""
    deadline_ns = store.clock.now_ns() + _NAME_TAKEN_NS
    while True:
        try:
            store.answer_at("server")
            return
        except OSError:
            if store.clock.now_ns() >= deadline_ns:
                raise
        store.clock.sleep_ns(1_000_000)


def with_rule(layout: Layout, rule: bytes) -> tuple[Layout, Any]:
    """The layout with the compiled user rule that `picklable` packed, and the object that keeps its code alive."""
    if not rule:
        return layout, None
    from fastps.kernels.update import jit

    compiled = jit.compile_rule(*pickle.loads(rule))  # our own parent's
    return replace(layout, rule=replace(layout.rule, address=compiled.address)), compiled


def run_from_order(serve: Callable[[Order], None], name: str, errors: tuple[type[Exception], ...]) -> int:
    """Read the order from standard input and serve. Print errors of these types. Returns the exit code."""
    order: Order = pickle.load(sys.stdin.buffer)  # our own parent's
    try:
        serve(order)
    except errors as error:
        print(f"fastps {name} of job {order.job}: {error}", file=sys.stderr)
        return 1
    return 0
