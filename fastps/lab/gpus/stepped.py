"""All devices of one simulated node in one thread: a seed decides which stream goes on, and the order of accesses is checked.

Several processes are simulated, too, each with devices, handles and a death of its own. Nothing runs by itself: `step` runs one
piece of work of one stream. The kernels are those of fold.cu, compiled by the host's compiler, with the bits of a GPU.

The rules are stricter than CUDA's: work on memory that its process has not opened, on a device without peer access, or after it
was freed, is an error, and so are two accesses that no event orders (hazards).
"""

import ctypes
import random
import struct
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fastps.device.interface import HANDLE_BYTES, DeviceError, DeviceLostError
from fastps.device.regions import POISON
from fastps.kernels.cuda import host_fold, launch_args
from fastps.kernels.cuda.launch_args import Span
from fastps.lab.gpus.hazards import Accesses, Clock, merge

_HANDLE = struct.Struct("<8sq")
_ALIGNMENT = 256


class StuckError(DeviceError):
    """The host waits for work that no stream can do any more."""


@dataclass
class Block:
    """One allocation; `mapped` has the processes that may use it, and `identity` is None for host memory."""

    address: int
    size: int
    array: npt.NDArray[np.uint8]
    owner: int
    identity: str | None
    mapped: set[int]
    accesses: Accesses


@dataclass
class SteppedEvent:
    """An event of a process: how many records were made and are done, and what each done record knows."""

    owner: int
    made: int = 0
    done: int = 0
    known: dict[int, Clock] = field(default_factory=dict)


@dataclass
class _Piece:
    """A piece of work: of an event (to record, or to wait for a record), or `run`, which reads and writes memory."""

    clock: Clock
    text: str
    run: Callable[["SteppedStream"], None] | None = None
    event: SteppedEvent | None = None
    number: int = 0
    records: bool = False


@dataclass
class SteppedStream:
    """A stream of a process on a device."""

    number: int
    process: int
    device: "SteppedDevice"
    name: str
    work: deque[_Piece] = field(default_factory=deque)
    clock: Clock = field(default_factory=dict)
    captured: list[_Piece] | None = None

    def can_go(self) -> bool:
        """Whether the next piece of work can run now."""
        if not self.work:
            return False
        piece = self.work[0]
        return piece.event is None or piece.records or piece.event.done >= piece.number


