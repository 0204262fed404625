"""The server of a job (`server="process"`): a process that is the combiner for all pushes, so that workers only push and wait.

The store's creator runs it as `python -m fastps.processes.server`. On a lane of its own it folds due pushes, fires due timers,
and rests until a worker posts. It pushes nothing, and no scheduler counts it. It ends by itself once no worker is left and the
store's creator no longer answers, in whatever order they ended. All its decisions lie in the arena, so its death loses nothing
on the CPU; on devices it owns the memory, and the job ends with it.
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
from fastps.kernels.protocol.lane import AWAITING, FENCED, Lane
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
        """Recover the locks of dead workers, and mark the workers dead if the job goes on without them."""
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
            answer = rendezvous.connect(
                self._store.job, "host", abi=ABI, layout_hash=bytes(32), layout=b"", observer=True, timeout_s=_ASK_TIMEOUT_S
            )
        except rendezvous.Silent:
            return False
        except (rendezvous.Absent, rendezvous.OtherUser, rendezvous.AbiDiffers):
            return True
        # A restarted job has the same name and another arena.
        is_ours = os.path.sameopenfile(answer.memfd, self._store.descriptor)
        os.close(answer.memfd)
        os.close(answer.pidfd)
        return not is_ours


def serve(order: Order) -> None:
    """Run the ordered server until the job is over."""
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
        sys.stdin.read()  # until the creator answers, or has ended
        try:
            server.run()
        except BaseException as error:
            store.arena.finish(store.arena.server_lane, f"{type(error).__name__}: {error}")
            raise
        store.arena.finish(store.arena.server_lane)
    finally:
        store.close()
        del compiled  # keeps the rule's code alive until now


def _answer(store: Store) -> None:
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


def main() -> int:
    """Read the order and serve. Returns the exit code."""
    order: Any = pickle.load(sys.stdin.buffer)  # our own parent's
    try:
        serve(order)
    except (Error, DeviceError) as error:
        print(f"fastps server of job {order.job}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
