"""The launcher's connection to the job's fork server: readiness, and orders to fork a worker."""

import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO, cast

from fastps.processes.forkserver import MAX_MESSAGE_BYTES, PROGRAM, READY
from fastps.system.clock import Clock
from fastps.system.processes import AdoptedProcess

_IMPORT_NS = 120_000_000_000  # the longest time for the imports
_ANSWER_S = 2.0  # a fork takes milliseconds; a stopped fork server never answers


class ForkServer:
    """A fork server, to be started by `command` with `environment`; it inherits the socket `inherited`."""

    def __init__(self, environment: Mapping[str, str], path: str, imports: Sequence[str]) -> None:
        # `control` is readable once the fork server has something to say.
        self.control, self.inherited = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.environment = environment
        self.command = [sys.executable, "-c", PROGRAM, path, str(self.inherited.fileno()), *imports]
        self.refusal = ""  # why it forks no worker
        self._is_ready = False

    @property
    def is_ready(self) -> bool:
        """Whether its imports are done and it waits for orders."""
        if not self._is_ready and not self.refusal:
            with contextlib.suppress(BlockingIOError):
                try:
                    message = self.control.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
                except ConnectionError:
                    message = b""
                self._is_ready = message == READY
                self.refusal = "" if self._is_ready else message.decode() or "it has ended"
        return self._is_ready

    def await_ready(self, is_over: Callable[[], bool], pause: Callable[[], object], clock: Clock) -> None:
        """Call `pause` until the imports are done. If they take too long, that is the refusal."""
        deadline_ns = clock.now_ns() + _IMPORT_NS
        while not (self.is_ready or self.refusal or is_over()):
            pause()
            if clock.now_ns() >= deadline_ns:
                self.refusal = "out of time"

    def fork(self, environment: Mapping[str, str], arguments: Sequence[str], *, captured: bool = True) -> AdoptedProcess | None:
        """Fork a worker that runs `python ARGUMENTS`. Returns None if the fork server forks none in time.

        If its output is not `captured`, it goes where the fork server's own goes.
        """
        message = json.dumps(
            {
                "environment": {key: value for key, value in environment.items() if self.environment.get(key) != value},
                "without": [key for key in self.environment if key not in environment],
                "arguments": list(arguments),
            }
        ).encode()
        if len(message) > MAX_MESSAGE_BYTES:
            return None
        pipes = [os.pipe(), os.pipe()] if captured else []
        readers = [reader for reader, _ in pipes]
        try:
            self.control.settimeout(_ANSWER_S)
            socket.send_fds(self.control, [message], [writer for _, writer in pipes])
            process_id = int(self.control.recv(32))
        except (OSError, ValueError):  # it has ended, or does not answer
            for reader in readers:
                os.close(reader)
            return None
        finally:
            for _, writer in pipes:
                os.close(writer)
        streams = [cast("IO[bytes]", os.fdopen(reader, "rb", buffering=0)) for reader in readers]
        return AdoptedProcess(process_id, *streams)

    def close(self) -> None:
        """Close the socket: the fork server ends when it reads the end of its orders."""
        self.control.close()
