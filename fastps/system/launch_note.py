"""A worker's note to its launcher, that it has a job or a group of fastps: without any, nobody has read its options."""

import contextlib
import os
import socket

VARIABLE = "FASTPS_LAUNCHER"


class LaunchNote:
    """The launcher's side: a socket, whose `name` the workers have in the variable `VARIABLE`."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(b"")  # the kernel chooses a name that nobody has
        self.name = os.fsdecode(self._socket.getsockname()[1:])

    def has_come(self) -> bool:
        """Whether a worker has sent it, or a stranger: a line in the log hangs on it, and nothing else."""
        with contextlib.suppress(BlockingIOError):
            self._socket.recv(1, socket.MSG_DONTWAIT)
            return True
        return False

    def close(self) -> None:
        """Free the name."""
        self._socket.close()


def send() -> None:
    """Tell the launcher, if there is one, that this worker uses fastps. Waits for nothing."""
    if name := os.environ.get(VARIABLE):
        with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"1", socket.MSG_DONTWAIT, b"\0" + os.fsencode(name))
