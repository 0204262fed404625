"""Periodic checkpoints: a thread writes one every so many updates while the workers go on.

The live worker of the lowest rank pins a version between two of its steps and hands it to the thread. If an earlier checkpoint
is still being written, by this worker or another, the next one is delayed until a later step. A job with tables has no thread
for it: the worker writes, and the others do not fold meanwhile. If a checkpoint cannot be written
(a full disk), the error is logged and counted, and training goes on.
"""

import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from fastps.checkpoint.format import Array
from fastps.checkpoint.snapshot import Pinned, VersionInUseError, write
from fastps.errors import Error, UsageError
from fastps.job.environment import whole_number
from fastps.kernels.shm.arena import LANE_LIVE
from fastps.store.worker import Worker

logger = logging.getLogger("fastps.checkpointing")

DEFAULT_EVERY = 1000


class Checkpointing:
    """The periodic checkpoints of `DistributedOptimizer(checkpoint=DIR, every=N)`.

    `version` gives the version that counts, where it is not that of the worker's arena. With `exact` every version that is due
    is written, and the worker waits for the checkpoint before it: several nodes each write a share of the same versions.

    Attributes:
        written: the number of checkpoints that this worker has written.
        failures: the number of checkpoints that it could not write.
    """

    def __init__(
        self,
        worker: Worker,
        directory: Path,
        every: int,
        pin: Callable[[], Pinned],
        buffers: Callable[[], Mapping[str, Array]],
        version: Callable[[], int] | None = None,
        *,
        exact: bool = False,
    ) -> None:
        if every < 1:
            raise UsageError(f"expected a checkpoint every 1 update or more, found every={every}")
        self._worker = worker
        self._directory = directory
        self._every = every
        self._pin = pin
        self._buffers = buffers
        self._version = version or (lambda: worker.version)
        self._exact = exact
        self._next = ((worker.store.version if version is None else version()) // every + 1) * every
        self._thread: threading.Thread | None = None
        self.written = 0
        self.failures = 0

    @staticmethod
    def wanted(directory: str | os.PathLike[str] | None, every: int | None) -> tuple[Path, int] | None:
        """The arguments, or FASTPS_CHECKPOINT and FASTPS_CHECKPOINT_EVERY where they are None; None for no checkpoints."""
        given = directory if directory is not None else os.environ.get("FASTPS_CHECKPOINT")
        if not given:
            return None
        return Path(given), whole_number("FASTPS_CHECKPOINT_EVERY", DEFAULT_EVERY, 1 << 50) if every is None else every

    def after_step(self) -> None:
        """Start a checkpoint if one is due and this worker writes it. While one is being written, the next waits."""
        version = self._version()
        if version < self._next:
            return
        if self._worker.rank != self._worker.store.arena.lane_states().find(LANE_LIVE):
            self._next = (version // self._every + 1) * self._every
            return
        if self._exact:
            self._join()
        if self._thread is not None and self._thread.is_alive():
            logger.debug("version %d: a checkpoint is due, and the one before is still being written", version)
            return
        try:
            buffers = {name: array.copy() for name, array in self._buffers().items()}
        except Exception:  # a buffer of a kind that NumPy does not take
            self.failures += 1
            self._next = (version // self._every + 1) * self._every
            logger.exception("the model's buffers cannot be saved, and no checkpoint is written; training goes on")
            return
        try:
            pinned = self._pin()
        except VersionInUseError:
            logger.debug("version %d: a checkpoint is due, and another worker still copies one", version)
            return
        self._next = (version // self._every + 1) * self._every
        if self._worker.store.tables:  # the version is held by this worker's locks, which its own thread gives back
            self._write(pinned, buffers)
            return
        self._thread = threading.Thread(target=self._write, args=(pinned, buffers), name="fastps-checkpoint", daemon=True)
        self._thread.start()

    def _write(self, pinned: Pinned, buffers: Mapping[str, Array]) -> None:
        try:
            folder = write(pinned, buffers, self._directory)
            self.written += 1
            logger.info("wrote %s, version %d", folder, pinned.description["version"])
        except Error as error:  # also a device's
            self.failures += 1
            logger.warning("%s; training goes on", str(error))  # not its traceback, which holds the arena
        except Exception:  # a fault of fastps or of a file system: a thread that ended would write no more, and say nothing
            self.failures += 1
            logger.exception("the checkpoint could not be written; training goes on")

    def close(self, failed: bool = False) -> None:
        """Wait for the checkpoint in progress; unless the worker failed, then write the one that is due, if any."""
        self._join()
        if not failed:
            self.after_step()
            self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
