"""The server of a job: a process of its own that takes every turn, so that the workers need not (`server="process"`).

Run by who creates the store as `python -m fastps.processes.server` (server_process.py). It runs the workers' loop on a lane of
its own: due turns and timers, then rest until somebody posts. It pushes nothing, and no scheduler knows of it. It ends by
itself when no worker is there any more and the store's creator answers no more, whoever died in whatever order. Refuses to keep
anything that its death would take away: all that it decides lies in the arena; on devices it owns the memory, and there its end
is the job's.
"""

import logging
import os
import pickle
import sys
from dataclasses import replace
from typing import Any

from fastps.device.interface import DeviceError
from fastps.device.store import DeviceStore
from fastps.errors import Error, raise_for_outcome
from fastps.job import limits as config
from fastps.kernels.protocol import lane as turn
from fastps.kernels.shm.arena import ABI
from fastps.membership import rendezvous
from fastps.membership.peers import Peers
from fastps.store.core_sharing import Cores
from fastps.store.server_process import WORKER_PRESENT, Order
from fastps.store.store import Store
from fastps.system import shared_memory as memory_of
from fastps.system.clock import SYSTEM_CLOCK

logger = logging.getLogger("fastps.server")

_ASK_TIMEOUT_S = 0.05
_NAME_TAKEN_NS = 5_000_000_000  # the server of an earlier job of this name may need that long to find that it is over
_HELD_NS = 100_000  # between two tries to end a turn whose fold a helper has not given back


class Server:
    """The loop of one server, on the server's lane of `store`, which nobody else has claimed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._arena = store.arena
        self._clock = store.clock
        layout, own = store.layout, store.arena.server_lane
        self._peers = Peers(store.arena, store.descriptor, store.job, own)
        self.lane = turn.Lane(store.arena, own)
        self.lane.set_user_rule(layout.rule.address)
        self._cores = Cores(store.arena, self.lane, layout, takers=layout.workers + 1)
        self._looked_ns = self._clock.now_ns()
        self._held = False  # a turn whose fold a helper has not given back
        self._is_lost = False  # a worker's death has ended a job on devices: nothing may be queued any more

    def run(self) -> None:
        """Serve until the job is over. Raises ProtocolError, DeviceError."""
        try:
            while True:
                called = self.lane.event()
                self._take_turns()
                now_ns = self._clock.now_ns()
                if now_ns - self._looked_ns >= config.LIVENESS_NS:
                    self._looked_ns = now_ns
                    self._cores.look()
                    self._look(now_ns)
                if self._is_over():
                    return
                rest_ns = self._rest_ns(now_ns)
                if rest_ns < config.SLICE_NS or not self._cores.yields or not self._is_called_soon(called, now_ns):
                    self.lane.await_call(called, self._cores.spins, rest_ns)
                self._cores.last_wait_ns = self._clock.now_ns() - now_ns
        finally:
            self._peers.close()

    def _is_called_soon(self, called: int, began_ns: int) -> bool:
        """A short rest without sleep: others have the core until the next call has come, or it lasts too long.

        Not where there is something to be in time for: who yields may be away for as long as the others compute.
        """
        while not self.lane.await_call_awake(called, config.POLLS_AWAKE):
            if self._clock.now_ns() - began_ns >= config.SHORT_WAIT_NS:
                return False
        return True

    def _take_turns(self) -> None:
        if self._is_lost:
            return
        outcome = self.lane.try_combine(self._clock.now_ns())
        self._held = outcome == turn.AWAITING
        if outcome < 0 and self.lane.fold_failure is not None:
            self._look(self._clock.now_ns())
            if not self._is_lost:
                raise self.lane.fold_failure
        elif outcome < 0 or outcome == turn.FENCED:
            raise_for_outcome(outcome, self.lane.bad_lane, self._arena.buffers)

    def _rest_ns(self, now_ns: int) -> int:
        """How long to rest at most: until the next timer is due."""
        due_ns = self.lane.due_ns()
        if self._held:
            return _HELD_NS
        return config.SLICE_NS if due_ns < 0 else min(config.SLICE_NS, max(due_ns - now_ns, config.OVERDUE_NS))

    def _look(self, now_ns: int) -> None:
        """Break the turns of workers that have died, and count them no more where the job goes on without."""
        self.lane.recover_stale_locks(now_ns)
        while (dead := self._peers.dead()) is not None:
            self.lane.recover_lock(dead[0], now_ns, dead[1])
            if self._store.layout.faults.continues:
                error = self._peers.error(dead)
                if self._arena.mark_dead(*dead):
                    logger.warning("%s; the job goes on without it", error)
                self._peers.forget(dead)
                self._take_turns()
            else:
                # The others end with an error that names it, each by itself: its lane must stay as it is for them to see.
                self._peers.dismiss(dead)
                self._is_lost = bool(self._store.layout.homes)

    def _is_over(self) -> bool:
        """Whether nobody is there, and nobody can come: who joins a job asks a worker of it, or its creator."""
        for lane, (generation, state) in enumerate(self._arena.members()):
            if state in WORKER_PRESENT and not self._peers.is_dismissed((lane, generation)):
                return False
        try:
            answer = rendezvous.connect(
                self._store.job, "host", abi=ABI, layout_hash=bytes(32), layout=b"", observer=True, timeout_s=_ASK_TIMEOUT_S
            )
        except rendezvous.Silent:
            return False
        except (rendezvous.Absent, rendezvous.OtherUser, rendezvous.AbiDiffers):
            return True
        # A job that was begun again has the same name and another memory.
        is_ours = os.path.sameopenfile(answer.memfd, self._store.descriptor)
        os.close(answer.memfd)
        os.close(answer.pidfd)
        return not is_ours


def serve(order: Order) -> None:
    """Be the server that is ordered, until the job is over."""
    layout, compiled = order.layout, None
    if order.rule:
        from fastps.kernels.update import jit

        compiled = jit.compile_rule(*pickle.loads(order.rule))  # our own parent's
        layout = replace(layout, rule=replace(layout.rule, address=compiled.address))
    kind = Store if order.make_device is None else DeviceStore
    store = kind(order.memfd, memory_of.map_shared(order.memfd), layout, order.job, order.timeout_s, SYSTEM_CLOCK, [])
    try:
        _answer(store)
        server = Server(store)
        if order.make_device is not None:
            assert isinstance(store, DeviceStore)
            store.use(order.make_device()).own_memory(server.lane)
        if not store.arena.serve(os.getpid()):
            raise Error(f"job {order.job}: expected to be its first server, found that it has or had one")
        sys.stdin.read()  # until the creator answers, or has gone
        try:
            server.run()
        except BaseException as error:
            store.arena.finish(store.arena.server_lane, f"{type(error).__name__}: {error}")
            raise
        store.arena.finish(store.arena.server_lane)
    finally:
        store.close()
        del compiled  # the rule's code, until now


def _answer(store: Store) -> None:
    """Answer at the server's name, so that the workers get this process's pidfd."""
    deadline_ns = store.clock.now_ns() + _NAME_TAKEN_NS
    while True:
        try:
            store.answer_at("server")
            return
        except OSError:
            if store.clock.now_ns() >= deadline_ns:
                raise
        store.clock.sleep_ns(1_000_000)


def main() -> int:
    """Read the order, and serve. Returns the exit code."""
    order: Any = pickle.load(sys.stdin.buffer)  # our own parent's
    try:
        serve(order)
    except (Error, DeviceError) as error:
        print(f"fastps server of job {order.job}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
