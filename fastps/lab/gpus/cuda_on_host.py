"""A CUDA in host memory, between real processes, on any machine: what a CudaDevice calls.

Memory and events are memfds. Each stream is a thread that runs its work in order, so work that no event orders really runs in
any order. It is harsher than CUDA: work may begin late, completed events may be seen late, freed memory is poisoned and an
access to it is an error, devices may be full, lost or out of reach, and a process can die between any two operations. What CUDA
itself does, only a GPU shows.
"""

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fastps.device.cuda import SUCCESS, CudaDevice
from fastps.device.cuda_errors import MEMORY_ALLOCATION, NOT_READY
from fastps.device.interface import DeviceError
from fastps.kernels.cuda.launch_args import Span
from fastps.lab.gpus.fake_cuda import CupyArray, FakeCuda, UsersKernels, Work
from fastps.lab.gpus.host_streams import HostEvent, HostStream
from fastps.lab.gpus.regions import Region, handle_of, make_region, open_region, release

_POLL_S = 20e-6
_PEER_ACCESS_UNSUPPORTED = 217


class HostCudaError(DeviceError):
    """An error with a code of CUDA's, as CuPy raises it."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Faults:
    """What the devices of a process do that a GPU only may do.

    Attributes:
        seed: of the draws.
        delay_s: the longest delay before a piece of work.
        late_s: the longest time until a completed event is seen.
        unreachable: the devices between which and any other there is no peer access.
        dies_at: the process is killed before this operation of its first device, counted from 1; 0: never.
        lost_at: the first device is lost from this operation on; 0: never.
        status: CUDA's code for that.
        memory: bytes of each device's memory for this process; 0: no limit.
        cached: how many of them a framework keeps until it is told to empty its cache.
    """

    seed: int = 0
    delay_s: float = 0.0
    late_s: float = 0.0
    unreachable: frozenset[str] = frozenset()
    dies_at: int = 0
    lost_at: int = 0
    status: int = 719
    memory: int = 0
    cached: int = 0


class HostCuda(FakeCuda):
    """A CUDA of threads and memfds. `delay_s` delays each piece of work on a stream that
    has a thread. With `computes_at_once` the compute streams run work when it is called, as torch does on the CPU; else they
    queue work, as a GPU does. `compile_rule` compiles a user's rule from the kernels' source; without it there are no users'
    rules.

    >>> device = CudaDevice(0, HostCuda(["00:01.0"]))
    >>> device.identity, device.view(device.allocate(64), 16)[:2].tolist()
    ('00:01.0', [0.0, 0.0])
    >>> device.shut()
    """

    def __init__(
        self,
        gpus: Sequence[str],
        faults: Faults = Faults(),
        delay_s: float = 0.0,
        *,
        computes_at_once: bool = True,
        compile_rule: Callable[[str], UsersKernels] | None = None,
    ) -> None:
        super().__init__(gpus)
        self._compile_rule = compile_rule
        self.streams: dict[int, HostStream] = {}
        self.events: dict[int, HostEvent] = {}
        self._faults, self._cached = faults, faults.cached
        self._delay_s = delay_s
        self._random = random.Random(faults.seed)  # used under the interpreter's lock alone, one call at a time
        self._operations = [itertools.count(1) for _ in gpus]
        self._memory: dict[int, tuple[Region, int]] = {}  # by address: with the number of the device that has it open
        self._pinned: dict[int, npt.NDArray[np.uint8]] = {}
        self._enabled: set[tuple[int, int]] = set()  # a device, and one whose memory it uses
        self._is_ended = self._is_lost = False
        self._computing = [self._make_stream(device, has_thread=not computes_at_once) for device in range(len(gpus))]

    def _operate(self, device: int | None = None) -> None:
        """Count an operation of the host or a stream; die before it if it is the one. Raises HostCudaError if lost."""
        device = self._device if device is None else device
        number = next(self._operations[device])
        if device == 0 and number == self._faults.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if device == 0 and 0 < self._faults.lost_at <= number and not self._is_ended:
            self._is_lost = True
            raise HostCudaError(self._faults.status, f"operation {self._faults.lost_at} failed")

    # -- devices -----------------------------------------------------------------------------------

    def reaches(self, gpu: str, other: str) -> bool:
        return gpu == other or not {gpu, other} & self._faults.unreachable

    def deviceEnablePeerAccess(self, peer: int) -> None:
        self._operate()
        if not self.deviceCanAccessPeer(self._device, peer):
            raise HostCudaError(_PEER_ACCESS_UNSUPPORTED, "cudaErrorPeerAccessUnsupported")
        self._enabled.add((self._device, peer))

    def deviceSynchronize(self) -> None:
        for stream in list(self.streams.values()):
            if stream.device == self._device:
                stream.finish()

    def memGetInfo(self) -> tuple[int, int]:
        used = sum(region.size for region, _ in self._memory.values() if region.identity == self._gpu)
        return max(0, self._faults.memory - used - self._cached), self._faults.memory

    def empty_cache(self) -> None:
        self._cached = 0

    # -- memory ------------------------------------------------------------------------------------

    def _open(self, region: Region) -> int:
        self._memory[region.address] = region, self._device
        return region.address

    def malloc(self, size: int) -> int:
        self._operate()
        if self._faults.memory and size > self.memGetInfo()[0]:
            raise HostCudaError(MEMORY_ALLOCATION, "cudaErrorMemoryAllocation: out of memory")
        return self._open(make_region(size, self._gpu))

    def free(self, address: int) -> None:
        """Free or unmap memory. Views that still live see poison."""
        if not self._is_lost:
            self._operate()
        if address not in self._memory:
            raise DeviceError(f"expected memory of this device to close, found {address:#x}, which is not open")
        release(self._memory.pop(address)[0])

    ipcCloseMemHandle = free

    def memsetAsync(self, address: int, value: int, size: int, stream: int) -> None:
        """Fill memory, at once."""
        self.array(self._device, address, size, "uint8", None)[:] = value

    def ipcGetMemHandle(self, address: int) -> bytes:
        self._operate()
        return handle_of(self._memory[address][0])

    def ipcOpenMemHandle(self, handle: bytes, flags: int) -> int:
        return self._open(self._opened(handle))

    def _opened(self, handle: bytes) -> Region:
        """The memory or event of a handle. CUDA refuses both between GPUs without peer access."""
        self._operate()
        region, gpu = open_region(handle), self._gpu
        if not self.reaches(gpu, region.identity):
            release(region)
            raise HostCudaError(_PEER_ACCESS_UNSUPPORTED, f"expected peer access from {gpu} to {region.identity}, found none")
        return region

    def hostAlloc(self, size: int, flags: int) -> int:
        memory = np.zeros(size, np.uint8)
        self._pinned[memory.ctypes.data] = memory
        return int(memory.ctypes.data)

    def freeHost(self, address: int) -> None:
        """Keep it until the end: work that is queued may use it."""

    def array(self, device: int, address: int, length: int, dtype: str, owner: object) -> CupyArray:
        size = length * np.dtype(dtype).itemsize
        for region, _ in list(self._memory.values()):
            if region.holds(address, size):
                return np.frombuffer(region.memory, dtype, length, address - region.address).view(CupyArray)
        for begin, memory in self._pinned.items():
            if 0 <= address - begin <= memory.nbytes - size:
                return memory[address - begin :][:size].view(dtype).view(CupyArray)
        raise DeviceError(f"expected memory of this device, found {size} bytes at {address:#x}")

    def touch(self, on: HostStream, text: str, reads: Iterable[Span], writes: Iterable[Span]) -> None:
        device = on.device
        for address, size in (*reads, *writes):
            regions = (each for each, by in list(self._memory.values()) if by == device or (device, by) in self._enabled)
            if not size or any(region.holds(address, size) for region in regions):
                continue
            if not any(0 <= address - begin <= memory.nbytes - size for begin, memory in list(self._pinned.items())):
                raise DeviceError(
                    f"expected work on memory that is open on {self.gpus[device]}, found {size} bytes at {address:#x}:"
                    " they were freed, unmapped, or never opened"
                )

    # -- streams and events ------------------------------------------------------------------------

    def _make_stream(self, device: int, *, has_thread: bool = True) -> int:
        stream = HostStream(device)
        if has_thread:
            stream.thread = threading.Thread(target=stream.run, daemon=True)
            stream.thread.start()
        return self._keep(self.streams, stream)

    def streamCreateWithFlags(self, flags: int) -> int:
        return self._make_stream(self._device)

    def streamDestroy(self, stream: int) -> None:
        """Wait for a stream's work, and end it. Failed work is nothing to the caller, as in CUDA."""
        self.streams.pop(stream).end()

    def streamSynchronize(self, stream: int) -> None:
        """Wait for a stream. The default stream, 0, has no work."""
        if stream:
            self.streams[stream].finish()

    def streamQuery(self, stream: int) -> int:
        """The code of a stream's work: 0 without a failure, whether it is done or not. Failures without a code are raised."""
        failure = self.streams[stream].failure
        if isinstance(failure, HostCudaError):
            return failure.status
        self.streams[stream].check()
        return SUCCESS

    def _event(self, region: Region) -> int:
        return self._keep(self.events, HostEvent(region, np.frombuffer(region.memory, np.int64, 3)))

    def eventCreateWithFlags(self, flags: int) -> int:
        self._operate()
        return self._event(make_region(24, self._gpu))

    def eventDestroy(self, event: int) -> None:
        self._operate()
        release(self.events.pop(event).region)

    def ipcGetEventHandle(self, event: int) -> bytes:
        self._operate()
        return handle_of(self.events[event].region)

    def ipcOpenEventHandle(self, handle: bytes) -> int:
        return self._event(self._opened(handle))

    def eventRecord(self, event: int, stream: int) -> None:
        self._operate()
        recorded = self.events[event]
        if recorded.region.pidfd >= 0:
            raise DeviceError("expected an event of this process to record, found another process's")
        recorded.words[0] += 1
        number = int(recorded.words[0])

        def done() -> None:
            recorded.words[1] = number

        self.streams[stream].do(done, recorded)

    def streamWaitEvent(self, stream: int, event: int) -> None:
        self._operate()
        awaited = self.events[event]
        number = int(awaited.words[0])
        self.streams[stream].do(lambda: self._await(awaited, number))

    def eventSynchronize(self, event: int) -> None:
        """Wait for an event. Raises the error of a stream that has failed."""
        self._operate()
        try:
            self._await(self.events[event], int(self.events[event].words[0]))
        except DeviceError:
            self._check_streams()
            raise

    def eventQuery(self, event: int) -> int:
        self._check_streams()
        made, done, _ = self.events[event].words.tolist()
        if done < made:
            return NOT_READY
        self._be_late()
        return SUCCESS

    def _check_streams(self) -> None:
        for stream in list(self.streams.values()):
            stream.check()

    def _be_late(self) -> None:
        if self._faults.late_s:
            time.sleep(self._random.uniform(0, self._faults.late_s))

    def _await(self, event: HostEvent, number: int) -> None:
        """Wait until the record of that number is done: for ever, as in CUDA, if its process has died or its work failed.

        Raises DeviceError if this process's own work has failed, or if this device is shut meanwhile.
        """
        while int(event.words[1]) < number:
            if self._is_ended:
                raise DeviceError("expected a device in use, found it shut")
            if event.region.pidfd < 0:
                self._check_streams()
                if event.words[2]:
                    raise DeviceError("expected work on a device to come to its end, found that it has failed")
            time.sleep(_POLL_S)
        self._be_late()

    # -- work --------------------------------------------------------------------------------------

    def queue(self, stream: int, text: str, work: Work) -> None:
        self._operate()
        queued = self.streams[stream]
        delay_s = self._delay_s if queued.thread is not None else 0.0

        def piece() -> None:
            self._operate(queued.device)
            drawn_s = self._random.uniform(0, self._faults.delay_s) if self._faults.delay_s else 0.0
            if delay_s + drawn_s:
                time.sleep(delay_s + drawn_s)
            work(queued)

        queued.do(piece)

    def end(self) -> None:
        """Release everything at once. Work that is under way ends; none of what is queued runs."""
        self._is_ended = True
        for stream in self.streams.values():
            stream.failure = stream.failure or DeviceError("the device is shut")
            stream.end()
        for event in self.events.values():
            release(event.region, poisons=False)  # another process may be about to wait for it
        for region, _ in self._memory.values():
            release(region)
        for things in (self.streams, self.events, self._memory):
            things.clear()


class HostDevice(CudaDevice):
    """A GPU of a HostCuda, of its own unless `api` is given; `options` are HostCuda's.

    It reaches devices that its process does not see, and `shut` ends at once what waits for other processes.

    >>> device = HostDevice("host")
    >>> device.view(device.allocate(64), 16)[:2].tolist()
    [0.0, 0.0]
    >>> device.shut()
    """

    granularity = 1  # because to fill and to poison 2 MiB takes long where a test makes many small allocations

    def __init__(self, identity: str, delay_s: float = 0.0, *, api: HostCuda | None = None, **options: Any) -> None:
        self.api = HostCuda([identity], delay_s=delay_s, **options) if api is None else api
        super().__init__(self.api.gpus.index(identity), self.api)

    def can_reach(self, identity: str) -> bool:
        return self.api.reaches(self.identity, identity)

    def shut(self, *, waits: bool = True) -> None:
        self.api.end()


def host_devices(identities: Sequence[str], delay_s: float = 0.0, faults: Faults = Faults()) -> list[HostDevice]:
    """The devices of one process, such as a server."""
    api = HostCuda(identities, faults, delay_s)
    return [HostDevice(identity, api=api) for identity in identities]
