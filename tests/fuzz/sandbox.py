"""A separate process that runs examples one after the other; its crash or hang is a failure in the test, with its output.

The process is forked once, so that an example costs no fork.
"""

import gc
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from typing import Any

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
        self._pipe.send(example)
        if not self._pipe.poll(_HANG_S):
            os.kill(self._process_id, signal.SIGKILL)
            raise AssertionError(f"it hangs: no outcome in {_HANG_S:g} s\n{self._end()}")
        try:
            failure, outcome = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise AssertionError(f"it died\n{self._end()}") from None
        assert not failure, failure
        return outcome

    def close(self) -> None:
        """End the process."""
        if self._process_id:
            os.kill(self._process_id, signal.SIGKILL)
            self._end()

    def _start(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (closed in _end)
        self._process_id = os.fork()
        if self._process_id:
            theirs.close()
            return
        gc.freeze()  # an example's garbage collection passes over what it made, not over all of the session
        try:
            self._pipe.close()
            os.dup2(self._said.fileno(), 2)
            while True:
                example = theirs.recv()
                try:
                    reply: Any = "", self._work(example)
                except BaseException as error:
                    reply = f"{type(error).__name__}: {error}", None
                theirs.send(reply)
        finally:
            os._exit(1)

    def _end(self) -> str:
        """Reap the process; return its exit status and up to 6,000 characters of its output."""
        _, status = os.waitpid(self._process_id, 0)
        self._process_id = 0
        self._pipe.close()
        with self._said:
            self._said.seek(0)
            text = self._said.read().decode(errors="replace")
        return f"status {os.waitstatus_to_exitcode(status)}\n{text[:6000]}"

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
