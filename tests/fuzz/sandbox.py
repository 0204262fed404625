"""A separate process that runs examples one after the other; its crash or hang is a failure in the test, with its output.

The process is forked once, so that an example costs no fork.
"""

import gc
import os
import pickle
import select
import signal
import struct
import tempfile
from collections.abc import Callable
from typing import Any

_LENGTH = struct.Struct("<Q")
_HANG_S = 60.0  # an example takes milliseconds, or seconds under a sanitizer on a machine that was stopped for a while


class Sandbox:
    """Run `work(example)` in another process; `run` raises AssertionError for its death, a hang, or an exception."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._work = work
        self._process_id = 0

    def run(self, example: Any) -> Any:
        """Run the example, and return the result of `work`."""
        if not self._process_id:
            self._start()
        _send(self._to, example)
        if not select.select([self._back], [], [], _HANG_S)[0]:
            os.kill(self._process_id, signal.SIGKILL)
            raise AssertionError(f"it hangs: no outcome in {_HANG_S:g} s\n{self._end()}")
        reply = _receive(self._back)
        if reply is None:
            raise AssertionError(f"it died\n{self._end()}")
        failure, outcome = reply
        assert not failure, failure
        return outcome

    def close(self) -> None:
        """End the process."""
        if self._process_id:
            os.kill(self._process_id, signal.SIGKILL)
            self._end()

    def _start(self) -> None:
        there, self._to = os.pipe()
        self._back, here = os.pipe()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (closed in _end)
        self._process_id = os.fork()
        if self._process_id:
            os.close(there)
            os.close(here)
            return
        gc.freeze()  # an example's garbage collection passes over what it made, not over all of the session
        try:
            os.close(self._to)
            os.close(self._back)
            os.dup2(self._said.fileno(), 2)
            while (example := _receive(there)) is not None:
                try:
                    reply: Any = "", self._work(example)
                except BaseException as error:
                    reply = f"{type(error).__name__}: {error}", None
                _send(here, reply)
        finally:
            os._exit(1)

    def _end(self) -> str:
        """Reap the process; return its exit status and up to 6,000 characters of its output."""
        _, status = os.waitpid(self._process_id, 0)
        self._process_id = 0
        os.close(self._to)
        os.close(self._back)
        with self._said:
            self._said.seek(0)
            text = self._said.read().decode(errors="replace")
        return f"status {os.waitstatus_to_exitcode(status)}\n{text[:6000]}"

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _send(descriptor: int, thing: Any) -> None:
    data = pickle.dumps(thing)
    data = _LENGTH.pack(len(data)) + data
    while data:
        data = data[os.write(descriptor, data) :]


def _receive(descriptor: int) -> Any:
    """Receive an object from the other side; None if it has ended."""
    head = _exactly(descriptor, _LENGTH.size)
    data = _exactly(descriptor, *_LENGTH.unpack(head)) if head is not None else None
    return pickle.loads(data) if data is not None else None  # from this test's own child


def _exactly(descriptor: int, length: int) -> bytes | None:
    data = b""
    while len(data) < length:
        more = os.read(descriptor, length - len(data))
        if not more:
            return None
        data += more
    return data
