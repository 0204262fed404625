"""Streams and events in host memory: a thread that runs a queue of work, and counters of records that processes share."""

import logging
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fastps.lab.gpus.regions import Region

logger = logging.getLogger("fastps.device")


@dataclass
class HostEvent:
    """An event: its memory, which knows the recording process, and counters in it.

    They count records made and records done; the third is 1 once a stream that has failed was to make a record.
    """

    region: Region
    words: npt.NDArray[np.int64]


@dataclass
class HostStream:
    """A device's queue of work and the thread that runs it; without a thread work runs at once, as on the host itself."""

    device: int
    thread: threading.Thread | None = None
    work: "queue.SimpleQueue[tuple[Callable[[], object], HostEvent | None] | None]" = field(default_factory=queue.SimpleQueue)
    failure: Exception | None = None

    def do(self, piece: Callable[[], object], event: HostEvent | None = None) -> None:
        """Queue a piece of work, a record of `event` if that is given. After a failure no further work runs."""
        if self.thread is None:
            piece()
        else:
            self.work.put((piece, event))

    def run(self) -> None:
        """Run queued work until None arrives. The thread's main function."""
        while (found := self.work.get()) is not None:
            piece, event = found
            if self.failure is None:
                try:
                    piece()
                except Exception as error:
                    self.failure = error
                    logger.info("work on a stream of process %d failed, and no more runs: %s", os.getpid(), error)
            if self.failure is not None and event is not None:
                event.words[2] = 1

    def finish(self) -> None:
        """Wait until all work is done. Raises the error of work that has failed."""
        if self.thread is not None:
            reached = threading.Event()
            # After a failure the thread skips this piece, too, so the loop checks for one.
            self.work.put((reached.set, None))
            while not reached.wait(0.01) and self.failure is None:
                pass
        self.check()

    def check(self) -> None:
        """Raise the error of work that has failed."""
        if self.failure is not None:
            raise self.failure

    def end(self) -> None:
        """Let the thread do what is queued, and end it."""
        self.work.put(None)
        if self.thread is not None:
            self.thread.join()
