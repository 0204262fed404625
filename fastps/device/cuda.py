"""A GPU as fastps uses it: one or two calls of the CUDA runtime per method, through CuPy.

Memory comes from cudaMalloc, never from a pool, because a CUDA IPC handle names a whole allocation; sizes are multiples of
2 MiB, because CUDA shares the whole block of a smaller one. Events are created for sharing between processes. Without a GPU the
error is a single sentence.

Written against CuPy 14. All calls go through a `CupyCuda`, or what simulates CUDA in host memory in its place.
docs/how-to/gpu.md lists the parts that have run on a GPU.
"""

import contextlib
import ctypes
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from fastps.device.cuda_errors import NOT_READY, NamedRuntime, of_status
from fastps.device.interface import HANDLE_BYTES, DeviceError, DeviceFailedError, DeviceLostError, DeviceMemoryError
from fastps.device.same_gpu import each_entry_apart
from fastps.kernels.cuda import runtime as cuda
from fastps.kernels.cuda.launch_args import Launch
from fastps.system.cache import kept

logger = logging.getLogger("fastps.device")

# Flags of the CUDA runtime, by their documented values; not every version of CuPy names all of them.
EVENT_DISABLE_TIMING = 2  # cudaEventDisableTiming: required for a shared event
EVENT_INTERPROCESS = 4  # cudaEventInterprocess
IPC_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess: opening a handle enables peer access
STREAM_NON_BLOCKING = 1  # cudaStreamNonBlocking
COPY_DEFAULT = 4  # cudaMemcpyDefault: the addresses determine the direction
HOST_ALLOC_PORTABLE = 1  # cudaHostAllocPortable
SUCCESS = 0  # cudaSuccess
SHARED_BYTES = 1 << 21  # the runtime's advice for memory that is shared between processes


class CupyCuda:
    """What a CudaDevice calls: CUDA through CuPy, and torch's streams. Raises DeviceError without CuPy or a GPU."""

    def __init__(self) -> None:
        try:
            self._cupy = cuda.load_cupy()
        except cuda.CudaUnavailableError as error:
            raise DeviceError(str(error)) from error
        self.runtime = self._cupy.cuda.runtime  # CUDA's functions, named and called as there
        self._users = ""

    def identity(self, device: int) -> str:
        """A name of a device, the same in every process, and of no other device: its UUID.

        Parts of a GPU (MIG) share its PCI address, and CuPy's copy of a UUID ends at its first zero byte.
        """
        import torch

        return str(torch.cuda.get_device_properties(device).uuid)

    def empty_cache(self) -> None:
        """Give back the memory of devices that torch keeps without need."""
        import torch

        torch.cuda.empty_cache()

    def prepare(self, device: int, kernels: Sequence[str], users: str) -> None:
        """Compile and load kernels; machine code is kept in the cache folder. `users`: the text of the rule RULE_USER."""
        self._users = users or self._users
        try:
            for name in kernels:
                cuda.kernel(device, name, self._users, compiled)
        except RuntimeError as error:
            what = "a cuda= that compiles" if users else "the kernels to compile"
            raise DeviceError(f"expected {what}, found that they do not: {error}; {cuda.ADVICE}") from error

    def launch(self, device: int, kernel: str, launch: Launch, stream: int) -> None:
        """Launch a kernel on a stream of the device, which is the calling thread's. The argument is copied."""
        cuda.kernel(device, kernel, self._users, compiled)(stream, launch)

    def array(self, device: int, address: int, length: int, dtype: str, owner: object) -> Any:
        """A CuPy array over memory that it does not own."""
        cupy = self._cupy
        with cupy.cuda.Device(device):
            memory = cupy.cuda.UnownedMemory(address, length * np.dtype(dtype).itemsize, owner, device)
            return cupy.ndarray((length,), dtype, cupy.cuda.MemoryPointer(memory, 0))

    def compute_stream(self, device: int) -> int:
        """The stream on which the caller computes: torch's current one on this GPU."""
        import torch

        return int(torch.cuda.current_stream(device).cuda_stream)


def compiled(architecture: str, text: str) -> bytes:
    """The machine code of a source, from the cache folder if it was compiled before."""
    return kept(f"kernels/{cuda.key_of(architecture, text)}.cubin", partial(cuda.compile_with_nvrtc, architecture, text))


@contextlib.contextmanager
def _refusal(kind: type[DeviceError], expected: str, cure: str = "") -> Iterator[None]:
    """Raise an error of this kind for what CUDA refuses inside. A device that is lost stays that."""
    try:
        yield
    except DeviceFailedError:
        raise
    except DeviceError as error:
        raise kind(f"expected {expected}, found that CUDA refuses ({error}){cure}") from error


