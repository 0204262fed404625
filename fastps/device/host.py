"""A device in host memory: the interface of a GPU, between real processes, on any machine.

Memory and events are memfds. Other processes open them by a handle that holds a process id, a descriptor, a size and a secret.
Each stream is a thread that runs its work in order, so work that no event orders really runs in any order. The kernels are
those of fold.cu, compiled by the host's compiler. This device tests the protocol; it is not built for speed.
"""

import ctypes
import mmap
import os
import queue
import secrets
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fastps.device.interface import HANDLE_BYTES, DeviceError, DeviceLostError
from fastps.kernels.cuda import host_fold, launch_args
from fastps.membership.rendezvous import pidfd_alive

_HANDLE = struct.Struct("<qqq16s")  # process, descriptor, size, secret
_SECRET_BYTES = 16
_POLL_S = 20e-6
_LOOK_EVERY = 200  # polls between two checks that the other process is alive


@dataclass
class _Region:
    """A mapped memfd: `size` bytes, then the secret. `pidfd` is the creating process's, or -1 for this process's own."""

    descriptor: int
    memory: mmap.mmap
    size: int
    secret: bytes
    address: int
    pidfd: int = -1


@dataclass
class HostEvent:
    """An event: its memory, which knows the recording process, and two counters in it, of records made and records done."""

    region: _Region
    words: npt.NDArray[np.int64]


@dataclass
class HostStream:
    """A queue of work and the thread that runs it; without a thread work runs immediately, as on the host itself."""

    thread: threading.Thread | None = None
    work: "queue.SimpleQueue[Callable[[], None] | None]" = field(default_factory=queue.SimpleQueue)
    failure: Exception | None = None

    def do(self, piece: Callable[[], None]) -> None:
        """Queue a piece of work. After a failure no further work runs."""
        if self.thread is None:
            piece()
        else:
            self.work.put(piece)

    def run(self) -> None:
        """Run queued work until None arrives. The thread's main function."""
        while (piece := self.work.get()) is not None:
            if self.failure is None:
                try:
                    piece()
                except Exception as error:
                    self.failure = error


