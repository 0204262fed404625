"""The store of torch.distributed in which the workers of one launch meet. Worker 0 keeps it, and tells the others its port.

They meet at an abstract socket that the job names: no port is agreed on before, and nothing stays in a file system.
"""

import contextlib
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed import Store  # type: ignore[attr-defined]

from fastps.errors import TimeoutExceededError
from fastps.membership.rendezvous import OtherUser, check_user
from fastps.network.tcp_store import connect_store, host_store
from fastps.system import unix_sockets
from fastps.system.clock import SYSTEM_CLOCK, Clock
from fastps.system.deadline import Deadline

_NUMBER = struct.Struct("=I")
_POLL_S = 0.05
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
            store = host_store(_HOST, 0, self.limit_s)
            self._tell(store.port, clock, deadline)
            return store
        while (port := self._ask()) is None:
            self.look()
            if deadline.is_over(clock.now_ns()):
                raise TimeoutExceededError(
                    f"worker {self.rank} waited {self.limit_s:g} s for worker 0 to begin the process group: see the output of"
                    " worker 0, and raise FASTPS_TIMEOUT if it is only slow"
                )
            clock.sleep_ns(int(_POLL_S * 1e9))
        return connect_store(_HOST, port, self.limit_s)

    @property
    def _name(self) -> bytes:
        return b"\0fastps-group/" + os.fsencode(self.job)

    def _tell(self, port: int, clock: Clock, deadline: Deadline) -> None:
        """Tell every other worker the port, once it asks."""
        missing = set(range(1, self.workers))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
            unix_sockets.take(self._name, listening.bind)
            listening.listen(self.workers)
            listening.settimeout(_POLL_S)
            while missing:
                self.look()
                with contextlib.suppress(TimeoutError, ConnectionError, struct.error, OtherUser):
                    asking = listening.accept()[0]
                    with asking:
                        check_user(asking)
                        asking.settimeout(_ANSWER_S)
                        number = _NUMBER.unpack(asking.recv(_NUMBER.size))[0]
                        asking.sendall(_NUMBER.pack(port))
                        missing.discard(number)
                if missing and deadline.is_over(clock.now_ns()):
                    names = ", ".join(f"worker {number}" for number in sorted(missing))
                    raise TimeoutExceededError(
                        f"worker 0 waited {self.limit_s:g} s for {names} to reach the place where the process group begins (a"
                        " Trainer, an Accelerator); see their output, and raise FASTPS_TIMEOUT if they are only slow"
                    )

    def _ask(self) -> int | None:
        """The port that worker 0 tells; None if it is not there yet."""
        return next((port for name in (self._name, *unix_sockets.aliases(self._name)) if (port := self._ask_at(name))), None)

    def _ask_at(self, name: bytes) -> int | None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(_ANSWER_S)
            try:
                asking.connect(name)
                check_user(asking)
                asking.sendall(_NUMBER.pack(self.rank))
                return int(_NUMBER.unpack(asking.recv(_NUMBER.size))[0])
            except (OSError, struct.error, OtherUser):
                return None
