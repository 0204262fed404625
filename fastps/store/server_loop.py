"""The loop of a server: on a lane of its own it folds due pushes, fires due timers, and rests until a worker posts."""

import os
import pickle
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

from fastps.job.layout import Layout
from fastps.job.limits import SLICE_NS
from fastps.kernels.protocol.lane import Lane
from fastps.kernels.protocol.wait import Wait
from fastps.membership import rendezvous
from fastps.membership.membership import lose
from fastps.membership.peers import WORKER_PRESENT, Owner, Peers
from fastps.membership.stalls import Stalls, patience_ns
from fastps.store.core_sharing import Cores
from fastps.store.drive import drive
from fastps.store.server_process import Order
from fastps.store.store import Store

_ASK_TIMEOUT_S = 0.05
_NAME_TAKEN_NS = 5_000_000_000  # the server of an earlier job with this name may take that long to notice its end


class Folds:
    """What a server folds, as a part of it: here floats in host memory, by the compiled core."""

    def check(self, server: "Server") -> None:
        """Called with each check of the peers. Raise the error that ends the job."""

    def is_over(self, are_gone: bool) -> bool:
        """Whether the server may end; `are_gone`: no worker is left, and none can join."""
        return are_gone


class Server:
    """The loop of one server, on the server's lane of `store`. `folds` is set before `run`."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.folds = Folds()
        self._arena = store.arena
        self._clock = store.clock
        layout, own = store.layout, store.arena.server_lane
        self._peers = Peers(store.arena, store.descriptor, store.job, own)
        self.lane = Lane(store.arena, own)
        self.lane.set_user_rule(layout.rule.address)
        self.combine_lock = threading.RLock()
        self._wait = Wait(self.lane)
        self._cores = Cores(store.arena, self._wait, layout, takers=layout.workers + 1)
        self.stalls = Stalls(self.lane, store.descriptor, patience_ns(store))
        self._is_lost = False  # a worker's death has ended a job on devices: queue no more work

    def run(self) -> None:
        """Serve until the job is over. Raises ProtocolError, DeviceError."""
        self._wait.begin_calls(self._clock.now_ns())
        with closing(self._peers):
            drive(self, self._wait, None, lambda: self.folds.is_over(self._are_gone()))

    def check_peers(self, now_ns: int) -> None:
        """Recover the locks of dead workers, and mark the workers dead if the job goes on without them.

        Raises DeviceError if work on a device has failed.
        """
        self._cores.check()
        if not self._is_lost:
            self.folds.check(self)
        self.lane.recover_stale_locks(now_ns)
        while (dead := self._peers.dead()) is not None:
            if lose(self, self._peers, dead, now_ns) is not None:  # the workers end with that error
                self._peers.dismiss(dead)
                if self.store.layout.owner_lanes:
                    self._is_lost = True
                    self._wait.begin_own(SLICE_NS, now_ns)

    def take_over(self) -> None:
        """A server leaves combining to nobody, so there is nothing to take over."""

    def tell_expelled(self) -> None:
        """Workers report expelled workers; a server does not."""

    def explain_failure(self) -> bool:
        """Raise the error of a fold on a device, if there is one, unless a worker's death explains it."""
        if self.lane.fold_failure is not None:
            self.check_peers(self._clock.now_ns())
            if not self._is_lost:
                raise self.lane.fold_failure
        return self._is_lost

    def is_dismissed(self, owner: Owner) -> bool:
        """Whether the loss of this worker is known, and has ended the job."""
        return self._peers.is_dismissed(owner)

    def _are_gone(self) -> bool:
        """Whether no worker is left and none can join: a joiner connects to a worker or to the creator."""
        for lane, (generation, state) in enumerate(self._arena.members()):
            if state in WORKER_PRESENT and not self._peers.is_dismissed((lane, generation)):
                return False
        try:
            answer = rendezvous.connect(self.store.job, "host", _ASK_TIMEOUT_S, observer=True)
        except rendezvous.Silent:
            return False
        except (rendezvous.Absent, rendezvous.AbiDiffers):
            return True
        with answer:  # a restarted job has the same name and another arena
            return not os.path.sameopenfile(answer.memfd, self.store.descriptor)


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
