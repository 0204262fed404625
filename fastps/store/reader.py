"""A reader: a process that only reads a running job's newest weights. It is no worker: no discipline counts it or waits for it.

A reader has a place, a socket name that the kernel frees when its process ends, and brings a weights buffer of its own into
the job. It maps the weights read-only; the only words of the arena that it writes are its pins and the version that it sleeps
for.
"""

import asyncio
import errno
import json
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy.typing as npt

from fastps.errors import ArenaError, AttachError, TimeoutExceededError, UnsupportedError, UsageError, damaged
from fastps.job import limits
from fastps.job.layout import TAG, Description, Parameter, carried_bytes
from fastps.kernels.protocol.reader_pins import ReaderPins
from fastps.kernels.shm.arena import LANE_FREE, LANE_LEFT, Arena
from fastps.membership import discovery, rendezvous
from fastps.membership.job_memory import WeightsMemory, by_name
from fastps.membership.peers import WORKER_PRESENT
from fastps.system import shared_memory
from fastps.system.clock import Clock
from fastps.system.deadline import Deadline

logger = logging.getLogger("fastps.reader")

OPEN_S = 30.0
"""The default of the time that `fastps.reader` waits for a job that may still start."""
_LOOK_NS = 500_000_000  # so often a reader without newer weights asks whether the job has ended
_LIVENESS_NS = 200_000_000  # the longest sleep of a wait: so often it asks whether the job has ended
_AWAIT_NS = 50_000_000  # the same in a coroutine, whose thread outlives a cancellation by so long
_MOMENT_NS, _TRIES = 5_000_000, 20
_TOLD_NS = 1_000_000_000  # the wait for a job after which the log says so

# Strong references: a reader that were collected would give up its place while a model still shows its buffers.
_live: "set[WeightsReader]" = set()


