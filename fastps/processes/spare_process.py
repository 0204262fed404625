"""The launcher's end of a spare (spare.py): it says when one is ready, and asks it for replacements of lost workers.

Refuses to know when a worker is replaced; who has no spare that is ready starts a new process.
"""

import contextlib
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, cast

from fastps.processes.spare import MOST_BYTES, READY
from fastps.system.processes import AdoptedProcess

DEFAULT_IMPORTS = ("torch", "fastps.torch.optimizer")
_ANSWER_S = 2.0  # forking takes milliseconds; a spare that is stopped never answers


@dataclass
class SpareProcess:
    """A spare that was started with `environment` and one end of `pair()` as its standard input; `control` is the other end."""

    control: socket.socket
    environment: Mapping[str, str]
    _is_ready: bool = field(default=False, init=False)

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        """The launcher's end, and the spare's."""
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    @property
    def is_ready(self) -> bool:
        """Whether it has imported all that it should, and waits for orders."""
        if not self._is_ready:
            with contextlib.suppress(OSError):
                self._is_ready = self.control.recv(len(READY), socket.MSG_DONTWAIT) == READY
        return self._is_ready

    def replacement(self, environment: Mapping[str, str], arguments: list[str], *, module: bool) -> AdoptedProcess | None:
        """A process of this script (or module), which has begun; None where the spare cannot make one, or not in time."""
        message = json.dumps(
            {
                "environment": {key: value for key, value in environment.items() if self.environment.get(key) != value},
                "without": [key for key in self.environment if key not in environment],
                "arguments": arguments,
                "module": module,
            }
        ).encode()
        if len(message) > MOST_BYTES:
            return None
        stdout, stderr = os.pipe(), os.pipe()
        readers = stdout[0], stderr[0]
        try:
            self.control.settimeout(_ANSWER_S)
            socket.send_fds(self.control, [message], [stdout[1], stderr[1]])
            process_id = int(self.control.recv(32))
        except (OSError, ValueError):  # it has died, or does not answer
            for reader in readers:
                os.close(reader)
            return None
        finally:
            os.close(stdout[1])
            os.close(stderr[1])
        streams = [cast("IO[bytes]", os.fdopen(reader, "rb", buffering=0)) for reader in readers]
        return AdoptedProcess(process_id, *streams)

    def close(self) -> None:
        """It ends when it reads the end of its orders."""
        self.control.close()
