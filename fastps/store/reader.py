"""A reader: a process that only reads a running job's newest weights. It is no worker: no discipline counts it or waits for it.

A reader has a place, a socket name that the kernel frees when its process ends, and brings a weights buffer of its own into
the job. It maps the weights read-only; the only words of the arena that it writes are its pins and the version that it sleeps
for.
"""

import errno
import logging
import os
from collections.abc import Mapping
from typing import Any, Self

import numpy.typing as npt

from fastps.errors import ArenaError, AttachError, TimeoutExceededError, UnsupportedError, UsageError, damaged
from fastps.job import limits
from fastps.job.layout import Description
from fastps.kernels.protocol.reader_pins import ReaderPins
from fastps.kernels.shm.arena import LANE_FREE, Arena
from fastps.membership import discovery, rendezvous
from fastps.membership.job_memory import WeightsMemory, by_name
from fastps.membership.peers import WORKER_PRESENT
from fastps.system import shared_memory
from fastps.system.clock import Clock
from fastps.system.deadline import Deadline

logger = logging.getLogger("fastps.reader")

_LOOK_NS = 1_000_000_000  # so often a reader without newer weights asks whether the job has ended
_LIVENESS_NS = 200_000_000  # the longest sleep of a wait: so often it asks whether the job has ended

# Strong references: a reader that were collected would give up its place while a model still shows its buffers.
_live: "set[WeightsReader]" = set()