class WeightsReader:
    """The weights of a running job, of one version for each shard. Only one thread may use it.

    With `follow` it goes on with a job that takes the name once this one has ended.
    """

    def __init__(self, job: str, timeout_s: float, clock: Clock, *, follow: bool = False) -> None:
        self.job, self._first_job, self.follow = job, job, follow
        self.closed = self.forked = False
        self._clock = clock
        self._name: rendezvous.ReaderName | None = None
        self._identity: os.stat_result | None = None  # of the arena that is open
        self._open(timeout_s)
        _live.add(self)

    def _open(self, timeout_s: float) -> None:
        """Take a place in the job of this reader's name, and pin its newest version. Raises what `fastps.reader` raises."""
        offer, text = self._find(timeout_s)
        name: rendezvous.ReaderName | None = None
        with offer:
            if self._identity is not None and os.path.samestat(self._identity, os.fstat(offer.memfd)):
                raise AttachError(f"job {self.job}: expected one that has begun anew, found the same")
            try:
                described = Description.of(text)
                memory = shared_memory.map_shared(offer.memfd, writable=False)
                view = shared_memory.map_private(offer.memfd)  # for a model, whose script may write
                control = Arena(shared_memory.map_shared(offer.memfd))
                if carried_bytes(described.carried) != control.carried_bytes:
                    raise ValueError("its description and its arena are of two jobs")
                name, reader = self._take_place(control)
                what = f"reader {reader} of job {self.job}, for a weights buffer of its own,"
                for place in (control.reader_weights_range(reader + 1), *control.carried_places()):
                    shared_memory.allocate(offer.memfd, *place, what)
                pins = ReaderPins(control, reader)
                pins.begin()
                self._memory = WeightsMemory(memory, described.parameters + described.carried)
            except ValueError as error:
                _close(name)
                raise ArenaError(f"job {self.job}: {error}") from error
            except BaseException:
                _close(name)
                raise
            self._identity, self._workers, self._view, self._pins = os.fstat(offer.memfd), described.workers, view, pins
        self._free_name()
        self._name, self._looked_ns, self._is_told = name, self._clock.now_ns(), False
        self._carried = [*described.carried]
        self.buffers = [0] * control.shards  # the weights buffer of each shard that this reader has pinned
        self._pin()

    def _find(self, timeout_s: float) -> tuple[rendezvous.Offer, str]:
        """Find the job. The log says so if that takes long."""
        told_s = min(timeout_s, _TOLD_NS / 1e9)
        try:
            return discovery.find_described(self.job, told_s, self._clock)
        except AttachError:
            if timeout_s <= told_s:
                raise
        logger.warning("job %s does not run yet; this reader waits up to %g s for it", self.job, timeout_s)
        return discovery.find_described(self.job, timeout_s - told_s, self._clock)

    def _take_place(self, control: Arena) -> tuple[rendezvous.ReaderName, int]:
        """Take the first free place. Raises AttachError if other readers have all of them."""
        if not control.buffer_floats and not control.carried_bytes:
            raise UnsupportedError(
                f"job {self.job}: expected weights in host memory, found that its workers' GPUs hold them; read checkpoints"
                " (fastps.load), or run the job with FASTPS_PLACEMENT=host"
            )
        for reader in [*range(control.readers)] * _TRIES:
            try:
                return rendezvous.ReaderName(self.job, reader), reader
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise AttachError(f"job {self.job}: no reader can attach: {error}") from error
            if reader == control.readers - 1:  # a worker may have had free places for a moment, to give their buffers back
                self._clock.sleep_ns(_MOMENT_NS)
        own = sum(each.job == self.job and not each.closed for each in _live)
        text = f" (this process has {own}: a reader that is dropped keeps its place until close())" if own else ""
        raise AttachError(
            f"job {self.job}: expected a free place of {control.readers} for readers, found none; close a reader, or create"
            f" the job with a larger max_readers{text}"
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

        The next pull gives the arrays' memory back to the job: copy what must stay. Also the model's buffers, once the version
        has them.
        """
        self._check_usable()
        return by_name(*self._shown())

    def _shown(self) -> tuple[list[Parameter], list[Any]]:
        """What the pulled version has, without the tag, and flat views of it."""
        has_carried = self._has_carried()
        each = zip(self._memory.parameters, self._memory.weight_views(self.buffers), strict=True)
        found = [pair for pair in each if not pair[0].is_carried or (has_carried and pair[0].name != TAG)]
        return [parameter for parameter, _ in found], [view for _, view in found]

    def _has_carried(self) -> bool:
        """Whether the pulled version has what it carries, or carries nothing."""
        return not self._carried or self._memory.carries(self.buffers[-1])

    @property
    def tag(self) -> dict[str, Any]:
        """What the publisher gave with the version that this reader reads; {} for a version without a tag."""
        self._check_usable()
        place = next((each for each in self._carried if each.name == TAG), None)
        if place is None:
            return {}
        text = bytes(self._memory.carried_at(self._memory.arena.carried_offset(self.buffers[-1]), place)).rstrip(b"\0")
        try:
            found = json.loads(text or b"{}")
        except ValueError as error:
            raise damaged(f"the tag of version {self.version}") from error
        return found if isinstance(found, dict) else {}

    @property
    def is_behind(self) -> bool:
        """Whether the job has other weights than this reader reads: a newer version, or replaced ones of the same version."""
        arena = self._memory.arena
        return any(arena.committed(shard)[1] != buffer for shard, buffer in enumerate(self.buffers))

    def pull(self) -> None:
        """Pin the newest version of each shard; the versions before are given back. Nothing is copied.

        Once the job has ended, the log says so, because the version stays for ever; or it is followed.
        """
        self._check_usable()
        now_ns = self._clock.now_ns()
        if now_ns - self._looked_ns > _LOOK_NS and not self.is_behind:
            self._looked_ns = now_ns
            if self.over and not self._has_followed() and not self._is_told:
                self._is_told = True
                logger.warning(
                    "job %s has ended, or has begun anew: this reader reads its last weights, of version %d; %s",
                    self.job,
                    self.newest,
                    "it waits for the next one" if self.follow else "open another, or open it with follow=True",
                )
        self._pin()

    def _pin(self) -> None:
        if (shard := self._pins.pull_all(self.buffers)) >= 0:
            raise damaged(f"the commit word of shard {shard}")

    def _has_followed(self) -> bool:
        """Go on, if this reader follows, with the job into which this one's workers have moved, or that has taken its name."""
        last = self.job
        for job in dict.fromkeys((self._moved_to() or last, self._first_job)) if self.follow else ():
            self.job = job
            try:
                self._open(0)
            except AttachError:
                continue
            logger.info("job %s goes on as %s, with version %d: this reader follows it", last, self.job, self.newest)
            return True
        self.job = last
        return False

    def _moved_to(self) -> str:
        """The job in which workers that have left this one in good order go on (`sync="auto"`), or ""."""
        arena = self._memory.arena
        left = [lane for lane, state in enumerate(arena.lane_states()) if state == LANE_LEFT]
        return next((name for name in map(arena.failure, left) if name), "")

    def wait(self, version: int | None = None, timeout_s: float | None = None) -> bool:
        """Wait until the job has made `version` updates, by default one more than this reader has read.

        Returns False if the job ended before; its last weights can still be read. A reader that follows waits for the next
        job. The process sleeps, and the worker that commits the version wakes it. Raises TimeoutExceededError if no worker made
        a version for `timeout_s` seconds (default: FASTPS_TIMEOUT, else 300), UsageError in a forked child or after close.
        """
        wanted = self._wanted(version)
        for slice_ns in self._slices(wanted, timeout_s):
            self._pins.wait(wanted, slice_ns)
        return self.newest >= wanted

    async def newer(self, version: int | None = None, timeout_s: float | None = None) -> bool:
        """Wait as `wait` does, and let the event loop run meanwhile. A task that awaits it may be cancelled.

        >>> import asyncio, fastps, torch
        >>> with fastps.Publisher(torch.nn.Linear(1, 1), "newer-example") as publisher:
        ...     async def follow():
        ...         with fastps.reader("newer-example") as reader:
        ...             asyncio.get_running_loop().call_later(0.01, publisher.publish)
        ...             return await reader.newer(timeout_s=10), reader.newest
        ...     asyncio.run(follow())
        (True, 1)
        """
        wanted = self._wanted(version)
        for slice_ns in self._slices(wanted, timeout_s):
            await asyncio.to_thread(self._pins.wait, wanted, min(slice_ns, _AWAIT_NS))
        return self.newest >= wanted

    def _wanted(self, version: int | None) -> int:
        self._check_usable()
        return self.version + 1 if version is None else version

    def _slices(self, wanted: int, timeout_s: float | None) -> Iterator[int]:
        """The longest sleep, in ns, again and again until the version is there or the job is over. Raises as `wait`."""
        timeout_ns = int(limits.timeout_s(timeout_s) * 1e9)
        looked_ns = self._clock.now_ns()
        newest, deadline = self.newest, Deadline(looked_ns, timeout_ns)
        while newest < wanted:
            yield min(_LIVENESS_NS, timeout_ns)
            now_ns = self._clock.now_ns()
            if now_ns - looked_ns >= _LIVENESS_NS:
                if self.over and not self._has_followed() and not self.follow:
                    return
                looked_ns = now_ns
            before, newest = newest, self.newest
            if newest > before:
                deadline = Deadline(now_ns, timeout_ns)
            elif newest < wanted and deadline.is_over(now_ns):
                raise TimeoutExceededError(
                    f"job {self.job}: expected version {wanted}, found version {newest} and no newer one for"
                    f" {timeout_ns / 1e9:g} s; look at its workers with fastps top, or wait longer (timeout_s)"
                )

    def ask_to_stop(self) -> None:
        """Ask the training to stop: `stop_asked` of its optimizer or publisher says so, and nothing else follows."""
        self._check_usable()
        self._pins.ask_to_stop()

    @property
    def over(self) -> bool:
        """Whether the job has ended: no process answers for it, or every worker has left, failed or died."""
        before = self._memory.arena.lane_states()
        assert self._identity is not None
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
        _close(self._name)

    def end_in_child(self) -> None:
        """End in a forked child, whose parent may give the pinned version back at any time."""
        self.forked = True

    def _check_usable(self) -> None:
        if self.forked:
            raise UsageError(
                f"this reader of job {self.job} was made in the parent of this process: expected a call there; open a reader of"
                " its own with fastps.reader"
            )
        if self.closed:
            raise UsageError(f"this reader of job {self.job} is closed: open another with fastps.reader")

    def __reduce__(self) -> Any:
        """Raise UsageError: a copy would have no place in the job."""
        raise UsageError(
            "a reader cannot be copied or pickled: expected its job's name, with which another process calls"
            f" fastps.reader({self.job!r})"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _close(name: rendezvous.ReaderName | None) -> None:
    if name is not None:
        name.close()


def _after_fork_in_child() -> None:
    for reader in list(_live):
        reader.end_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
