"""A GPU as fastps uses it: one or two calls of the CUDA runtime per method, through CuPy.

Memory comes from cudaMalloc, never from a pool, because a CUDA IPC handle names a whole allocation; sizes are multiples of
2 MiB, because CUDA shares the whole block of a smaller one. Events are created for sharing between processes. Without a GPU the
error is a single sentence.

Written against CuPy 13 and 14 (the same names in cupy.cuda.runtime). All calls go through a `Cuda`, which can be one that
simulates CUDA in host memory. docs/how-to/gpu.md lists the parts that have run on a GPU.
"""

import ctypes
import logging
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fastps.device.cuda_errors import NOT_READY, NamedRuntime, of_status
from fastps.device.interface import HANDLE_BYTES, DeviceError, DeviceFailedError, DeviceLostError
from fastps.device.regions import Region, handle_of, make_region, open_region, release
from fastps.kernels.cuda import runtime as cuda
from fastps.kernels.update.fold import RULE_USER

logger = logging.getLogger("fastps.device")

# Flags of the CUDA runtime, by their documented values; not every version of CuPy names all of them.
EVENT_DISABLE_TIMING = 2  # cudaEventDisableTiming: required for a shared event
EVENT_INTERPROCESS = 4  # cudaEventInterprocess
IPC_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess: opening a handle enables peer access
STREAM_NON_BLOCKING = 1  # cudaStreamNonBlocking
COPY_DEFAULT = 4  # cudaMemcpyDefault: the addresses determine the direction
HOST_ALLOC_PORTABLE = 1  # cudaHostAllocPortable
HOST_REGISTER_SHARED = 3  # cudaHostRegisterPortable and cudaHostRegisterMapped: kernels read and write it, too
SUCCESS = 0  # cudaSuccess
CAPTURE_THREAD_LOCAL = 1  # cudaStreamCaptureModeThreadLocal: calls that a capture forbids are errors in its thread alone
SHARED_BYTES = 1 << 21  # the runtime's advice for memory that is shared between processes


class Cuda(Protocol):
    """What a CudaDevice calls.

    Attributes:
        runtime: the functions of the CUDA runtime, named and called as in cupy.cuda.runtime.
    """

    @property
    def runtime(self) -> Any:
        """See above."""
        ...

    def launch_fold(self, device: int, rule: int, dtype: str, order: int, tiles: int, blocks: int, stream: int) -> None:
        """Launch the fold's kernel on a stream of the device, which is the calling thread's."""
        ...

    def use_rule(self, device: int, text: str) -> None:
        """Compile a user's rule for a device; `launch_fold` then runs it for RULE_USER. Raises DeviceError."""
        ...

    def launch_check(self, device: int, dtype: str, args: int, tiles: int, blocks: int, stream: int) -> None:
        """Launch the kernel that checks a slot, as `launch_fold`."""
        ...

    def array(self, device: int, address: int, length: int, dtype: str, owner: object) -> Any:
        """An array over memory that it does not own."""
        ...

    def compute_stream(self, device: int) -> int:
        """The stream on which the caller computes."""
        ...


class CupyCuda:
    """CUDA through CuPy, and torch's streams. Raises DeviceError without CuPy or a GPU."""

    def __init__(self) -> None:
        try:
            self._cupy = cuda.load_cupy()
        except cuda.CudaUnavailableError as error:
            raise DeviceError(str(error)) from error
        self.runtime = self._cupy.cuda.runtime
        self._users = ""

    def use_rule(self, device: int, text: str) -> None:
        """See Cuda."""
        try:
            cuda.fold_kernel(device, RULE_USER, "float32", text)
        except self._cupy.cuda.compiler.CompileException as error:
            raise DeviceError(f"expected a cuda= that compiles, found that NVRTC refuses it: {error}") from error
        self._users = text

    def launch_fold(self, device: int, rule: int, dtype: str, order: int, tiles: int, blocks: int, stream: int) -> None:
        """See Cuda."""
        cuda.fold_kernel(device, rule, dtype, self._users)(self._cupy.cuda.ExternalStream(stream, device), order, tiles, blocks)

    def launch_check(self, device: int, dtype: str, args: int, tiles: int, blocks: int, stream: int) -> None:
        """See Cuda."""
        cuda.check_kernel(device, dtype)(self._cupy.cuda.ExternalStream(stream, device), args, tiles, blocks)

    def array(self, device: int, address: int, length: int, dtype: str, owner: object) -> Any:
        """See Cuda. Returns a CuPy array."""
        cupy = self._cupy
        with cupy.cuda.Device(device):
            memory = cupy.cuda.UnownedMemory(address, length * np.dtype(dtype).itemsize, owner, device)
            return cupy.ndarray((length,), dtype, cupy.cuda.MemoryPointer(memory, 0))

    def compute_stream(self, device: int) -> int:
        """See Cuda. Returns torch's current stream on this GPU."""
        import torch

        return int(torch.cuda.current_stream(device).cuda_stream)


