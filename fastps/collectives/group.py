"""One rank of a process group: it runs collectives one after the other, and notices dead ranks, mismatches and timeouts.

It knows addresses and no tensors. After an error the group is broken, here and for all other ranks, because they no longer
agree on where they are; the error says which rank was the cause.
"""

import os
import threading
from collections.abc import Sequence
from typing import NamedTuple

from fastps.collectives.group_memory import DEPTH, KeyStore, Met, meet
from fastps.collectives.stores import StoreChoice
from fastps.errors import Error, TimeoutExceededError, UsageError, WorkerDiedError
from fastps.kernels.collectives import exchange
from fastps.system import exit_handlers
from fastps.system.clock import SYSTEM_CLOCK, Clock
from fastps.system.deadline import Deadline

_SLICE_NS = 50_000_000  # how often a waiting rank looks for dead ranks
_SPINS, _YIELDS = 2000, 200  # before it sleeps; spins only where every rank has a core
_TIMED_BYTES = 1 << 20  # all-reduces of at least this size choose the kind of stores
_ALL_REDUCE = exchange.KINDS["all_reduce"]


class Collective(NamedTuple):
    """What `Exchange.start` takes; `bytes_each` is its `bytes`. The caller keeps the memory until `Group.run` has returned."""

    kind: int
    element: int
    reduction: int
    root: int
    bytes_each: int
    inputs: Sequence[int]
    outputs: Sequence[int]


