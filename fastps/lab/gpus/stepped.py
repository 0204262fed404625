"""All devices of one simulated node in one thread: a seed decides which stream goes on, and the order of accesses is checked.

Several processes are simulated, too, each with devices, handles and a death of its own. Nothing runs by itself: `step` runs one
piece of work of one stream. Each process has a CUDA of its own, and a device is a CudaDevice on it.

The rules are stricter than CUDA's: work on memory that its process has not opened, on a device without peer access, or after it
was freed, is an error, and so are two accesses that no event orders (hazards).
"""

import itertools
import random
import struct
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fastps.device.cuda import SUCCESS, CudaDevice
from fastps.device.cuda_errors import NOT_READY
from fastps.device.interface import HANDLE_BYTES, DeviceError, DeviceLostError
from fastps.kernels.cuda.launch_args import Span
from fastps.lab.gpus.fake_cuda import CupyArray, FakeCuda, Work
from fastps.lab.gpus.hazards import Accesses, Clock, merge
from fastps.lab.gpus.regions import POISON

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
    run: Work | None = None
    event: SteppedEvent | None = None
    number: int = 0
    records: bool = False


@dataclass
class SteppedStream:
    """A stream of a process on a GPU."""

    number: int
    process: int
    gpu: str
    name: str
    work: deque[_Piece] = field(default_factory=deque)
    clock: Clock = field(default_factory=dict)

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
        self.numbers = itertools.count(1)  # of streams and events
        self.streams: dict[int, SteppedStream] = {}
        self.events: dict[int, SteppedEvent] = {}
        self.cudas: dict[int, SteppedCuda] = {}
        self.blocks: dict[int, Block] = {}
        self._addresses: list[int] = []  # of the blocks, in order
        self.clocks: dict[int, Clock] = {}  # what the host of each process knows to be done
        self.dead: set[int] = set()
        self.ran = 0

    def device(self, process: int, identity: str) -> "SteppedDevice":
        """A device as a process uses it."""
        return SteppedDevice(self, process, identity)

    def cuda(self, process: int) -> "SteppedCuda":
        """A new process's CUDA."""
        return SteppedCuda(self, process)

    def reaches(self, gpu: str, other: str) -> bool:
        """Whether there is peer access. A GPU reaches itself."""
        return frozenset((gpu, other)) not in self.unreachable

    def step(self) -> bool:
        """Run one piece of work of a random stream that can go on; False if none can."""
        ready = [stream for stream in self.streams.values() if stream.can_go()]
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

    def drain(self, number: int) -> None:
        """Run work of any stream until this one has none. Raises StuckError if it waits for what never happens."""
        stream = self.streams[number]
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
        for stream in self.streams.values():
            if stream.process == process:
                stream.work.clear()
        for block in list(self.blocks.values()):
            if block.owner == process:
                self.free(block)

    def free(self, block: Block) -> None:
        """Free an allocation. Its address is not used again."""
        block.array[:] = POISON
        block.mapped.clear()

    def find(self, address: int, size: int, process: int, gpu: str, what: str) -> Block:
        """The allocation that holds the bytes, if the process may use it on this GPU. Raises DeviceError."""
        place = bisect_right(self._addresses, address) - 1
        block = self.blocks[self._addresses[place]] if place >= 0 else None
        if block is None or address + size > block.address + block.size:
            raise DeviceError(f"{what}: expected memory of the node, found {size} bytes at {address:#x}")
        if process not in block.mapped:
            raise DeviceError(
                f"{what}: expected memory that process {process} has open, found {block.accesses.name}, which"
                f" {'is freed' if not block.mapped else 'it has not opened'}"
            )
        there = block.identity or gpu
        if block.owner == process and there != gpu and (gpu, there) not in self.cudas[process].enabled:
            raise DeviceError(f"{what}: expected enabled peer access from {gpu} to {there}, found that it is not")
        if not self.reaches(gpu, there):
            raise DeviceError(f"{what}: expected peer access from {gpu} to {there}, found none")
        return block

    def add(self, block: Block) -> None:
        """Take up an allocation."""
        self.blocks[block.address] = block
        insort(self._addresses, block.address)


