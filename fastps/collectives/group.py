"""One rank of a process group: it runs collectives one after the other, and notices dead ranks, mismatches and timeouts.

It knows addresses and no tensors. After an error the group is broken, here and for all other ranks, because they no longer
agree on where they are; the error says which rank was the cause.

The ranks meet before: rank 0 makes one memory for all, and every rank listens at an abstract socket until all have met. Small
texts go through a key-value store, such as the one of torch.distributed. Each rank has a pidfd of every other one, so that a
death is noticed. A group is for one machine, and every rank finds out if another one is elsewhere.
"""

import contextlib
import json
import os
import secrets
import select
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from fastps.collectives.stores import StoreChoice
from fastps.errors import AttachError, Error, TimeoutExceededError, UnsupportedError, UsageError, WorkerDiedError
from fastps.kernels.collectives import exchange
from fastps.kernels.memory.mapping import SharedMapping
from fastps.membership import rendezvous
from fastps.system import exit_handlers, launch_note, shared_memory
from fastps.system.clock import SYSTEM_CLOCK, Clock
from fastps.system.deadline import Deadline
from fastps.system.machine import boot_id
from fastps.version import __version__

_SLICE_NS = 50_000_000  # how often a waiting rank looks for dead ranks
_SPINS, _YIELDS = 2000, 200  # before it sleeps; spins only where every rank has a core
_TIMED_BYTES = 1 << 20  # all-reduces of at least this size choose the kind of stores
_ALL_REDUCE = exchange.KINDS["all_reduce"]
FORMAT = 0x70670001  # of the group's memory; no number of an arena
DEPTH = 4
_MOST_MEMORY = 32 << 20  # bytes for the blocks of a group, which should stay in the caches
_LEAST_BLOCK, _MOST_BLOCK = 64 << 10, 256 << 10
_CONNECT_S = 5.0
_DIFFER = "are in different collectives: expected the same on all ranks, in the same order and of the same size and type, found"


class KeyStore(Protocol):
    """A key-value store that all ranks share. `get` waits until the key is there."""

    def set(self, key: str, value: str) -> Any:
        """Set a key."""

    def get(self, key: str) -> bytes:
        """Wait for a key, and return its value."""


