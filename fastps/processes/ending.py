"""The end of a job's workers: what Ctrl-C and a failure send them, and when."""

import contextlib
import signal
from collections.abc import Iterator, Sequence

from fastps.processes.outcome import LaunchedWorker
from fastps.system.clock import Clock

GRACE_NS = 2_000_000_000  # for survivors to end by themselves, and again after SIGTERM; Ctrl-C takes at most twice as long


class Ending:
    """Ends all workers that still run, by signals that get harsher.

    Attributes:
        interrupts: how often Ctrl-C or SIGTERM came.
    """

    def __init__(self, workers: Sequence[LaunchedWorker], clock: Clock) -> None:
        """`workers` is the launcher's own list, which grows."""
        self.interrupts = 0
        self._workers = workers
        self._clock = clock
        self._signals = [signal.SIGTERM, signal.SIGKILL]  # sent in order, one after each deadline
        self._deadline_ns: int | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Within this context Ctrl-C and SIGTERM end the workers."""
        ends = (signal.SIGINT, signal.SIGTERM)
        previous = [signal.signal(number, self.on_interrupt) for number in ends]
        try:
            yield
        finally:
            for number, handler in zip(ends, previous, strict=True):
                signal.signal(number, handler)

    def begin(self, now_ns: int) -> None:
        """Give the others a moment to end by themselves, because a worker has failed."""
        self._deadline_ns = self._deadline_ns or now_ns + GRACE_NS

    def on_interrupt(self, number: int, frame: object) -> None:
        """Pass on the first Ctrl-C, then send SIGTERM and SIGKILL after deadlines. Kill at once on the second."""
        self.interrupts += 1
        self._signal_all(signal.SIGINT if self.interrupts == 1 else signal.SIGKILL)
        self._deadline_ns = self._clock.now_ns() + GRACE_NS

    def enforce_deadline(self) -> None:
        """Send the next signal if its time has come."""
        if self._deadline_ns is None or self._clock.now_ns() < self._deadline_ns:
            return
        self._signal_all(self._signals.pop(0) if len(self._signals) > 1 else self._signals[0])
        self._deadline_ns = self._clock.now_ns() + GRACE_NS

    def _signal_all(self, number: signal.Signals) -> None:
        for worker in self._workers:
            if worker.exit_code is None:
                worker.process.send_signal(number)