class Group:
    """This process as rank `rank` of `size`. All ranks construct it at the same time; see `meet` for the errors.

    Example::

        group = Group(torch.distributed.TCPStore(...), rank, size, timeout_ns=1_800_000_000_000)
        group.run(Collective(KINDS["barrier"], 255, NO_REDUCTION, 0, 0, [], []))
        group.close()
    """

    def __init__(self, store: KeyStore, rank: int, size: int, timeout_ns: int, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.rank, self.size, self.timeout_ns = rank, size, timeout_ns
        self._clock = clock
        self._process_id = os.getpid()
        self._met: Met = meet(store, rank, size, clock=clock)
        has_cores = size <= len(os.sched_getaffinity(0))
        self._exchange: exchange.Exchange | None = exchange.Exchange(
            self._met.memory, rank, size, self._met.block_bytes, DEPTH, _SPINS if has_cores else 0, _YIELDS
        )
        self._stores = StoreChoice()
        self._running = threading.Lock()
        self._cause: str | None = None
        exit_handlers.register(self, self._close_at_exit)

    def run(self, collective: Collective, timeout_ns: int | None = None) -> None:
        """Run a collective, and return when this rank's tensors are ready. Other threads wait for their turn.

        Raises WorkerDiedError for a rank that died, failed or left; UsageError for ranks in different collectives, and in a
        group that is closed or broken; TimeoutExceededError. Each of these, and an interruption, breaks the group.
        """
        with self._running:
            mine = self._exchange
            if mine is None:
                raise UsageError("expected an open process group, found that it was destroyed; call init_process_group again")
            if self._cause is not None:
                raise UsageError(f"the process group is broken: {self._cause}; destroy it, and start all ranks again")
            times = self.rank == 0 and collective.kind == _ALL_REDUCE and collective.bytes_each >= _TIMED_BYTES
            if times:
                mine.set_streams(self._stores.following())
            try:
                mine.start(*collective)
                timeout_ns = self.timeout_ns if timeout_ns is None else timeout_ns
                if times:
                    self._wait(mine, timeout_ns, first=True)  # from here on all ranks take part
                    began_ns = self._clock.now_ns()
                self._wait(mine, timeout_ns)
                if times:
                    self._stores.note((self._clock.now_ns() - began_ns) / collective.bytes_each)
            except BaseException as error:
                self._break(mine, error)
                raise

    def fail(self, reason: str) -> None:
        """Break the group: tell the other ranks why this one takes part no more."""
        if self._exchange is not None and os.getpid() == self._process_id:
            self._cause = self._cause or reason
            self._exchange.fail(f"rank {self.rank}: {reason}")

    def close(self) -> None:
        """Leave the group and free its memory. May be called twice."""
        exit_handlers.forget(self)
        with self._running:
            mine, self._exchange = self._exchange, None
            if mine is None:
                return
            if os.getpid() == self._process_id:  # a forked child has no rank
                mine.leave()
            self._met.close()
            del self._met

    def _close_at_exit(self, failure: str | None) -> None:
        mine = self._exchange
        if mine is None or os.getpid() != self._process_id:
            return
        if failure is not None:
            mine.fail(f"rank {self.rank}: {failure}")
        mine.leave()

    def _break(self, mine: exchange.Exchange, error: BaseException) -> None:
        interrupted = not isinstance(error, Exception)
        self._cause = "a collective was interrupted" if interrupted else str(error)
        mine.fail(f"rank {self.rank}: {type(error).__name__ if interrupted else error}")

    def _wait(self, mine: exchange.Exchange, timeout_ns: int, *, first: bool = False) -> None:
        status = mine.advance(_SLICE_NS, first)
        if status == exchange.DONE:
            return
        deadline = Deadline(self._clock.now_ns(), timeout_ns)
        while status != exchange.DONE:
            if status == exchange.DIFFERS:
                raise _difference(mine, self.rank)
            self._check_ranks(mine)
            if deadline.is_over(self._clock.now_ns()):
                raise _timeout(mine, timeout_ns)
            awaited = mine.other
            has_left = mine.state_of(awaited)[0] == exchange.LEFT  # read first: it left after its last collective
            status = mine.advance(0 if has_left else _SLICE_NS, first)
            if has_left and status == exchange.WAITING and mine.other == awaited:
                raise _absence(mine)

    def _check_ranks(self, mine: exchange.Exchange) -> None:
        """Raise WorkerDiedError if a rank died or failed. One that died comes first: others may have failed because of it."""
        what = exchange.described(*mine.own_words())
        dead = self._met.dead()
        died = [rank for rank in dead if mine.state_of(rank)[0] == exchange.LIVE]
        if died:
            raise WorkerDiedError(
                f"rank {died[0]} (process {mine.state_of(died[0])[1]}) died: expected it to take part in {what}, found its"
                " process gone; see its own output for the reason",
                died[0],
            )
        failures = {rank: mine.state_of(rank)[2] for rank in range(self.size) if mine.state_of(rank)[0] == exchange.FAILED}
        for rank, message in failures.items():
            raise WorkerDiedError(f"rank {rank} failed, which {what} on rank {self.rank} waits for: {message}", rank)


def _absence(mine: exchange.Exchange) -> Error:
    what = exchange.described(*mine.own_words())
    return WorkerDiedError(
        f"rank {mine.other} has left the process group: expected it to take part in {what}, found that it"
        " had ended or called destroy_process_group; let all ranks call the same collectives",
        mine.other,
    )


def _difference(mine: exchange.Exchange, rank: int) -> Error:
    ours, theirs = exchange.described(*mine.own_words()), exchange.described(*mine.words_of(mine.other))
    return UsageError(
        f"ranks {rank} and {mine.other} are in different collectives: expected the same on all ranks, in the same order and of"
        f" the same size and type, found {ours} on rank {rank} and {theirs} on rank {mine.other}"
    )


def _timeout(mine: exchange.Exchange, timeout_ns: int) -> Error:
    _, process_id, _, has_begun = mine.state_of(mine.other)
    found = "has begun, and is slow or stopped" if has_begun else "has not begun it"
    return TimeoutExceededError(
        f"{exchange.described(*mine.own_words())} timed out after {timeout_ns / 1e9:g} s: expected rank {mine.other} (process"
        f" {process_id}) to take part, found that it {found};"
        " let all ranks call the same collectives, or give init_process_group a longer timeout"
    )