def block_bytes_of(size: int) -> int:
    """Bytes of a block in a group of `size` ranks.

    >>> block_bytes_of(2), block_bytes_of(64)
    (262144, 131072)
    """
    return max(_LEAST_BLOCK, min(_MOST_BLOCK, _MOST_MEMORY // (size * DEPTH) // 4096 * 4096))


def meet(store: KeyStore, rank: int, size: int, *, clock: Clock = SYSTEM_CLOCK) -> tuple[SharedMapping, dict[int, int]]:
    """Meet the other ranks. Returns the memory of the group, and the pidfds of the other ranks, which the caller closes.

    All ranks call this with stores that show the same keys, which no other group has used.

    Raises UnsupportedError for ranks on several machines or more than MAX_RANKS, AttachError if a rank cannot be reached
    although it runs here, ArenaError without memory, and what the store raises when a rank does not come.
    """
    if size > exchange.MAX_RANKS:
        raise UnsupportedError(
            f"a process group of fastps has at most {exchange.MAX_RANKS} ranks, found {size}: use gloo, or fewer processes"
        )
    _check_machine(store, rank, size)
    block_bytes = block_bytes_of(size)
    pidfds: dict[int, int] = {}
    with contextlib.ExitStack() as others, contextlib.ExitStack() as own:
        pidfd = os.pidfd_open(os.getpid())
        own.callback(os.close, pidfd)
        if rank == 0:
            memory_bytes = exchange.memory_bytes(size, DEPTH, block_bytes)
            memfd = shared_memory.create(memory_bytes, f"a process group of {size} ranks")
            own.callback(os.close, memfd)
            store.set("job", f"group-{secrets.token_hex(8)}")
        job = store.get("job").decode()
        text = f"fastps {__version__}, process group of {size} ranks, blocks of {block_bytes} bytes".encode()
        if rank != 0:
            memfd, pidfds[0] = _connect(job, 0, text, clock)
            own.callback(os.close, memfd)
            others.callback(os.close, pidfds[0])
        listener = rendezvous.Listener(rendezvous.place_name(job, rank), memfd, pidfd, text, rank, FORMAT)
        own.callback(listener.close)
        store.set(f"listens/{rank}", "yes")
        for other in range(size):
            store.get(f"listens/{other}")
            if other != rank and other not in pidfds:
                theirs, pidfds[other] = _connect(job, other, text, clock)
                others.callback(os.close, pidfds[other])
                os.close(theirs)
        store.set(f"met/{rank}", "yes")
        for other in range(size):
            store.get(f"met/{other}")  # listeners close only when nobody needs them any more
        memory = shared_memory.map_shared(memfd)
        others.pop_all()  # the caller closes them
        return memory, pidfds


def _check_machine(store: KeyStore, rank: int, size: int) -> None:
    """Raise UnsupportedError on every rank if the ranks run on several machines."""
    own = {"boot": boot_id(), "host": os.uname().nodename}
    store.set(f"machine/{rank}", json.dumps(own))
    machines = [json.loads(store.get(f"machine/{other}")) for other in range(size)]
    elsewhere = next((other for other in range(size) if machines[other]["boot"] != machines[0]["boot"]), None)
    if elsewhere is not None:
        raise UnsupportedError(
            "a process group of fastps is for one machine: expected all ranks on the machine of rank 0"
            f" ({machines[0]['host']}), found rank {elsewhere} on {machines[elsewhere]['host']}; use gloo or nccl over machines"
        )


def _connect(job: str, rank: int, text: bytes, clock: Clock) -> tuple[int, int]:
    """The memory and the pidfd of a rank that listens, or that is about to. Raises AttachError."""
    end_ns = clock.now_ns() + int(_CONNECT_S * 1e9)
    while True:
        try:
            offer = rendezvous.connect(job, rank, _CONNECT_S, text, abi=FORMAT, clock=clock)
            return offer.memfd, offer.pidfd
        except rendezvous.Absent as error:
            if clock.now_ns() >= end_ns:
                raise AttachError(
                    f"expected rank {rank} to listen on this machine, found nobody at its name: it has ended, or it runs in"
                    " another network namespace (another container); start all ranks in one"
                ) from error
            clock.sleep_ns(1_000_000)
        except rendezvous.LayoutDiffers as error:
            raise AttachError(f"expected rank {rank} to run {text.decode()!r}, found {error.theirs!r}") from error
        except (rendezvous.Silent, rendezvous.AbiDiffers) as error:
            raise AttachError(f"rank {rank} cannot be met: {error}") from error


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
        memory, self._pidfds = meet(store, rank, size, clock=clock)
        launch_note.send()
        has_cores = size <= len(os.sched_getaffinity(0))
        self._exchange: exchange.Exchange | None = exchange.Exchange(
            memory, rank, size, block_bytes_of(size), DEPTH, _SPINS if has_cores else 0, _YIELDS
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
                interrupted = not isinstance(error, Exception)
                self._cause = "a collective was interrupted" if interrupted else str(error)
                mine.fail(f"rank {self.rank}: {type(error).__name__ if interrupted else error}")
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
            for pidfd in self._pidfds.values():
                os.close(pidfd)

    def _close_at_exit(self, failure: str | None) -> None:
        mine = self._exchange
        if mine is None or os.getpid() != self._process_id:
            return
        if failure is not None:
            mine.fail(f"rank {self.rank}: {failure}")
        mine.leave()

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
        poll = select.poll()
        for pidfd in self._pidfds.values():
            poll.register(pidfd, select.POLLIN)
        ended = {pidfd for pidfd, _ in poll.poll(0)}
        died = [rank for rank, pidfd in self._pidfds.items() if pidfd in ended and mine.state_of(rank)[0] == exchange.LIVE]
        if died:
            raise WorkerDiedError(
                f"rank {died[0]} (process {mine.state_of(died[0])[1]}) died: expected it to take part in {what}, found its"
                " process gone; see its own output for the reason",
                died[0],
            )
        failures = {rank: mine.state_of(rank)[2] for rank in range(self.size) if mine.state_of(rank)[0] == exchange.FAILED}
        for rank, message in failures.items():
            if _DIFFER in message:
                raise UsageError(f"{message} (found by rank {rank})")
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
    return UsageError(f"ranks {rank} and {mine.other} {_DIFFER} {ours} on rank {rank} and {theirs} on rank {mine.other}")


def _timeout(mine: exchange.Exchange, timeout_ns: int) -> Error:
    _, process_id, _, has_begun = mine.state_of(mine.other)
    found = "has begun, and is slow or stopped" if has_begun else "has not begun it"
    return TimeoutExceededError(
        f"{exchange.described(*mine.own_words())} timed out after {timeout_ns / 1e9:g} s: expected rank {mine.other} (process"
        f" {process_id}) to take part, found that it {found};"
        " let all ranks call the same collectives, or give init_process_group a longer timeout"
    )
