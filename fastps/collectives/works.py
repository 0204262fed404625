"""Works: what a collective returns, and the thread that runs collectives that the caller does not wait for.

torch's C++ code (DistributedDataParallel) takes a work's future, Python code calls `wait`. An error of the collective is
raised by both.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from fastps.errors import TimeoutExceededError, UsageError

_NO_TIMEOUT = timedelta(milliseconds=0)  # torch's default argument of Work.wait


class GroupWork(Work):
    """A collective that runs, or has run. `result` is what its future gives: a list of tensors."""

    def __init__(self, result: list[Any], memory: Any = None) -> None:
        super().__init__()
        self._result = result
        self._memory = memory  # that the collective reads and writes; its `copy_back` ends the collective
        self._error: BaseException | None = None
        self._is_done = threading.Event()
        self._lock = threading.Lock()
        self._first: torch.futures.Future[Any] | None = None
        self._future: torch.futures.Future[Any] | None = None

    def run(self, steps: Sequence[Callable[[], None]]) -> None:
        """Run the steps of the collective, and finish, with the error if one raises one. Interruptions go on to the caller."""
        try:
            for step in steps:
                step()
            if self._memory is not None:
                self._memory.copy_back()
        except BaseException as error:
            self.end(error)
            if not isinstance(error, Exception):
                raise
        else:
            self.end(None)

    def end(self, error: BaseException | None) -> None:
        """Finish, with an error if there is one; also without having run."""
        with self._lock:
            self._error = error
            self._memory = None
            self._is_done.set()
            first = self._first
        if first is not None:
            first.set_result(None)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait until the collective is done, and raise its error. Ctrl-C ends the wait."""
        seconds = timeout.total_seconds()
        if not self._is_done.wait(seconds if seconds > 0 else None):
            raise TimeoutExceededError(f"Work.wait timed out after {seconds:g} s; the collective goes on")
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """The same as `wait`: a tensor on the CPU has no stream."""
        self.wait()

    def is_completed(self) -> bool:
        return self._is_done.is_set()

    def is_success(self) -> bool:
        return self._is_done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Any]:
        self.wait()
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the list of tensors; it raises the error of the collective, as a RuntimeError where C++ code asks."""
        with self._lock:
            if self._future is not None:
                return self._future
            first = self._first = torch.futures.Future()
            # Only what a callback raises is an error for C++ code, too: Future.set_exception stores a value.
            future = self._future = first.then(self._outcome)
            is_done = self._is_done.is_set()
        if is_done:
            first.set_result(None)
        return future

    def _outcome(self, _first: torch.futures.Future[Any]) -> list[Any]:
        if self._error is not None:
            raise self._error
        return self._result


class Sequencer:
    """Runs works in the order in which they are given: at once where the caller waits and none is pending, else in a thread.

    A work that a future's callback gives runs at once, before those that wait: it then follows the work whose callback it is,
    and the callback may wait for it. All ranks have this order if the callback was added before the next work was given.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pending: deque[tuple[GroupWork, Sequence[Callable[[], None]]]] = deque()
        self._changed = threading.Condition()
        self._is_busy = False  # a work runs, or its callbacks
        self._runner = 0  # in which thread
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def give(self, work: GroupWork, steps: Sequence[Callable[[], None]], *, at_once: bool) -> GroupWork:
        """Run the work, or let the thread run it. `at_once`: the caller waits for it next."""
        with self._changed:
            if self._is_closed:
                raise UsageError("expected an open process group, found that it was destroyed; call init_process_group again")
            is_callback = self._is_busy and self._runner == threading.get_ident()
            at_once = is_callback or (at_once and not self._is_busy and not self._pending)
            if at_once:
                self._is_busy, self._runner = True, threading.get_ident()
            else:
                self._pending.append((work, steps))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                    self._thread.start()
                self._changed.notify_all()
        if at_once:
            try:
                work.run(steps)
            finally:
                if not is_callback:
                    self._set_idle()
        return work

    def drain(self) -> None:
        """Wait until no work is pending or runs, then end the thread. May be called twice."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def cancel(self, error: BaseException) -> None:
        with self._changed:
            pending = list(self._pending)
            self._pending.clear()
            self._is_closed = True
            self._changed.notify_all()
        for work, _ in pending:
            work.end(error)

    def _set_idle(self) -> None:
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: (self._pending and not self._is_busy) or (self._is_closed and not self._pending))
                if not self._pending:
                    return
                work, steps = self._pending.popleft()
                self._is_busy, self._runner = True, threading.get_ident()
            try:
                work.run(steps)
            finally:
                del work, steps
                self._set_idle()
