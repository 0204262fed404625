"""A device in host memory: the interface of a GPU, between real processes, on any machine.

Memory and events are memfds. Each stream is a thread that runs its work in order, so work that no event orders really runs in
any order. The kernels are those of fold.cu, compiled by the host compiler. This device tests the protocol, and is harsher than
CUDA: work may begin late, completed events may be seen late, freed memory is poisoned and an access to it is an error, devices
may not reach each other, and a process can die between any two operations.
"""

import ctypes
import itertools
import logging
import os
import queue
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from fastps.device.interface import DeviceError, DeviceLostError, gone, no_room
from fastps.device.regions import Region, handle_of, make_region, open_region, release
from fastps.kernels.cuda import host_fold, launch_args
from fastps.kernels.cuda.runtime import source
from fastps.kernels.update.fold import RULE_USER

logger = logging.getLogger("fastps.device")

_POLL_S = 20e-6
_LOOK_EVERY = 200  # polls between two checks that the other process is alive
_HOST = "host memory"  # the device whose memory every device reaches


@dataclass(frozen=True)
class Teeth:
    """What a device does that a GPU only may do.

    Attributes:
        seed: of the draws.
        delay_s: the longest delay before a piece of work.
        late_s: the longest time until a completed event is seen.
        unreachable: the devices to which there is no peer access.
        dies_at: the process is killed before this operation of the device, counted from 1; 0: never.
        lost_at: the device is lost from this operation on; 0: never.
        status: CUDA's code for that, where CUDA is simulated over this device.
        memory: bytes of the device's memory for this process; 0: no limit.
    """

    seed: int = 0
    delay_s: float = 0.0
    late_s: float = 0.0
    unreachable: frozenset[str] = frozenset()
    dies_at: int = 0
    lost_at: int = 0
    status: int = 719
    memory: int = 0


@dataclass
class HostEvent:
    """An event: its memory, which knows the recording process, and counters in it.

    They count records made and records done; the third is 1 once a stream that has failed was to make a record.
    """

    region: Region
    words: npt.NDArray[np.int64]


@dataclass
class HostStream:
    """A queue of work and the thread that runs it; without a thread work runs immediately, as on the host itself."""

    thread: threading.Thread | None = None
    work: "queue.SimpleQueue[tuple[Callable[[], None], HostEvent | None] | None]" = field(default_factory=queue.SimpleQueue)
    failure: Exception | None = None
    captured: list[Callable[[], object]] | None = None

    def do(self, piece: Callable[[], None], event: HostEvent | None = None) -> None:
        """Queue a piece of work, a record of `event` if that is given. After a failure no further work runs."""
        if self.captured is not None:
            raise DeviceError("expected copies and folds alone on a stream that is captured, found an event or a wait")
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