class HostDevice:
    """See fastps.device.interface.Device. `delay_s` delays the start of each piece of work on a stream that has a thread.

    With `computes_at_once` the compute stream runs work when it is called, as torch does on the CPU; else it queues work, as a
    GPU does.

    >>> device = HostDevice("host")
    >>> address = device.allocate(64)
    >>> device.view(address, 16)[:2].tolist()
    [0.0, 0.0]
    >>> device.shut()
    """

    def __init__(self, identity: str, delay_s: float = 0.0, *, computes_at_once: bool = True) -> None:
        self.identity = identity
        self._delay_s = delay_s
        self._regions: dict[int, _Region] = {}
        self._events: list[HostEvent] = []
        self._streams: list[HostStream] = []
        self._pinned: list[npt.NDArray[np.uint8]] = []
        self._computing = HostStream() if computes_at_once else self.make_stream()

    # -- memory ------------------------------------------------------------------------------------

    def allocate(self, size: int) -> int:
        """See Device."""
        region = self._make_region(size)
        self._regions[region.address] = region
        return region.address

    def export(self, address: int) -> bytes:
        """See Device."""
        return self._handle(self._regions[address])

    def open(self, handle: bytes) -> int:
        """See Device."""
        region = self._open_region(handle)
        self._regions[region.address] = region
        return region.address

    def close(self, address: int) -> None:
        """See Device. Views that still live keep the memory mapped."""
        _let_go(self._regions.pop(address))

    def host_memory(self, size: int) -> npt.NDArray[np.uint8]:
        """See Device."""
        self._pinned.append(np.zeros(size, np.uint8))
        return self._pinned[-1]

    def view(self, address: int, length: int, dtype: str = "float32") -> npt.NDArray[Any]:
        """See Device."""
        size = length * np.dtype(dtype).itemsize
        for region in self._regions.values():
            if region.address <= address and address + size <= region.address + region.size:
                return np.frombuffer(region.memory, dtype, length, address - region.address)
        raise DeviceError(f"expected memory of this device, found {size} bytes at {address:#x}")

    def _make_region(self, size: int) -> _Region:
        descriptor = os.memfd_create("fastps-device", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, size + _SECRET_BYTES)
        except OSError as error:
            os.close(descriptor)
            raise DeviceError(
                f"expected {size:,} bytes of memory for a device of the host, found too little: {error}"
            ) from error
        secret = secrets.token_bytes(_SECRET_BYTES)
        region = _mapped(descriptor, size, secret, -1)
        region.memory[size:] = secret
        return region

    def _handle(self, region: _Region) -> bytes:
        return _HANDLE.pack(os.getpid(), region.descriptor, region.size, region.secret).ljust(HANDLE_BYTES, b"\0")

    def _open_region(self, handle: bytes) -> _Region:
        """Map the memory that a handle names. The secret exposes a process id or descriptor number that has been reused.

        Raises DeviceLostError if the memory is gone.
        """
        process_id, number, size, secret = _HANDLE.unpack_from(handle)
        stale = DeviceLostError(f"expected memory of process {process_id}, found none: it has ended, or has freed that memory")
        try:
            pidfd = os.pidfd_open(process_id)
        except OSError as error:
            raise stale from error
        try:
            descriptor = os.open(f"/proc/{process_id}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            os.close(pidfd)
            raise stale from error
        if os.fstat(descriptor).st_size == size + _SECRET_BYTES:
            region = _mapped(descriptor, size, secret, pidfd)
            if region.memory[size:] == secret:
                return region
            _let_go(region)
            raise stale
        os.close(descriptor)
        os.close(pidfd)
        raise stale

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

    def make_event(self) -> HostEvent:
        """See Device."""
        return self._event_of(self._make_region(16))

    def export_event(self, event: HostEvent) -> bytes:
        """See Device."""
        return self._handle(event.region)

    def open_event(self, handle: bytes) -> HostEvent:
        """See Device."""
        return self._event_of(self._open_region(handle))

    def close_event(self, event: HostEvent) -> None:
        """See Device."""
        self._events.remove(event)
        _let_go(event.region)

    def _event_of(self, region: _Region) -> HostEvent:
        event = HostEvent(region, np.frombuffer(region.memory, np.int64, 2))
        self._events.append(event)
        return event

    def record(self, event: HostEvent, stream: HostStream) -> None:
        """See Device."""
        event.words[0] += 1
        number = int(event.words[0])

        def done() -> None:
            event.words[1] = number

        stream.do(done)

    def wait(self, event: HostEvent, stream: HostStream) -> None:
        """See Device."""
        number = int(event.words[0])
        stream.do(lambda: _await(event, number))

    def synchronize(self, stream: HostStream) -> None:
        """See Device."""
        if stream.thread is not None:
            reached = threading.Event()
            # After a failure the thread skips this piece, too, so the loop checks for one.
            stream.work.put(reached.set)
            while not reached.wait(0.01) and stream.failure is None:
                pass
        if stream.failure is not None:
            raise stream.failure

    def synchronize_all(self) -> None:
        """See Device."""
        for stream in self._streams:
            self.synchronize(stream)

    def synchronize_event(self, event: HostEvent) -> None:
        """See Device."""
        _await(event, int(event.words[0]))

    # -- work --------------------------------------------------------------------------------------

    def copy(self, to: int, source: int, size: int, stream: HostStream) -> None:
        """See Device."""
        self._queue(stream, lambda: ctypes.memmove(to, source, size))

    def launch_fold(self, rule: int, dtype: str, order: int, tiles: int, blocks: int, stream: HostStream) -> None:
        """See Device."""
        number = launch_args.DTYPES[dtype]
        self._queue(stream, lambda: host_fold.launch(rule, number, order, tiles, blocks, launch_args.THREADS))

    def _queue(self, stream: HostStream, work: Callable[[], object]) -> None:
        delay_s = self._delay_s if stream.thread is not None else 0.0

        def piece() -> None:
            if delay_s:
                time.sleep(delay_s)
            work()

        stream.do(piece)

    def shut(self) -> None:
        """See Device."""
        for stream in self._streams:
            stream.failure = stream.failure or DeviceError("the device is shut")
            stream.work.put(None)
            if stream.thread is not None:
                stream.thread.join()
        self._streams.clear()
        for event in list(self._events):
            self.close_event(event)
        for address in list(self._regions):
            self.close(address)


def _mapped(descriptor: int, size: int, secret: bytes, pidfd: int) -> _Region:
    memory = mmap.mmap(descriptor, size + _SECRET_BYTES)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    return _Region(descriptor, memory, size, secret, address, pidfd)


def _let_go(region: _Region) -> None:
    os.close(region.descriptor)
    if region.pidfd >= 0:
        os.close(region.pidfd)
        region.pidfd = -1


def _await(event: HostEvent, number: int) -> None:
    """Wait until the record of that number is done. Raises DeviceLostError if its process ends before."""
    polls = 0
    while int(event.words[1]) < number:
        polls += 1
        if polls % _LOOK_EVERY == 0 and event.region.pidfd >= 0 and not pidfd_alive(event.region.pidfd):
            raise DeviceLostError("expected a process to finish its work on a device, found that it has ended: restart the job")
        time.sleep(_POLL_S)
