"""Periodic checkpoints: a thread writes one every so many updates while the workers go on; and a last one at the end.

The live worker of the lowest rank pins a version between two of its steps and hands it to the thread. If an earlier checkpoint
is still being written, by this worker or another, the next one is delayed until a later step. If a checkpoint cannot be written
(a full disk) or is missed (a disk that hangs), a warning says so, it is counted, and training goes on. No wait for the disk is
longer than the job's timeout.

SIGUSR1 makes a checkpoint due. SIGTERM ends the program after the step in progress: its worker leaves, and writes the last one.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from fastps.checkpoint.format import Array, read_description, whole
from fastps.checkpoint.runs import Run, folder_of
from fastps.checkpoint.snapshot import Pinned, VersionInUseError, write
from fastps.errors import Error, UsageError
from fastps.job import environment
from fastps.job.options import value_of
from fastps.kernels.shm.arena import LANE_LEAVING, LANE_LIVE
from fastps.membership.peers import WORKER_LOST
from fastps.store.worker import Worker
from fastps.system import proc
from fastps.system.noted_signals import EndedBySignalError, NotedSignals
from fastps.system.time_limit import call_within, ends_within

logger = logging.getLogger("fastps.checkpointing")

_TURN_NS, _LOOK_NS = 2_000_000_000, 5_000_000  # for workers of lower rank to leave after SIGTERM


class Checkpointing:
    """The periodic checkpoints of `DistributedOptimizer(checkpoint=DIR, every=N)`.

    `pin` is None on a node that writes none, whose workers obey SIGTERM all the same. `version` gives the version that counts,
    where it is not that of the worker's arena.
    """

    def __init__(
        self,
        worker: Worker,
        directory: Path,
        every: int,
        pin: Callable[[], Pinned] | None,
        buffers: Callable[[], Mapping[str, Array]],
        version: Callable[[], int] | None = None,
        *,
        run: Run | None = None,
    ) -> None:
        self._worker = worker
        self._directory = directory
        self._every = every
        self._pin = pin
        self._buffers = buffers
        self._version = version or (lambda: worker.version)
        self._run = run or Run.of(worker.store)
        self._signals = NotedSignals(signal.SIGTERM, signal.SIGUSR1)
        self._last = self._run.begins  # the newest version that the run began with, or this worker has written
        self._next = ((worker.store.version if version is None else version()) // every + 1) * every
        self._thread: threading.Thread | None = None
        self._began = 0  # the version that the thread writes
        self._told_of_others = self._ends = False
        self._failed: set[int] = set()  # versions; one that is given up may fail later, too
        self.written = 0  # the number of checkpoints that this worker has written

    @staticmethod
    def wanted(directory: str | os.PathLike[str] | None, every: int | None, instance: int = 0) -> tuple[Path, int] | None:
        """The arguments, or FASTPS_CHECKPOINT and FASTPS_CHECKPOINT_EVERY where they are None; None for no checkpoints.

        `instance` is the number of the optimizer in its script, each of which has its own folder in FASTPS_CHECKPOINT. In
        virtual time the script's own arguments do not count. Raises UsageError.
        """
        directory, every = (None, None) if environment.is_virtual() else (directory, every)
        given = directory if directory is not None else os.environ.get("FASTPS_CHECKPOINT")
        if not given:
            return None
        folder = Path(given) if directory is not None else folder_of(Path(given), instance)
        every = value_of("FASTPS_CHECKPOINT_EVERY") if every is None else every
        if every < 1:
            raise UsageError(f"expected a checkpoint every 1 update or more, found every={every}")
        return folder.absolute(), every  # a script may change its working directory

    def after_step(self) -> None:
        """Start a checkpoint if one is due and this worker writes it. Raises EndedBySignalError after SIGTERM."""
        version = self._version()
        if self._signals.take(signal.SIGUSR1):
            self._next = version
        if self._signals.take(signal.SIGTERM):
            self._ends = True
            logger.warning("worker %d ends because of SIGTERM", self._worker.rank)
            raise EndedBySignalError(signal.SIGTERM)
        if version >= self._next:
            self._start(version)

    @property
    def failures(self) -> int:
        """The number of checkpoints that this worker could not write, or missed."""
        return len(self._failed)

    @property
    def _is_writer(self) -> bool:
        """Whether this worker has the lowest rank of those that are live or, where all have left, that are not closed."""
        if self._pin is None:
            return False
        arena, rank = self._worker.store.arena, self._worker.rank
        states = arena.lane_states()[: arena.lanes]
        if environment.is_virtual():  # whose driver has ended those that died at their virtual times
            return rank == next(lane for lane, state in enumerate(states) if state not in WORKER_LOST or lane == rank)
        present = [lane for lane, state in enumerate(states) if state in (LANE_LIVE, LANE_LEAVING)]
        living = [lane for lane in present if lane == rank or not proc.has_ended(arena.process_id(lane))]
        return rank == next((lane for lane in living if states[lane] == LANE_LIVE), living[0] if living else -1)

    def _start(self, version: int) -> None:
        if self._pin is None or not self._is_writer:
            self._next = (version // self._every + 1) * self._every
            return
        if self._thread is not None and self._thread.is_alive():
            self._delay(version)
            return
        try:
            buffers = {name: array.copy() for name, array in self._buffers().items()}
        except Exception:  # a buffer of a kind that NumPy does not take
            self._failed.add(version)
            self._next = (version // self._every + 1) * self._every
            logger.exception("the model's buffers cannot be saved, and no checkpoint is written; training goes on")
            return
        try:
            pinned = self._pin()
        except VersionInUseError:
            logger.debug("version %d: a checkpoint is due, and another worker still copies one", version)
            return
        self._next, self._began = (version // self._every + 1) * self._every, version
        if pinned.holds_locks:  # which this worker's own thread gives back
            self._write(pinned, buffers)
            return
        thread = threading.Thread(target=self._write, args=(pinned, buffers), name="fastps-checkpoint", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            logger.warning("no thread can be started for a checkpoint (%s): the worker waits until it is written", error)
            self._write(pinned, buffers)
        else:
            self._thread = thread

    def _delay(self, version: int) -> None:
        """Leave a checkpoint that is due for a later step; once the next one is due, too, it is missed."""
        if version < self._next + self._every:
            logger.debug("version %d: a checkpoint is due, and the one before is still being written", version)
            return
        self._failed.add(self._next)
        logger.warning(
            "no checkpoint of version %d: the one of version %d is still being written to %s; training goes on, and the next"
            " one comes when that is done", self._next, self._began, self._directory,
        )  # fmt: skip
        self._next = version // self._every * self._every

    def _write(self, pinned: Pinned, buffers: Mapping[str, Array]) -> None:
        try:
            folder = write(pinned, buffers, self._directory, self._run, limit_s=self._worker.store.timeout_s)
            self.written += 1
            self._last = pinned.description["version"]
            logger.info("wrote %s, version %d", folder, pinned.description["version"])
            if not self._told_of_others and not all(self._run.owns(found) for found in whole(folder.parent)):
                self._told_of_others = True
                logger.warning(
                    "%s has checkpoints of another run, too, which stay; resuming from there takes the newest of all: give each"
                    " run a folder of its own",
                    folder.parent,
                )
        except Error as error:  # also a device's
            self._failed.add(self._began)
            logger.warning("%s; training goes on", str(error))  # not its traceback, which holds the arena
        except Exception:  # a fault of fastps or of a file system: a thread that ended would write no more, and say nothing
            self._failed.add(self._began)
            logger.exception("the checkpoint could not be written; training goes on")

    def close(self, failed: bool = False) -> None:
        """Wait for the checkpoint in progress; then write a last one, unless the worker failed and nobody has sent SIGTERM.

        A worker that ends by SIGTERM in a step ends the others, too, and one of them has to write what all have made.
        """
        self._ends = self._ends or self._signals.take(signal.SIGTERM)
        if self._join() and (not failed or self._ends):
            self.write_last()
        self._signals.close()

    def write_last(self) -> None:
        """Write the newest version, unless a worker has written it, and once more if others have gone on meanwhile.

        After SIGTERM all workers leave: each waits until those of lower rank have, which may not have seen its last push.
        """
        self._worker.leave_virtual_time()  # the last version is there once every worker has
        clock, failures = self._worker.store.clock, self.failures
        until_ns = clock.now_ns() + (_TURN_NS if self._ends else 0)
        while self._pin is not None and not self._is_writer and clock.now_ns() < until_ns:
            clock.sleep_ns(_LOOK_NS)
        for _ in range(2):
            version = self._version()
            if not self._is_writer or self.failures > failures or self._is_written(version):
                return
            self._start(version)
            while self._began != version and self._ends and clock.now_ns() < until_ns:  # another that has died copies one
                self._end_copies_of_the_dead()
                clock.sleep_ns(_LOOK_NS)
                self._start(version)
            self._join()

    def _end_copies_of_the_dead(self) -> None:
        arena = self._worker.store.arena
        for lane, (generation, state) in enumerate(arena.members()[: arena.lanes]):
            if state in (LANE_LIVE, LANE_LEAVING) and proc.has_ended(arena.process_id(lane)):
                arena.mark_dead(lane, generation)

    def _is_written(self, version: int) -> bool:
        """Whether the run began with this version, or has written it or a later one.

        If the disk does not answer, the version is missed, and nothing more can be written.
        """

        def newest() -> int:
            own = (folder for folder in reversed(whole(self._directory)) if self._run.wrote(folder))
            return next((int(read_description(folder)["version"]) for folder in own), -1)

        if version <= self._last:
            return True
        limit_s = self._worker.store.timeout_s
        try:
            return version <= call_within(limit_s, newest, f"the checkpoints in {self._directory} are read")
        except TimeoutError:
            self._miss(version)
            return True

    def _join(self) -> bool:
        """Wait for the checkpoint in progress, at most the job's timeout; then it is missed. Returns whether none is left."""
        if self._thread is None:
            return True
        store = self._worker.store
        what = f"the checkpoint of version {self._began} is written to {self._directory}"
        if ends_within(self._thread, store.timeout_s, what, store.clock):
            self._thread = None
            return True
        self._miss(self._began)
        return False

    def _miss(self, version: int) -> None:
        self._failed.add(version)
        logger.warning(
            "the checkpoint of version %d was not written to %s within %g s, and is missed: the disk hangs, or is slow",
            version, self._directory, self._worker.store.timeout_s,
        )  # fmt: skip
