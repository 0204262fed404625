"""How the ranks of a process group meet: one memory for all, and a pidfd of each rank, so that a death is noticed.

Rank 0 makes the memory, and every rank listens at an abstract socket until all have met. Small texts go through a key-value
store, such as the one of torch.distributed. A group is for one machine, and every rank finds out if another one is elsewhere.
"""

import json
import os
import secrets
import select
from dataclasses import dataclass
from typing import Any, Protocol

from fastps.errors import AttachError, UnsupportedError
from fastps.kernels.collectives import exchange
from fastps.kernels.shm.mapping import SharedMapping
from fastps.membership import rendezvous
from fastps.system import shared_memory
from fastps.system.clock import SYSTEM_CLOCK, Clock
from fastps.system.machine import boot_id
from fastps.version import __version__

FORMAT = 0x70670001  # of the group's memory; no number of an arena
DEPTH = 4
_MOST_MEMORY = 32 << 20  # bytes for the blocks of a group, which should stay in the caches
_LEAST_BLOCK, _MOST_BLOCK = 64 << 10, 256 << 10
_CONNECT_S = 5.0


class KeyStore(Protocol):
    """A key-value store that all ranks share. `get` waits until the key is there."""

    def set(self, key: str, value: str) -> Any:
        """Set a key."""

    def get(self, key: str) -> bytes:
        """Wait for a key, and return its value."""


@dataclass
class Met:
    """What a rank has after the meeting: the memory of the group, and the pidfds of the other ranks. The owner closes it."""

    memory: SharedMapping
    block_bytes: int
    pidfds: dict[int, int]

    def dead(self) -> list[int]:
        """The ranks whose processes have ended; one system call."""
        poll = select.poll()
        for pidfd in self.pidfds.values():
            poll.register(pidfd, select.POLLIN)
        ended = {pidfd for pidfd, _ in poll.poll(0)}
        return [rank for rank, pidfd in self.pidfds.items() if pidfd in ended]

    def close(self) -> None:
        """Close the pidfds. The memory is freed with its last user."""
        for pidfd in self.pidfds.values():
            os.close(pidfd)
        self.pidfds = {}


def block_bytes_of(size: int) -> int:
    """Bytes of a block in a group of `size` ranks.

    >>> block_bytes_of(2), block_bytes_of(64)
    (262144, 131072)
    """
    return max(_LEAST_BLOCK, min(_MOST_BLOCK, _MOST_MEMORY // (size * DEPTH) // 4096 * 4096))


def meet(store: KeyStore, rank: int, size: int, *, clock: Clock = SYSTEM_CLOCK) -> Met:
    """Meet the other ranks. All ranks call this with stores that show the same keys, which no other group has used.

    Raises UnsupportedError for ranks on several machines or more than MAX_RANKS, AttachError if a rank cannot be reached
    although it runs here, ArenaError without memory, and what the store raises when a rank does not come.
    """
    if size > exchange.MAX_RANKS:
        raise UnsupportedError(
            f"a process group of fastps has at most {exchange.MAX_RANKS} ranks, found {size}: use gloo, or fewer processes"
        )
    _check_machine(store, rank, size)
    block_bytes = block_bytes_of(size)
    pidfd = os.pidfd_open(os.getpid())
    memfd = -1
    pidfds: dict[int, int] = {}
    listener: rendezvous.Listener | None = None
    try:
        if rank == 0:
            memory_bytes = exchange.memory_bytes(size, DEPTH, block_bytes)
            memfd = shared_memory.create(memory_bytes, f"a process group of {size} ranks")
            store.set("job", f"group-{secrets.token_hex(8)}")
        job = store.get("job").decode()
        text = f"fastps {__version__}, process group of {size} ranks, blocks of {block_bytes} bytes".encode()
        if rank != 0:
            memfd, pidfds[0] = _connect(job, 0, text, clock)
        listener = rendezvous.Listener(rendezvous.place_name(job, rank), memfd, pidfd, text, rank, FORMAT)
        store.set(f"listens/{rank}", "yes")
        for other in range(size):
            store.get(f"listens/{other}")
            if other != rank and other not in pidfds:
                theirs, pidfds[other] = _connect(job, other, text, clock)
                os.close(theirs)
        store.set(f"met/{rank}", "yes")
        for other in range(size):
            store.get(f"met/{other}")  # listeners close only when nobody needs them any more
        return Met(shared_memory.map_shared(memfd), block_bytes, pidfds)
    except BaseException:
        for descriptor in pidfds.values():
            os.close(descriptor)
        raise
    finally:
        if listener is not None:
            listener.close()
        os.close(pidfd)
        if memfd >= 0:
            os.close(memfd)


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
