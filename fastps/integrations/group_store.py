"""The store of torch.distributed in which the workers of one launch meet. Worker 0 keeps it, and tells the others its port.

They meet at a place of the job's name: no port is agreed on before, and nothing stays in a file system.
"""

import os
from collections.abc import Callable
from contextlib import closing

from torch.distributed import Store  # type: ignore[attr-defined]

from fastps.errors import TimeoutExceededError
from fastps.membership import rendezvous
from fastps.network.tcp_store import connect_store, host_store
from fastps.system.clock import SYSTEM_CLOCK
from fastps.system.deadline import Deadline

_FORMAT = 0x70670101  # of the offer: its place is the port; no number of an arena
_POLL_NS = 10_000_000
_ANSWER_S = 1.0
_HOST = "127.0.0.1"


def meet(job: str, rank: int, workers: int, limit_s: float, look: Callable[[], None] = lambda: None) -> Store:
    """Wait for the other workers of the launch `job`, `limit_s` at most, and return the store.

    `look` raises an error if the others need not be waited for any longer. Raises TimeoutExceededError if one does not come.
    """
    clock = SYSTEM_CLOCK
    deadline = Deadline(clock.now_ns(), int(limit_s * 1e9))

    def pause(reason: str) -> None:
        look()
        if deadline.is_over(clock.now_ns()):
            raise TimeoutExceededError(f"worker {rank} waited {limit_s:g} s for {reason}")
        clock.sleep_ns(_POLL_NS)

    if rank:
        while (port := _told(job)) is None:
            pause(
                "worker 0 to begin the process group: see the output of worker 0, and raise FASTPS_TIMEOUT if it is only slow"
            )
        store = connect_store(_HOST, port, limit_s)
        store.set(_key(rank), "")
        return store
    kept = host_store(_HOST, 0, limit_s)
    pidfd = os.pidfd_open(os.getpid())  # in place of an arena, too
    try:
        listener = rendezvous.Listener(rendezvous.place_name(job, "group"), pidfd, pidfd, b"", kept.port, _FORMAT)
    finally:
        os.close(pidfd)
    with closing(listener):
        while missing := [f"worker {other}" for other in range(1, workers) if not kept.check([_key(other)])]:
            pause(
                f"{', '.join(missing)} to reach the place where the process group begins (a Trainer, an Accelerator); see their"
                " output, and raise FASTPS_TIMEOUT if they are only slow"
            )
    return kept


def _told(job: str) -> int | None:
    """The port that worker 0 tells; None if it is not there yet."""
    try:
        with rendezvous.connect(job, "group", _ANSWER_S, abi=_FORMAT, observer=True) as offer:
            return offer.place
    except (rendezvous.Absent, rendezvous.Silent, rendezvous.AbiDiffers):
        return None


def _key(rank: int) -> str:
    return f"fastps-group/{rank}"