class CudaDevice:
    """One GPU as one process uses it. Sizes are in bytes, and addresses count bytes. Not thread-safe.

    Work is queued on a stream and runs in the stream's order. Only the process that made an event records it on a stream. Any
    process can make its stream wait for an event; the stream then waits for the last record before that call. Folds, pulls and
    reads of optimizer state are the only such waits. A device knows no shards and no workers.

    `index` counts the GPUs that CUDA_VISIBLE_DEVICES shows to this process. `api`: what to call; by default CUDA through CuPy.
    Raises DeviceError if there is no such GPU, or no CuPy.

    Attributes:
        identity: a name of the device, the same in every process.
    """

    granularity = SHARED_BYTES  # every allocation is a multiple of it

    def __init__(self, index: int = 0, api: Cuda | None = None) -> None:
        self._cuda = CupyCuda() if api is None else api
        self._runtime = NamedRuntime(self._cuda.runtime, f"GPU {index}")
        self.index = index
        if not 0 <= index < self._runtime.getDeviceCount():
            raise DeviceError(
                f"expected a GPU of 0 to {self._runtime.getDeviceCount() - 1}, found {index}: check CUDA_VISIBLE_DEVICES"
            )
        self._runtime.setDevice(index)
        self.identity = str(self._runtime.deviceGetPCIBusId(index))
        self._runtime = NamedRuntime(self._cuda.runtime, f"GPU {index} ({self.identity})")
        self._launch = self._runtime.checked(self._cuda.launch_fold, "launch_fold")
        self._owned: dict[int, int] = {}  # address to size
        self._shared: dict[int, Region] = {}  # host memory that processes share
        self._streams: list[int] = []
        self._opened: set[int] = set()
        self._pinned: list[int] = []
        self._peers: set[int] = set()  # to which peer access is enabled
        self._graphs: list[int] = []

    def _use(self) -> Any:
        """The runtime, with this device set as the calling thread's current device."""
        self._runtime.setDevice(self.index)
        return self._runtime

    @property
    def reaches_all(self) -> bool:
        """Whether this device has peer access to every other device that this process sees."""
        runtime = self._use()
        others = [index for index in range(runtime.getDeviceCount()) if index != self.index]
        return all(runtime.deviceCanAccessPeer(self.index, other) for other in others)

    def can_reach(self, identity: str) -> bool:
        """Whether this device has peer access to that one. It reaches itself, and no GPU that this process does not see."""
        runtime = self._use()
        for index in range(runtime.getDeviceCount()):
            if str(runtime.deviceGetPCIBusId(index)) == identity:
                return index == self.index or bool(runtime.deviceCanAccessPeer(self.index, index))
        return False

    # -- memory ------------------------------------------------------------------------------------

    def allocate(self, size: int) -> int:
        """Allocate zeroed memory, aligned to 256 bytes; returns its address. Raises DeviceMemoryError."""
        runtime = self._use()
        size = -(-size // self.granularity) * self.granularity
        address = int(runtime.malloc(size))
        runtime.memsetAsync(address, 0, size, 0)
        runtime.streamSynchronize(0)
        self._owned[address] = size
        return address

    def export(self, address: int) -> bytes:
        """The handle of an allocation, HANDLE_BYTES long. Other processes of this machine open the allocation by it."""
        return bytes(self._use().ipcGetMemHandle(address))

    def open(self, handle: bytes) -> int:
        """Map another process's allocation; returns its address in this process.

        Raises DeviceLostError for a stale handle, in the process that exported it, and between GPUs without peer access.
        """
        try:
            address = int(self._use().ipcOpenMemHandle(handle[:HANDLE_BYTES], IPC_LAZY_PEER_ACCESS))
        except DeviceError as error:
            if isinstance(error, DeviceFailedError):
                raise
            raise DeviceLostError(
                f"expected another process's memory to open on GPU {self.index}, found that CUDA refuses ({error}): it"
                " has ended, or the GPUs have no peer access; FASTPS_PLACEMENT=host needs none"
            ) from error
        self._opened.add(address)
        return address

    def borrow(self, other: "CudaDevice", address: int) -> None:
        """Let this device's work use an allocation of another device of this process, to which it has peer access.

        Memory from allocate_host is open to every GPU of the process.
        """
        if address in other._shared or other.index == self.index or other.index in self._peers:
            return
        try:
            self._use().deviceEnablePeerAccess(other.index)
        except DeviceError as error:
            if isinstance(error, DeviceFailedError):
                raise
            raise DeviceError(
                f"expected peer access from GPU {self.index} to GPU {other.index}, found that CUDA refuses ({error}):"
                " FASTPS_PLACEMENT=host needs none"
            ) from error
        self._peers.add(other.index)

    def allocate_host(self, size: int) -> int:
        """Allocate zeroed, pinned host memory that other processes can open, and that copies and folds of every device use."""
        return self._share(make_region(size, "host memory"))

    def export_host(self, address: int) -> bytes:
        """The handle of an allocation from allocate_host, HANDLE_BYTES long."""
        return handle_of(self._shared[address])

    def open_host(self, handle: bytes) -> int:
        """Map another process's memory from allocate_host. Raises DeviceLostError for a stale handle."""
        return self._share(open_region(handle))

    def _share(self, region: Region) -> int:
        """Page-lock shared host memory. Kernels use the host's address: CUDA's addresses are unified on every 64-bit Linux."""
        try:
            self._use().hostRegister(region.address, region.size, HOST_REGISTER_SHARED)
        except DeviceError as error:
            if isinstance(error, DeviceFailedError):
                raise
            release(region)
            raise DeviceError(
                f"expected to page-lock {region.size:,} bytes of host memory, found that CUDA refuses ({error}): raise"
                " RLIMIT_MEMLOCK, or use FASTPS_PLACEMENT=host"
            ) from error
        self._shared[region.address] = region
        return region.address

    def close(self, address: int) -> None:
        """Free an allocation, or unmap an opened one. All processes that opened it must close it before it is freed."""
        runtime = self._use()
        if address in self._shared:
            runtime.hostUnregister(address)
            release(self._shared.pop(address))
        elif address in self._opened:
            self._opened.discard(address)
            runtime.ipcCloseMemHandle(address)
        else:
            self._owned.pop(address, None)  # CUDA refuses what is not open
            runtime.free(address)

    def host_memory(self, size: int) -> npt.NDArray[np.uint8]:
        """Page-locked host memory, so that asynchronous copies really are asynchronous. It lives as long as the device."""
        address = int(self._use().hostAlloc(max(size, 1), HOST_ALLOC_PORTABLE))
        self._pinned.append(address)
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        memory[:] = 0
        return memory

    def view(self, address: int, length: int, dtype: str = "float32") -> Any:
        """Memory as an array of a NumPy dtype that does not own it (CuPy's), in a form that torch.from_dlpack takes."""
        return self._cuda.array(self.index, address, length, dtype, self)

    # -- streams and events ------------------------------------------------------------------------

    def compute_stream(self) -> int:
        """The stream on which this process computes now: torch's current stream on this GPU."""
        return self._cuda.compute_stream(self.index)

    def make_stream(self) -> int:
        """Make a new stream, which does not wait for the default stream."""
        self._streams.append(int(self._use().streamCreateWithFlags(STREAM_NON_BLOCKING)))
        return self._streams[-1]

    def make_event(self) -> int:
        """Make an event, which only this process may record and other processes may open."""
        event = int(self._use().eventCreateWithFlags(EVENT_DISABLE_TIMING | EVENT_INTERPROCESS))
        return event

    def export_event(self, event: int) -> bytes:
        """The handle of an event, HANDLE_BYTES long."""
        return bytes(self._use().ipcGetEventHandle(event))

    def open_event(self, handle: bytes) -> int:
        """Open another process's event, to wait for it. Raises DeviceLostError for a stale handle."""
        try:
            event = int(self._use().ipcOpenEventHandle(handle[:HANDLE_BYTES]))
        except DeviceError as error:
            if isinstance(error, DeviceFailedError):
                raise
            raise DeviceLostError(f"expected another process's event to open, found that CUDA refuses ({error})") from error
        return event

    def close_event(self, event: int) -> None:
        """Release an event that this process made or opened."""
        self._use().eventDestroy(event)

    def record(self, event: int, stream: int) -> None:
        """Record the event behind all work that the stream has been given."""
        self._use().eventRecord(event, stream)

    def wait(self, event: int, stream: int) -> None:
        """Make later work on the stream wait for the event's last record; an event without a record delays nothing."""
        self._use().streamWaitEvent(stream, event)

    def synchronize(self, stream: int) -> None:
        """Block the host until all work on the stream is done. Raises DeviceError if some of it failed."""
        self._use().streamSynchronize(stream)

    def check(self, stream: int) -> None:
        """Raise DeviceError if work on the stream has failed. Does not wait for work."""
        status = int(self._use().streamQuery(stream))  # CuPy returns the code of this call, and raises nothing
        if status not in (SUCCESS, NOT_READY):
            raise of_status(status, self._runtime.gpu, "streamQuery")

    def synchronize_all(self) -> None:
        """Block the host until all work that this process has queued on any stream is done."""
        self._use().deviceSynchronize()

    def synchronize_event(self, event: int) -> None:
        """Block the host until the last record of one of this process's events is done."""
        self._use().eventSynchronize(event)

    def is_done(self, event: int) -> bool:
        """Whether the last record of one of this process's events is done. Raises DeviceError if work before it failed."""
        status = int(self._use().eventQuery(event))
        if status not in (SUCCESS, NOT_READY):
            raise of_status(status, self._runtime.gpu, "eventQuery")
        return status == SUCCESS

    # -- work --------------------------------------------------------------------------------------

    def copy(self, to: int, source: int, size: int, stream: int) -> None:
        """Queue a copy between any two of: this device, a device that it can reach, memory from host_memory."""
        self._use().memcpyAsync(to, source, size, COPY_DEFAULT, stream)

    def launch_fold(self, rule: int, dtype: str, order: int, tiles: int, blocks: int, stream: int) -> None:
        """Queue the kernel for a rule and a gradient dtype.

        order, tiles: addresses on the device of a work item and of a table of tiles; blocks: the number of tiles.
        """
        self._use()
        if blocks:
            self._launch(self.index, rule, dtype, order, tiles, blocks, stream)

    def use_rule(self, text: str) -> None:
        """Compile a user's rule, the text that the kernels include. Folds of RULE_USER then run it.

        Raises DeviceError if the compiler refuses it.
        """
        self._use()
        self._cuda.use_rule(self.index, text)

    def launch_check(self, dtype: str, args: int, tiles: int, blocks: int, stream: int) -> None:
        """Queue the kernel that looks for non-finite values in a slot of gradients of a dtype.

        args, tiles: addresses on the device of a check's arguments and of a table of tiles; blocks: the number of tiles.
        """
        self._use()
        if blocks:
            self._cuda.launch_check(self.index, dtype, args, tiles, blocks, stream)

    def begin_capture(self, stream: int) -> None:
        """Take copies and folds that are queued on the stream from now on into a graph, instead of running them.

        Until `end_capture` this thread may ask nothing else of the device. Other threads are not restricted.
        """
        self._use().streamBeginCapture(stream, CAPTURE_THREAD_LOCAL)

    def end_capture(self, stream: int) -> int:
        """End a capture; returns the graph."""
        runtime = self._use()
        graph = runtime.streamEndCapture(stream)
        self._graphs.append(int(runtime.graphInstantiate(graph)))
        runtime.graphDestroy(graph)
        return self._graphs[-1]

    def launch(self, graph: int, stream: int) -> None:
        """Queue the work of a graph."""
        self._use().graphLaunch(graph, stream)

    def shut(self, *, waits: bool = True) -> None:
        """Release everything that is left. The device must not be used afterwards.

        Other processes must have closed this process's memory before. Work that has failed is logged. Without `waits` queued
        work may never have run: it may wait for a process that waits for this one, or has failed. Everything then stays until
        the process ends, because CUDA frees nothing that queued work may still use.
        """
        if not waits:
            return
        runtime = self._use()
        try:
            runtime.deviceSynchronize()
        except DeviceError as error:  # after a death of another worker, which is what its caller reports
            logger.warning("work on GPU %d had failed when the device was shut: %s", self.index, str(error))
        for graph in self._graphs:
            runtime.graphExecDestroy(graph)
        self._graphs.clear()
        # The process's end destroys the events: another process may be about to wait for one, which CUDA leaves undefined.
        for address in [*self._opened, *self._owned, *self._shared]:
            self.close(address)
        for stream in self._streams:
            runtime.streamDestroy(stream)
        self._streams.clear()
        for address in self._pinned:
            runtime.freeHost(address)
        self._pinned.clear()