class HostDevice:
    """See fastps.device.interface.Device. `delay_s` delays the start of each piece of work on a stream that has a thread.

    With `computes_at_once` the compute stream runs work when it is called, as torch does on the CPU; else it queues work, as a
    GPU does. `teeth`: what goes wrong. `compile_rule` compiles a user's rule: it makes of the kernels' source a function that
    launches (dtype, order, tiles, blocks); without it there are no users' rules.

    >>> device = HostDevice("host")
    >>> address = device.allocate(64)
    >>> device.view(address, 16)[:2].tolist()
    [0.0, 0.0]
    >>> device.shut()
    """

    def __init__(
        self,
        identity: str,
        delay_s: float = 0.0,
        *,
        computes_at_once: bool = True,
        teeth: Teeth = Teeth(),
        compile_rule: Callable[[str], Callable[[int, int, int, int], None]] | None = None,
    ) -> None:
        self.identity = identity
        self._delay_s = delay_s
        self._teeth = teeth
        self._compile_rule = compile_rule
        self._users: Callable[[int, int, int, int], None] | None = None
        self._random = random.Random(teeth.seed)  # used under the interpreter's lock alone, one call at a time
        self._operations = itertools.count(1)
        self._regions: dict[int, Region] = {}
        self._events: list[HostEvent] = []
        self._streams: list[HostStream] = []
        self._pinned: list[npt.NDArray[np.uint8]] = []
        self._lenders: list[HostDevice] = []
        self._is_ended = self._is_lost = False
        self._computing = HostStream() if computes_at_once else self.make_stream()

    def _operate(self) -> None:
        """Count an operation of the host or a stream; die before it if it is the one. Raises DeviceFailedError if lost."""
        number = next(self._operations)
        if number == self._teeth.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._teeth.lost_at and number >= self._teeth.lost_at and not self._is_ended:
            self._is_lost = True
            raise gone(self.identity, f"its operation {self._teeth.lost_at} failed")

    # -- memory ------------------------------------------------------------------------------------

    @property
    def reaches_all(self) -> bool:
        """See Device."""
        return not self._teeth.unreachable

    def can_reach(self, identity: str) -> bool:
        """See Device."""
        return identity not in self._teeth.unreachable

    def allocate(self, size: int) -> int:
        """See Device."""
        self._operate()
        if self._teeth.memory and size > self.free_memory():
            raise no_room(size, self.identity, self.free_memory(), self._teeth.memory)
        return self._keep(make_region(size, self.identity))

    def free_memory(self) -> int:
        """Bytes of the device's memory that are left; 0 without a limit."""
        used = sum(each.size for each in self._regions.values() if each.identity == self.identity)
        return max(0, self._teeth.memory - used)

    def allocate_host(self, size: int) -> int:
        """See Device."""
        self._operate()
        return self._keep(make_region(size, _HOST))

    def export(self, address: int) -> bytes:
        """See Device."""
        self._operate()
        return handle_of(self._regions[address])

    export_host = export

    def open(self, handle: bytes) -> int:
        """See Device. Raises DeviceLostError for a device that this one does not reach, as CUDA does."""
        self._operate()
        region = open_region(handle)
        if not self.can_reach(region.identity):
            release(region)
            raise DeviceLostError(
                f"expected peer access from {self.identity} to {region.identity}, found none: FASTPS_PLACEMENT=host needs none"
            )
        return self._keep(region)

    open_host = open

    def borrow(self, other: "HostDevice", address: int) -> None:
        """See Device. Everything that the other device has is then open, as where CUDA enables peer access."""
        self._operate()
        if not other._regions[address].identity == _HOST and not self.can_reach(other.identity):
            raise DeviceError(f"expected peer access from {self.identity} to {other.identity}, found none")
        self.lend(other)

    def lend(self, other: "HostDevice") -> None:
        """Open everything that another device of this process has."""
        if other not in self._lenders:
            self._lenders.append(other)

    def _open_regions(self) -> list[Region]:
        return [region for device in (self, *self._lenders) for region in list(device._regions.values())]

    def _keep(self, region: Region) -> int:
        self._regions[region.address] = region
        return region.address

    def close(self, address: int) -> None:
        """See Device. Views that still live see poison."""
        if not self._is_lost:
            self._operate()
        if address not in self._regions:
            raise DeviceError(f"expected memory of this device to close, found {address:#x}, which is not open")
        release(self._regions.pop(address))

    def host_memory(self, size: int) -> npt.NDArray[np.uint8]:
        """See Device."""
        self._pinned.append(np.zeros(size, np.uint8))
        return self._pinned[-1]

    def pin(self, memory: npt.NDArray[np.uint8]) -> None:
        """Let work use host memory of another's, until `unpin`."""
        self._pinned.append(memory)

    def unpin(self, memory: npt.NDArray[np.uint8]) -> None:
        """End that."""
        self._pinned = [each for each in self._pinned if each is not memory]

    def view(self, address: int, length: int, dtype: str = "float32") -> npt.NDArray[Any]:
        """See Device."""
        size = length * np.dtype(dtype).itemsize
        for region in list(self._regions.values()):
            if region.holds(address, size):
                return np.frombuffer(region.memory, dtype, length, address - region.address)
        raise DeviceError(f"expected memory of this device, found {size} bytes at {address:#x}")

    def _check(self, spans: Iterable[launch_args.Span]) -> None:
        """Raise DeviceError for an access to what is not open here. Called when the work runs."""
        for address, size in spans:
            if not size or any(region.holds(address, size) for region in self._open_regions()):
                continue
            if not any(0 <= address - memory.ctypes.data <= memory.nbytes - size for memory in list(self._pinned)):
                raise DeviceError(
                    f"expected work on memory that is open on {self.identity}, found {size} bytes at {address:#x}: they were"
                    " freed, unmapped, or never opened"
                )

    # -- streams and events ------------------------------------------------------------------------

    def compute_stream(self) -> HostStream:
        """See Device."""
        return self._computing

    def make_stream(self) -> HostStream:
        """See Device."""
        stream = HostStream()
        stream.thread = threading.Thread(target=stream.run, daemon=True)
        stream.thread.start()
        self._streams.append(stream)
        return stream

    def end_stream(self, stream: HostStream) -> None:
        """Wait for a stream's work, and end the stream. Failed work is nothing to the caller, as in CUDA."""
        self._streams.remove(stream)
        stream.work.put(None)
        if stream.thread is not None:
            stream.thread.join()

    def make_event(self) -> HostEvent:
        """See Device."""
        self._operate()
        return self._event_of(make_region(24, _HOST))

    def export_event(self, event: HostEvent) -> bytes:
        """See Device."""
        self._operate()
        return handle_of(event.region)

    def open_event(self, handle: bytes) -> HostEvent:
        """See Device."""
        self._operate()
        return self._event_of(open_region(handle))

    def close_event(self, event: HostEvent) -> None:
        """See Device."""
        self._operate()
        self._events.remove(event)
        release(event.region)

    def _event_of(self, region: Region) -> HostEvent:
        event = HostEvent(region, np.frombuffer(region.memory, np.int64, 3))
        self._events.append(event)
        return event

    def record(self, event: HostEvent, stream: HostStream) -> None:
        """See Device."""
        self._operate()
        if event.region.pidfd >= 0:
            raise DeviceError("expected an event of this process to record, found another process's")
        event.words[0] += 1
        number = int(event.words[0])

        def done() -> None:
            event.words[1] = number

        stream.do(done, event)

    def wait(self, event: HostEvent, stream: HostStream) -> None:
        """See Device."""
        self._operate()
        number = int(event.words[0])
        stream.do(lambda: self._await(event, number))

    def synchronize(self, stream: HostStream) -> None:
        """See Device."""
        if stream.thread is not None:
            reached = threading.Event()
            # After a failure the thread skips this piece, too, so the loop checks for one.
            stream.work.put((reached.set, None))
            while not reached.wait(0.01) and stream.failure is None:
                pass
        if stream.failure is not None:
            raise stream.failure

    def check(self, stream: HostStream) -> None:
        """See Device."""
        if stream.failure is not None:
            raise stream.failure

    def synchronize_all(self) -> None:
        """See Device."""
        for stream in self._streams:
            self.synchronize(stream)

    def synchronize_event(self, event: HostEvent) -> None:
        """See Device. Raises the error of a stream that has failed."""
        self._operate()
        try:
            self._await(event, int(event.words[0]))
        except DeviceError:
            for stream in (self._computing, *self._streams):
                if stream.failure is not None:
                    raise stream.failure from None
            raise

    def _raise_failure(self) -> None:
        """Raise the failure of a stream of this process, if there is one."""
        failure = next((stream.failure for stream in list(self._streams) if stream.failure is not None), None)
        if failure is not None:
            raise failure

    def is_done(self, event: HostEvent) -> bool:
        """See Device."""
        self._raise_failure()
        if int(event.words[1]) < int(event.words[0]):
            return False
        if self._teeth.late_s:
            time.sleep(self._random.uniform(0, self._teeth.late_s))
        return True

    def _await(self, event: HostEvent, number: int) -> None:
        """Wait until the record of that number is done.

        Raises DeviceLostError if its process ends before, or if that process's work before it has failed; DeviceError if this
        process's work has failed, or if this device is shut meanwhile: no wait may outlast what it waits for.
        """
        polls = 0
        while int(event.words[1]) < number:
            polls += 1
            if self._is_ended:
                raise DeviceError("expected a device in use, found it shut")
            if event.region.pidfd < 0:
                self._raise_failure()
            if event.words[2]:
                kind = DeviceLostError if event.region.pidfd >= 0 else DeviceError
                raise kind("expected work on a device to come to its end, found that it has failed")
            if polls % _LOOK_EVERY == 0 and not event.region.owner_lives():
                raise DeviceLostError(
                    "expected a process to finish its work on a device, found that it has ended: restart the job"
                )
            time.sleep(_POLL_S)
        if self._teeth.late_s:
            time.sleep(self._random.uniform(0, self._teeth.late_s))

    # -- work --------------------------------------------------------------------------------------

    def copy(self, to: int, source: int, size: int, stream: HostStream) -> None:
        """See Device."""
        self._operate()

        def work() -> None:
            self._check([(to, size), (source, size)])
            ctypes.memmove(to, source, size)

        self._queue(stream, work)

    def use_rule(self, text: str) -> None:
        """See Device."""
        if self._compile_rule is None:
            raise DeviceError("expected a compiler of users' rules for a device in host memory, found none")
        self._users = self._compile_rule(source(text))

    def launch_fold(self, rule: int, dtype: str, order: int, tiles: int, blocks: int, stream: HostStream) -> None:
        """See Device."""
        self._operate()
        number = launch_args.DTYPES[dtype]

        def work() -> None:
            self._check([(order, 1), (tiles, blocks * host_fold.TILE_BYTES)])
            for spans in launch_args.accessed(order, dtype):
                self._check(spans)
            if rule == RULE_USER and self._users is not None:
                self._users(number, order, tiles, blocks)
            else:
                host_fold.launch(rule, number, order, tiles, blocks, launch_args.THREADS)

        self._queue(stream, work)

    def launch_check(self, dtype: str, args: int, tiles: int, blocks: int, stream: HostStream) -> None:
        """See Device."""
        self._operate()
        number = launch_args.DTYPES[dtype]

        def work() -> None:
            self._check([(args, launch_args.CHECK_BYTES), (tiles, blocks * host_fold.TILE_BYTES)])
            for spans in launch_args.accessed_by_check(args, tiles, blocks, dtype):
                self._check(spans)
            host_fold.launch_check(number, args, tiles, blocks, launch_args.THREADS)

        self._queue(stream, work)

    def begin_capture(self, stream: HostStream) -> None:
        """See Device."""
        self._operate()
        stream.captured = []

    def end_capture(self, stream: HostStream) -> list[Callable[[], object]]:
        """See Device."""
        self._operate()
        if not stream.captured:
            raise DeviceError("expected a stream that captures work, found none")
        captured, stream.captured = stream.captured, None
        return captured

    def launch(self, graph: list[Callable[[], object]], stream: HostStream) -> None:
        """See Device."""
        self._operate()
        for work in graph:
            self._queue(stream, work)

    def _queue(self, stream: HostStream, work: Callable[[], object]) -> None:
        if stream.captured is not None:
            stream.captured.append(work)
            return
        delay_s = self._delay_s if stream.thread is not None else 0.0

        def piece() -> None:
            self._operate()
            drawn_s = self._random.uniform(0, self._teeth.delay_s) if self._teeth.delay_s else 0.0
            if delay_s + drawn_s:
                time.sleep(delay_s + drawn_s)
            work()

        stream.do(piece)

    def shut(self, *, waits: bool = True) -> None:
        """See Device. Work that is under way ends; none of what is queued runs."""
        self._is_ended = True
        for stream in self._streams:
            stream.failure = stream.failure or DeviceError("the device is shut")
            stream.work.put(None)
            if stream.thread is not None:
                stream.thread.join()
        self._streams.clear()
        for event in self._events:
            release(event.region, poisons=False)  # another process may be about to wait for it
        self._events.clear()
        for address in list(self._regions):
            self.close(address)


def host_devices(
    identities: Sequence[str], delay_s: float = 0.0, unreachable: Mapping[str, frozenset[str]] = MappingProxyType({})
) -> list[HostDevice]:
    """The devices of a server. `unreachable`: for each device those to which there is no peer access."""
    return [HostDevice(each, delay_s, teeth=Teeth(unreachable=unreachable.get(each, frozenset()))) for each in identities]