class SteppedNode:
    """The devices of one node and the processes that use them. `unreachable` has pairs of devices without peer access.

    >>> node = SteppedNode(seed=1)
    >>> device = node.device(process=0, identity="gpu 0")
    >>> source, address, stream = device.host_memory(4), device.allocate(4), device.make_stream()
    >>> source[:] = 7
    >>> device.copy(address, source.ctypes.data, 4, stream)
    >>> device.view(address, 4, "uint8").tolist(), node.step(), device.view(address, 4, "uint8").tolist()
    ([0, 0, 0, 0], True, [7, 7, 7, 7])
    """

    def __init__(self, seed: int, unreachable: Collection[frozenset[str]] = ()) -> None:
        self.random = random.Random(seed)
        self.unreachable = unreachable
        self.streams: list[SteppedStream] = []
        self.devices: list[SteppedDevice] = []
        self.blocks: dict[int, Block] = {}
        self._addresses: list[int] = []  # of the blocks, in order
        self.handles: dict[bytes, Any] = {}
        self.clocks: dict[int, Clock] = {}  # what the host of each process knows to be done
        self.dead: set[int] = set()
        self.ran = 0

    def device(self, process: int, identity: str) -> "SteppedDevice":
        """A device as a process uses it."""
        made = SteppedDevice(self, process, identity)
        self.devices.append(made)
        return made

    def step(self) -> bool:
        """Run one piece of work of a random stream that can go on; False if none can."""
        ready = [stream for stream in self.streams if stream.can_go()]
        if not ready:
            return False
        stream = self.random.choice(ready)
        piece = stream.work.popleft()
        self.ran += 1
        merge(stream.clock, piece.clock)
        stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
        if piece.event is None:
            assert piece.run is not None
            piece.run(stream)
        elif piece.records:
            piece.event.done = piece.number
            piece.event.known[piece.number] = dict(stream.clock)
        elif piece.number:
            merge(stream.clock, piece.event.known[piece.number])
        return True

    def drain(self, stream: SteppedStream) -> None:
        """Run work of any stream until this one has none. Raises StuckError if it waits for what never happens."""
        while stream.work:
            if not self.step():
                raise StuckError(f"expected {stream.name} to come to its end, found that it waits for work that nothing does")

    def meet(self) -> None:
        """Let every process's host know what any of them knows to be done, as after they all have met."""
        whole: Clock = {}
        for clock in self.clocks.values():
            merge(whole, clock)
        for process in self.clocks:
            self.clocks[process] = dict(whole)

    def kill(self, process: int) -> None:
        """End a process: its queued work never runs, its records never complete, and its memory is poisoned."""
        self.dead.add(process)
        for stream in self.streams:
            if stream.process == process:
                stream.work.clear()
        for block in list(self.blocks.values()):
            if block.owner == process:
                self.free(block)

    def free(self, block: Block) -> None:
        """Free an allocation. Its address is not used again."""
        block.array[:] = POISON
        block.mapped.clear()

    def find(self, address: int, size: int, process: int, device: "SteppedDevice", what: str) -> Block:
        """The allocation that holds the bytes, if the process may use it on this device. Raises DeviceError."""
        place = bisect_right(self._addresses, address) - 1
        block = self.blocks[self._addresses[place]] if place >= 0 else None
        if block is None or address + size > block.address + block.size:
            raise DeviceError(f"{what}: expected memory of the node, found {size} bytes at {address:#x}")
        if process not in block.mapped:
            raise DeviceError(
                f"{what}: expected memory that process {process} has open, found {block.accesses.name}, which"
                f" {'is freed' if not block.mapped else 'it has not opened'}"
            )
        if block.owner == process and block.identity not in (None, device.identity) and block.address not in device.borrowed:
            raise DeviceError(
                f"{what}: expected {block.accesses.name} to be borrowed by {device.identity}, found that it is not"
            )
        if block.identity is not None and not device.can_reach(block.identity):
            raise DeviceError(f"{what}: expected peer access from {device.identity} to {block.identity}, found none")
        return block

    def add(self, block: Block) -> None:
        """Take up an allocation."""
        self.blocks[block.address] = block
        insort(self._addresses, block.address)