class WeightsReader:
    """The weights of a running job, of one version for each shard. Only one thread may use it."""

    def __init__(self, job: str, timeout_s: float, clock: Clock) -> None:
        offer, text = discovery.find_described(job, timeout_s, clock)
        self.job = job
        self.closed = self.forked = self._is_told = False
        self._clock, self._looked_ns = clock, clock.now_ns()
        self._name: rendezvous.ReaderName | None = None
        with offer:
            try:
                described, self._identity = Description.of(text), os.fstat(offer.memfd)
                self._workers = described.workers
                self._memory = WeightsMemory(shared_memory.map_shared(offer.memfd, writable=False), described.parameters)
                self._view = shared_memory.map_private(offer.memfd)  # for a model, whose script may write
                control = Arena(shared_memory.map_shared(offer.memfd))
                self._name, reader = self._take_place(control)
                what = f"reader {reader} of job {job}, for a weights buffer of its own,"
                shared_memory.allocate(offer.memfd, *control.reader_weights_range(reader + 1), what)
                self._pins = ReaderPins(control, reader)
                self._pins.begin()
                self.buffers = [0] * control.shards  # the weights buffer of each shard that this reader has pinned
                self.pull()
            except ValueError as error:
                self._free_name()
                raise ArenaError(f"job {job}: {error}") from error
            except BaseException:
                self._free_name()
                raise
        _live.add(self)

    def _take_place(self, control: Arena) -> tuple[rendezvous.ReaderName, int]:
        """Take the first free place. Raises AttachError if other readers have all of them."""
        if not control.buffer_floats:
            raise UnsupportedError(
                f"job {self.job}: expected weights in host memory, found that its workers' GPUs hold them; read checkpoints"
                " (fastps.load), or run the job with FASTPS_PLACEMENT=host"
            )
        for reader in range(control.readers):
            try:
                return rendezvous.ReaderName(self.job, reader), reader
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise AttachError(f"job {self.job}: no reader can attach: {error}") from error
        raise AttachError(
            f"job {self.job}: expected a free place of {control.readers} for readers, found none; close a reader, or create"
            " the job with a larger max_readers"
        )

    @property
    def version(self) -> int:
        """The version that this reader reads; of several shards the lowest."""
        return min(self.versions)

    @property
    def versions(self) -> list[int]:
        """The version of each shard that this reader reads."""
        return [self._pins.shard_version(shard) for shard in range(len(self.buffers))]

    @property
    def newest(self) -> int:
        """The number of updates that the job has made so far; of several shards the lowest."""
        return self._memory.arena.version

    @property
    def weights(self) -> Mapping[str, npt.NDArray[Any]]:
        """Name to read-only array of the weights that the last pull took, without a copy.

        The next pull gives the arrays' memory back to the job: copy what must stay.
        """
        self._check_usable()
        views = self._memory.weight_views(self.buffers)
        return by_name(self._memory.parameters, views)

    @property
    def is_behind(self) -> bool:
        """Whether the job has other weights than this reader reads: a newer version, or replaced ones of the same version."""
        arena = self._memory.arena
        return any(arena.committed(shard)[1] != buffer for shard, buffer in enumerate(self.buffers))

    def pull(self) -> None:
        """Pin the newest version of each shard; the versions before are given back. Nothing is copied.

        Once the job has ended, the log says so, because the version stays for ever.
        """
        self._check_usable()
        now_ns = self._clock.now_ns()
        if not self._is_told and now_ns - self._looked_ns > _LOOK_NS and not self.is_behind:
            self._looked_ns = now_ns
            if self.over:
                self._is_told = True
                logger.warning(
                    "job %s has ended, or has begun anew: this reader reads its last weights, of version %d; open another",
                    self.job,
                    self.newest,
                )
        if (shard := self._pins.pull_all(self.buffers)) >= 0:
            raise damaged(f"the commit word of shard {shard}")

    def wait(self, version: int | None = None, timeout_s: float | None = None) -> bool:
        """Wait until the job has made `version` updates, by default one more than this reader has read.

        Returns False if the job ended before; its last weights can still be read. The process sleeps, and the worker that
        commits the version wakes it. Raises TimeoutExceededError if no worker made a version for `timeout_s` seconds (default:
        FASTPS_TIMEOUT, else 300), UsageError in a forked child or after close.
        """
        self._check_usable()
        wanted = self.version + 1 if version is None else version
        timeout_ns = int(limits.timeout_s(timeout_s) * 1e9)
        slice_ns = min(_LIVENESS_NS, timeout_ns)
        began_ns = looked_ns = self._clock.now_ns()
        newest, deadline = self.newest, Deadline(began_ns, timeout_ns)
        while newest < wanted and not self._pins.wait(wanted, slice_ns):
            now_ns = self._clock.now_ns()
            if now_ns - looked_ns >= _LIVENESS_NS:
                if self.over:
                    return self.newest >= wanted
                looked_ns = now_ns
            before, newest = newest, self.newest
            if newest > before:
                deadline = Deadline(now_ns, timeout_ns)
            elif deadline.is_over(now_ns):
                raise TimeoutExceededError(
                    f"job {self.job}: expected version {wanted}, found version {newest} and no newer one for"
                    f" {timeout_ns / 1e9:g} s; look at its workers with fastps top, or wait longer (timeout_s)"
                )
        return True

    @property
    def over(self) -> bool:
        """Whether the job has ended: no process answers for it, or every worker has left, failed or died."""
        before = self._memory.arena.lane_states()
        listening = discovery.places_with(self.job, self._identity)
        states = self._memory.arena.lane_states()
        # A worker listens before its lane is present and until it has left: a lane present before and after, without a
        # listener in between, is that of a worker that was killed.
        is_left = all(
            state not in WORKER_PRESENT or (before[lane] in WORKER_PRESENT and lane not in listening)
            for lane, state in enumerate(states)
        )
        is_folded = not self._memory.arena.is_served()  # a server folds what the workers left behind, and then ends
        return not listening or (is_left and is_folded and LANE_FREE not in states[: self._workers])

    def close(self) -> None:
        """Give the buffers and the place back. May be called twice; does nothing in a forked child."""
        if self.closed or self.forked:
            return
        self.closed = True
        self._leave_memory()
        self._pins.unpin()
        self._free_name()
        _live.discard(self)

    def _leave_memory(self) -> None:
        """Let nothing show the job's memory any more. Overridden by a reader that shows it somewhere."""

    def _free_name(self) -> None:
        if self._name is not None:
            self._name.close()

    def _check_usable(self) -> None:
        if self.forked:
            raise UsageError(
                f"this reader of job {self.job} was made in the parent of this process: expected a call there; open a reader of"
                " its own with fastps.reader"
            )
        if self.closed:
            raise UsageError(f"this reader of job {self.job} is closed: open another with fastps.reader")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _after_fork_in_child() -> None:
    for reader in list(_live):
        reader.forked = True


os.register_at_fork(after_in_child=_after_fork_in_child)