class CudaDevice:
    """One GPU as one process uses it. Sizes are in bytes, and addresses count bytes. Not thread-safe.

    Work is queued on a stream and runs in the stream's order. Only the process that made an event records it on a stream. Any
    process can make its stream wait for an event; the stream then waits for the last record before that call. Folds, pulls and
    reads of optimizer state are the only such waits. A device knows no shards and no workers.

    `index` counts the GPUs that CUDA_VISIBLE_DEVICES shows to this process. `api`: what to call; by default CUDA through CuPy.
    Raises DeviceError if there is no such GPU, or no CuPy.
    """

    granularity = SHARED_BYTES  # every allocation is a multiple of it

    def __init__(self, index: int = 0, api: Any = None) -> None:
        self._cuda: CupyCuda = each_entry_apart(CupyCuda()) if api is None else api
        self._runtime = NamedRuntime(self._cuda.runtime, f"GPU {index}")
        self.index = index
        if not 0 <= index < self._runtime.getDeviceCount():
            raise DeviceError(
                f"expected a GPU of 0 to {self._runtime.getDeviceCount() - 1}, found {index}: check CUDA_VISIBLE_DEVICES"
            )
        self._runtime.setDevice(index)
        self.identity: str = self._cuda.identity(index)  # the same in every process
        self._runtime = NamedRuntime(self._cuda.runtime, f"GPU {index} ({self._runtime.deviceGetPCIBusId(index)})")
        self._launch = self._runtime.checked(self._cuda.launch, "launch")
        self._owned: dict[int, int] = {}  # address to size
        self._streams: list[int] = []
        self._opened: set[int] = set()
        self._pinned: set[int] = set()

    def _use(self) -> Any:
        """The runtime, with this device set as the calling thread's current device."""
        self._runtime.setDevice(self.index)
        return self._runtime

    def can_reach(self, identity: str) -> bool:
        """Whether this device has peer access to that one. It reaches itself, and no GPU that this process does not see."""
        runtime = self._use()
        for index in range(runtime.getDeviceCount()):
            if self._cuda.identity(index) == identity:
                return index == self.index or bool(runtime.deviceCanAccessPeer(self.index, index))
        return False

    def allocate(self, size: int) -> int:
        """Allocate zeroed memory, aligned to 256 bytes; returns its address. Raises DeviceMemoryError."""
        runtime = self._use()
        size = -(-size // self.granularity) * self.granularity
        try:
            address = int(runtime.malloc(size))
        except DeviceMemoryError:  # torch keeps what tensors have freed
            self._cuda.empty_cache()
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
        cure = ": it has ended, or the GPUs have no peer access; FASTPS_PLACEMENT=host needs none"
        with _refusal(DeviceLostError, f"another process's memory to open on GPU {self.index}", cure):
            address = int(self._use().ipcOpenMemHandle(handle[:HANDLE_BYTES], IPC_LAZY_PEER_ACCESS))
        self._opened.add(address)
        return address

    def borrow(self, other: "CudaDevice") -> None:
        """Let this device's work use the memory of another device of this process, to which it has peer access."""
        if other.index == self.index:
            return
        access = f"peer access from GPU {self.index} to GPU {other.index}"
        with _refusal(DeviceError, access, ": FASTPS_PLACEMENT=host needs none"):
            self._use().deviceEnablePeerAccess(other.index)

    def close(self, address: int) -> None:
        """Free an allocation or host memory, or unmap an opened one. Other processes must close it before it is freed."""
        runtime = self._use()
        if address in self._pinned:
            self._pinned.discard(address)
            runtime.freeHost(address)
        elif address in self._opened:
            self._opened.discard(address)
            runtime.ipcCloseMemHandle(address)
        else:
            self._owned.pop(address, None)  # CUDA refuses what is not open
            runtime.free(address)

    def host_memory(self, size: int) -> npt.NDArray[np.uint8]:
        """Page-locked host memory, so that asynchronous copies really are asynchronous. It lives until `close` or `shut`."""
        address = int(self._use().hostAlloc(max(size, 1), HOST_ALLOC_PORTABLE))
        self._pinned.add(address)
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        memory[:] = 0
        return memory

    def view(self, address: int, length: int, dtype: str = "float32") -> Any:
        """Memory as an array of a NumPy dtype that does not own it (CuPy's), in a form that torch.from_dlpack takes."""
        return self._cuda.array(self.index, address, length, dtype, self)

    def compute_stream(self) -> int:
        """The stream on which this process computes now: torch's current stream on this GPU."""
        return self._cuda.compute_stream(self.index)

    def make_stream(self) -> int:
        """Make a new stream, which does not wait for the default stream."""
        self._streams.append(int(self._use().streamCreateWithFlags(STREAM_NON_BLOCKING)))
        return self._streams[-1]

    def make_event(self) -> int:
        """Make an event, which only this process may record and other processes may open."""
        return int(self._use().eventCreateWithFlags(EVENT_DISABLE_TIMING | EVENT_INTERPROCESS))

    def export_event(self, event: int) -> bytes:
        """The handle of an event, HANDLE_BYTES long."""
        return bytes(self._use().ipcGetEventHandle(event))

    def open_event(self, handle: bytes) -> int:
        """Open another process's event, to wait for it. Raises DeviceLostError for a stale handle."""
        with _refusal(DeviceLostError, "another process's event to open"):
            return int(self._use().ipcOpenEventHandle(handle[:HANDLE_BYTES]))

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

    def copy(self, to: int, source: int, size: int, stream: int) -> None:
        """Queue a copy between any two of: this device, a device that it can reach, memory from host_memory."""
        self._use().memcpyAsync(to, source, size, COPY_DEFAULT, stream)

    def launch(self, kernel: str, launch: Launch, stream: int) -> None:
        """Queue a launch of a kernel, by its name. CUDA copies the argument before this returns."""
        self._use()
        self._launch(self.index, kernel, launch, stream)

    def prepare(self, *kernels: str, users: str = "") -> None:
        """Compile and load kernels, so that no launch does; `users` is the text of a user's rule. Raises DeviceError."""
        self._use()
        self._cuda.prepare(self.index, kernels, users)

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
        # The process's end destroys the events: another process may be about to wait for one, which CUDA leaves undefined.
        for address in [*self._opened, *self._owned, *self._pinned]:
            self.close(address)
        for stream in self._streams:
            runtime.streamDestroy(stream)
        self._streams.clear()