class SteppedCuda(FakeCuda):
    """The CUDA of a process of a node."""

    def __init__(self, node: SteppedNode, process: int) -> None:
        super().__init__((), node.numbers)
        self.node = node
        self.process = process
        self.enabled: set[tuple[str, str]] = set()  # a GPU, and one whose memory it uses
        node.clocks.setdefault(process, {})

    def add(self, gpu: str) -> int:
        """Let the process see a GPU; returns its number."""
        self.gpus.append(gpu)
        self._computing.append(self._make_stream(gpu, "compute stream"))
        return len(self.gpus) - 1

    def reaches(self, gpu: str, other: str) -> bool:
        return self.node.reaches(gpu, other)

    def deviceEnablePeerAccess(self, peer: int) -> None:
        self.enabled.add((self._gpu, self.gpus[peer]))

    # -- memory ------------------------------------------------------------------------------------

    def malloc(self, size: int) -> int:
        return self._make(size, self._gpu, f"memory of process {self.process} on {self._gpu}")

    def hostAlloc(self, size: int, flags: int) -> int:
        return self._make(size, None, f"host memory of process {self.process}")

    def freeHost(self, address: int) -> None:
        """Keep it."""

    def _make(self, size: int, identity: str | None, name: str) -> int:
        array = np.zeros(size + _ALIGNMENT, np.uint8)
        begin = -array.ctypes.data % _ALIGNMENT
        array = array[begin : begin + size]
        block = Block(array.ctypes.data, size, array, self.process, identity, {self.process}, Accesses(name))
        self.node.add(block)
        return block.address

    def memsetAsync(self, address: int, value: int, size: int, stream: int) -> None:
        """Fill memory, at once."""
        self.array(self._device, address, size, "uint8", None)[:] = value

    def array(self, device: int, address: int, length: int, dtype: str, owner: object) -> CupyArray:
        size = length * np.dtype(dtype).itemsize
        block = self.node.find(address, size, self.process, self.gpus[device], "a view")
        return block.array[address - block.address :][:size].view(dtype).view(CupyArray)

    def empty_cache(self) -> None:
        """There is none."""

    def ipcGetMemHandle(self, address: int) -> bytes:
        return _HANDLE.pack(b"stepped", address).ljust(HANDLE_BYTES, b"\0")

    ipcGetEventHandle = ipcGetMemHandle

    def _named(self, handle: bytes) -> int:
        magic, number = _HANDLE.unpack_from(handle)
        if magic.rstrip(b"\0") != b"stepped":
            raise DeviceLostError("expected a handle of this node, found another")
        return int(number)

    def ipcOpenMemHandle(self, handle: bytes, flags: int = 0) -> int:
        block = self.node.blocks.get(self._named(handle))
        if block is None or not block.mapped:
            raise DeviceLostError("expected memory of another process, found none: it has ended, or has freed that memory")
        if self.process in block.mapped:
            raise DeviceError(f"expected memory that process {self.process} has not open, found {block.accesses.name}")
        if block.identity is not None and not self.reaches(self._gpu, block.identity):
            raise DeviceLostError(f"expected peer access from {self._gpu} to {block.identity}, found none")
        block.mapped.add(self.process)
        return block.address

    def free(self, address: int) -> None:
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

    ipcCloseMemHandle = free

    def touch(self, on: SteppedStream, text: str, reads: Iterable[Span], writes: Iterable[Span]) -> None:
        text = f"{text} on {on.name}"
        for is_write, spans in ((False, reads), (True, writes)):
            for address, size in spans:
                if size:
                    block = self.node.find(address, size, self.process, on.gpu, text)
                    block.accesses.add((address - block.address, size), is_write, on.number, on.clock, text)

    # -- streams and events ------------------------------------------------------------------------

    def _make_stream(self, gpu: str, name: str) -> int:
        number = next(self._numbers)
        name = f"{name} {number} of process {self.process}"
        self.node.streams[number] = SteppedStream(number, self.process, gpu, name)
        return number

    def streamCreateWithFlags(self, flags: int) -> int:
        return self._make_stream(self._gpu, "stream")

    def eventCreateWithFlags(self, flags: int) -> int:
        return self._keep(self.node.events, SteppedEvent(self.process))

    def eventDestroy(self, event: int) -> None:
        """Keep it: another process may wait for it."""

    def ipcOpenEventHandle(self, handle: bytes) -> int:
        number = self._named(handle)
        if number not in self.node.events or self.node.events[number].owner == self.process:
            raise DeviceError("expected another process's event to open")
        if (owner := self.node.events[number].owner) in self.node.dead:
            raise DeviceLostError(f"expected process {owner} to live, found that it has ended")
        return number

    def eventRecord(self, event: int, stream: int) -> None:
        made = self.node.events[event]
        if made.owner != self.process:
            raise DeviceError(f"expected an event of process {self.process} to record, found one of process {made.owner}")
        made.made += 1
        self._queue(stream, _Piece({}, "record", event=made, number=made.made, records=True))

    def streamWaitEvent(self, stream: int, event: int) -> None:
        awaited = self.node.events[event]
        self._queue(stream, _Piece({}, "wait", event=awaited, number=awaited.made))

    def queue(self, stream: int, text: str, work: Work) -> None:
        self._queue(stream, _Piece({}, f"{text} on {self.node.streams[stream].name}", work))

    def _queue(self, number: int, piece: _Piece) -> None:
        stream = self.node.streams[number]
        if stream.process != self.process:
            raise DeviceError(f"expected a stream of process {self.process}, found {stream.name}")
        piece.clock = dict(self.node.clocks[self.process])
        stream.work.append(piece)

    def streamSynchronize(self, stream: int) -> None:
        """Wait for a stream. The default stream, 0, has no work."""
        if stream:
            self.node.drain(stream)
            merge(self.node.clocks[self.process], self.node.streams[stream].clock)

    def streamQuery(self, stream: int) -> int:
        """Work that fails raises its error where it runs."""
        return SUCCESS

    def deviceSynchronize(self) -> None:
        for stream in list(self.node.streams.values()):
            if (stream.process, stream.gpu) == (self.process, self._gpu):
                self.streamSynchronize(stream.number)

    def eventSynchronize(self, event: int) -> None:
        awaited = self.node.events[event]
        number = awaited.made
        while awaited.done < number:
            if not self.node.step():
                raise StuckError(f"expected record {number} of an event of process {awaited.owner}, found that it never comes")
        if number:
            merge(self.node.clocks[self.process], awaited.known[number])

    def eventQuery(self, event: int) -> int:
        asked = self.node.events[event]
        if asked.done < asked.made:
            return NOT_READY
        if asked.made:
            merge(self.node.clocks[self.process], asked.known[asked.made])
        return SUCCESS


class SteppedDevice(CudaDevice):
    """A GPU as a process of a node uses it."""

    granularity = 1

    def __init__(self, node: SteppedNode, process: int, identity: str) -> None:
        self.node = node
        self.process = process
        self.api = node.cudas.setdefault(process, node.cuda(process))
        super().__init__(self.api.add(identity), self.api)

    def can_reach(self, identity: str) -> bool:
        return self.node.reaches(self.identity, identity)
