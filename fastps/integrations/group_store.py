"""The store of torch.distributed in which the workers of one launch meet. Worker 0 keeps it, and tells the others its port.

They meet at a place of the job's name: no port is agreed on before, and nothing stays in a file system.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed import Store  # type: ignore[attr-defined]

from fastps.errors import TimeoutExceededError
from fastps.membership import rendezvous
from fastps.network.tcp_store import connect_store, host_store
from fastps.system.clock import SYSTEM_CLOCK, Clock
from fastps.system.deadline import Deadline

_FORMAT = 0x70670101  # of the offer: its place is the port; no number of an arena
_POLL_NS = 10_000_000
_ANSWER_S = 1.0
_HOST = "127.0.0.1"


@dataclass(frozen=True)
class GroupStore:
    """How one worker comes to the store.

    Attributes:
        job: the name that all workers of the launch have in common.
        rank, workers: this worker's number, from 0, and the number of workers.
        limit_s: the longest wait for the others.
        look: raises an error if the others need not be waited for any longer.
    """

    job: str
    rank: int
    workers: int
    limit_s: float
    look: Callable[[], None] = lambda: None

    def meet(self, clock: Clock = SYSTEM_CLOCK) -> Store:
        """Wait for the others, and return the store. Raises TimeoutExceededError if one does not come."""
        deadline = Deadline(clock.now_ns(), int(self.limit_s * 1e9))
        if self.rank == 0:
            return self._keep(clock, deadline)
        while (port := self._ask(clock)) is None:
            self.look()
            if deadline.is_over(clock.now_ns()):
                raise TimeoutExceededError(
                    f"worker {self.rank} waited {self.limit_s:g} s for worker 0 to begin the process group: see the output of"
                    " worker 0, and raise FASTPS_TIMEOUT if it is only slow"
                )
            clock.sleep_ns(_POLL_NS)
        store = connect_store(_HOST, port, self.limit_s)
        store.set(_key(self.rank), "")
        return store

    def _keep(self, clock: Clock, deadline: Deadline) -> Store:
        """Make the store, and tell its port until every other worker has come."""
        store = host_store(_HOST, 0, self.limit_s)
        pidfd = os.pidfd_open(os.getpid())  # in place of an arena, too
        try:
            listener = rendezvous.Listener(self._place, pidfd, pidfd, b"", store.port, _FORMAT)
        finally:
            os.close(pidfd)
        try:
            while missing := [rank for rank in range(1, self.workers) if not store.check([_key(rank)])]:
                self.look()
                if deadline.is_over(clock.now_ns()):
                    names = ", ".join(f"worker {rank}" for rank in missing)
                    raise TimeoutExceededError(
                        f"worker 0 waited {self.limit_s:g} s for {names} to reach the place where the process group begins (a"
                        " Trainer, an Accelerator); see their output, and raise FASTPS_TIMEOUT if they are only slow"
                    )
                clock.sleep_ns(_POLL_NS)
        finally:
            listener.close()
        return store

    @property
    def _place(self) -> bytes:
        return rendezvous.place_name(self.job, "group")

    def _ask(self, clock: Clock) -> int | None:
        """The port that worker 0 tells; None if it is not there yet."""
        try:
            with rendezvous.connect(self.job, "group", _ANSWER_S, abi=_FORMAT, observer=True, clock=clock) as offer:
                return offer.place
        except (rendezvous.Absent, rendezvous.Silent, rendezvous.AbiDiffers):
            return None


def _key(rank: int) -> str:
    return f"fastps-group/{rank}"