class SteppedDevice:
    """See fastps.device.interface.Device. Made by SteppedNode.device."""

    def __init__(self, node: SteppedNode, process: int, identity: str) -> None:
        self.identity = identity
        self.node = node
        self.process = process
        self.borrowed: set[int] = set()
        self._capturing: SteppedStream | None = None
        node.clocks.setdefault(process, {})
        self._computing = self.make_stream("compute stream")

    @property
    def reaches_all(self) -> bool:
        return not any(self.identity in pair for pair in self.node.unreachable)

    def can_reach(self, identity: str) -> bool:
        return frozenset((self.identity, identity)) not in self.node.unreachable

    # -- memory ------------------------------------------------------------------------------------

    def allocate(self, size: int) -> int:
        return self._make(size, self.identity, f"memory of process {self.process} on {self.identity}").address

    def allocate_host(self, size: int) -> int:
        return self._make(size, None, f"host memory of process {self.process}").address

    def _make(self, size: int, identity: str | None, name: str) -> Block:
        self._check_not_capturing("memory")
        array = np.zeros(size + _ALIGNMENT, np.uint8)
        begin = -array.ctypes.data % _ALIGNMENT
        array = array[begin : begin + size]
        block = Block(array.ctypes.data, size, array, self.process, identity, {self.process}, Accesses(name))
        self.node.add(block)
        return block

    def export(self, address: int) -> bytes:
        return self._handle(self.node.blocks[address])

    export_host = export

    def open(self, handle: bytes) -> int:
        block = self._of(handle)
        if not isinstance(block, Block) or not block.mapped:
            raise DeviceLostError("expected memory of another process, found none: it has ended, or has freed that memory")
        if block.owner == self.process or self.process in block.mapped:
            raise DeviceError(f"expected memory that process {self.process} has not open, found {block.accesses.name}")
        if block.identity is not None and not self.can_reach(block.identity):
            raise DeviceLostError(f"expected peer access from {self.identity} to {block.identity}, found none")
        block.mapped.add(self.process)
        return block.address

    open_host = open

    def borrow(self, other: "SteppedDevice", address: int) -> None:
        if other.process != self.process:
            raise DeviceError(f"expected another device of process {self.process}, found one of process {other.process}")
        self.borrowed.add(address)

    def close(self, address: int) -> None:
        block = self.node.blocks[address]
        if self.process not in block.mapped:
            raise DeviceError(f"expected memory that is open, found {block.accesses.name}")
        if block.owner != self.process:
            block.mapped.discard(self.process)
            return
        users = block.mapped - {self.process} - self.node.dead
        if users:
            raise DeviceError(f"{block.accesses.name} is freed while processes {sorted(users)} have it open")
        self.node.free(block)

    def host_memory(self, size: int) -> npt.NDArray[np.uint8]:
        return self._make(size, None, f"staging of process {self.process}").array

    def view(self, address: int, length: int, dtype: str = "float32") -> npt.NDArray[Any]:
        size = length * np.dtype(dtype).itemsize
        block = self.node.find(address, size, self.process, self, "a view")
        return block.array[address - block.address :][:size].view(dtype)

    def _handle(self, of: Any) -> bytes:
        handle = _HANDLE.pack(b"stepped", id(of)).ljust(HANDLE_BYTES, b"\0")
        self.node.handles[handle] = of
        return handle

    def _of(self, handle: bytes) -> Any:
        if handle not in self.node.handles:
            raise DeviceLostError("expected a handle of this node, found another")
        return self.node.handles[handle]

    # -- streams and events ------------------------------------------------------------------------

    def compute_stream(self) -> SteppedStream:
        return self._computing

    def make_stream(self, name: str = "stream") -> SteppedStream:
        number = len(self.node.streams)
        stream = SteppedStream(number, self.process, self, f"{name} {number} of process {self.process}")
        self.node.streams.append(stream)
        return stream

    def make_event(self) -> SteppedEvent:
        return SteppedEvent(self.process)

    def export_event(self, event: SteppedEvent) -> bytes:
        return self._handle(event)

    def open_event(self, handle: bytes) -> SteppedEvent:
        event = self._of(handle)
        if not isinstance(event, SteppedEvent) or event.owner == self.process:
            raise DeviceError("expected another process's event to open")
        if event.owner in self.node.dead:
            raise DeviceLostError(f"expected process {event.owner} to live, found that it has ended")
        return event

    def close_event(self, event: SteppedEvent) -> None:
        """See Device."""

    def record(self, event: SteppedEvent, stream: SteppedStream) -> None:
        self._check_not_capturing("a record")
        if event.owner != self.process:
            raise DeviceError(f"expected an event of process {self.process} to record, found one of process {event.owner}")
        event.made += 1
        self._queue(stream, _Piece({}, "record", event=event, number=event.made, records=True))

    def wait(self, event: SteppedEvent, stream: SteppedStream) -> None:
        self._check_not_capturing("a wait")
        self._queue(stream, _Piece({}, "wait", event=event, number=event.made))

    def _queue(self, stream: SteppedStream, piece: _Piece) -> None:
        if stream.process != self.process:
            raise DeviceError(f"expected a stream of process {self.process}, found {stream.name}")
        if stream.captured is not None:
            stream.captured.append(piece)
            return
        piece.clock = dict(self.node.clocks[self.process])
        stream.work.append(piece)

    def synchronize(self, stream: SteppedStream) -> None:
        self._check_not_capturing("a wait of the host")
        self.node.drain(stream)
        merge(self.node.clocks[self.process], stream.clock)

    def check(self, stream: SteppedStream) -> None:
        """See Device. Work that fails raises its error where it runs."""

    def synchronize_all(self) -> None:
        for stream in self.node.streams:
            if stream.process == self.process:
                self.synchronize(stream)

    def synchronize_event(self, event: SteppedEvent) -> None:
        self._check_not_capturing("a wait of the host")
        number = event.made
        while event.done < number:
            if not self.node.step():
                raise StuckError(f"expected record {number} of an event of process {event.owner}, found that it never comes")
        if number:
            merge(self.node.clocks[self.process], event.known[number])

    def is_done(self, event: SteppedEvent) -> bool:
        self._check_not_capturing("a question of the host")
        if event.done < event.made:
            return False
        if event.made:
            merge(self.node.clocks[self.process], event.known[event.made])
        return True

    # -- work --------------------------------------------------------------------------------------

    def copy(self, to: int, source: int, size: int, stream: SteppedStream) -> None:
        text = f"copy of {size} bytes on {stream.name}"

        def run(on: SteppedStream) -> None:
            self._touch([(source, size)], False, on, text)
            self._touch([(to, size)], True, on, text)
            ctypes.memmove(to, source, size)

        self._queue(stream, _Piece({}, text, run))

    def queue(self, stream: SteppedStream, text: str, run: Callable[[SteppedStream], None]) -> None:
        """Queue other work, named `text` in errors."""
        self._queue(stream, _Piece({}, text, run))

    def launch_fold(self, rule: int, dtype: str, order: int, tiles: int, blocks: int, stream: SteppedStream) -> None:
        number, text = launch_args.DTYPES[dtype], f"fold on {stream.name}"

        def run(on: SteppedStream) -> None:
            self._touch([(order, 8), (tiles, blocks * host_fold.TILE_BYTES)], False, on, text)
            reads, writes = launch_args.accessed(order, dtype)
            self._touch(reads, False, on, text)
            self._touch(writes, True, on, text)
            host_fold.launch(rule, number, order, tiles, blocks, launch_args.THREADS)

        self._queue(stream, _Piece({}, text, run))

    def use_rule(self, text: str) -> None:
        """See Device. A simulated device has no compiler."""
        raise DeviceError("expected a rule of fastps' own on a simulated device, found a user's")

    def launch_check(self, dtype: str, args: int, tiles: int, blocks: int, stream: SteppedStream) -> None:
        number, text = launch_args.DTYPES[dtype], f"check on {stream.name}"

        def run(on: SteppedStream) -> None:
            self._touch([(args, launch_args.CHECK_BYTES), (tiles, blocks * host_fold.TILE_BYTES)], False, on, text)
            reads, writes = launch_args.accessed_by_check(args, tiles, blocks, dtype)
            self._touch(reads, False, on, text)
            self._touch(writes, True, on, text)
            host_fold.launch_check(number, args, tiles, blocks, launch_args.THREADS)

        self._queue(stream, _Piece({}, text, run))

    def begin_capture(self, stream: SteppedStream) -> None:
        self._check_not_capturing("another capture")
        stream.captured = []
        self._capturing = stream

    def end_capture(self, stream: SteppedStream) -> list[_Piece]:
        if stream.captured is None or not stream.captured:
            raise DeviceError(f"expected {stream.name} to capture work, found none")
        captured, stream.captured, self._capturing = stream.captured, None, None
        return captured

    def launch(self, graph: list[_Piece], stream: SteppedStream) -> None:
        self._check_not_capturing("a launch")
        for piece in graph:
            self._queue(stream, replace(piece))

    def _check_not_capturing(self, what: str) -> None:
        if self._capturing is not None:
            raise DeviceError(f"expected copies and folds alone while {self._capturing.name} is captured, found {what}")

    def _touch(self, spans: list[Span], writes: bool, stream: SteppedStream, text: str) -> None:
        for address, size in spans:
            if size:
                block = self.node.find(address, size, self.process, self, text)
                block.accesses.add((address - block.address, size), writes, stream.number, stream.clock, text)

    def shut(self, *, waits: bool = True) -> None:
        if waits:
            self.synchronize_all()
        for block in list(self.node.blocks.values()):
            if self.process in block.mapped and block.owner != self.process:
                block.mapped.discard(self.process)
