"""A GPU as fastps uses it: one or two calls of the CUDA runtime per method, through CuPy.

Memory comes from cudaMalloc, never from a pool, because a CUDA IPC handle names a whole allocation. Events are created for
sharing between processes. Import this module only where a GPU is wanted; without one the error is a single sentence.

Written against CuPy 13 and 14 (the same names in cupy.cuda.runtime). docs/how-to/gpu.md lists the parts that have run on a GPU.
"""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from fastps.device.interface import HANDLE_BYTES, DeviceError, DeviceLostError
from fastps.kernels.cuda import runtime as cuda

# Flags of the CUDA runtime, by their documented values; not every version of CuPy names all of them.
_EVENT_DISABLE_TIMING = 2  # cudaEventDisableTiming: required for a shared event
_EVENT_INTERPROCESS = 4  # cudaEventInterprocess
_IPC_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess: opening a handle enables peer access
_STREAM_NON_BLOCKING = 1  # cudaStreamNonBlocking
_COPY_DEFAULT = 4  # cudaMemcpyDefault: the addresses determine the direction
_HOST_ALLOC_PORTABLE = 1  # cudaHostAllocPortable


class CudaDevice:
    """See fastps.device.interface.Device. `index` counts the GPUs that CUDA_VISIBLE_DEVICES shows to this process.

    Raises DeviceError if there is no such GPU, or no CuPy.
    """

    def __init__(self, index: int = 0) -> None:
        try:
            self._cupy = cuda.load_cupy()
        except cuda.CudaUnavailableError as error:
            raise DeviceError(str(error)) from error
        self._runtime = self._cupy.cuda.runtime
        self.index = index
        if not 0 <= index < self._runtime.getDeviceCount():
            raise DeviceError(
                f"expected a GPU of 0 to {self._runtime.getDeviceCount() - 1}, found {index}: check CUDA_VISIBLE_DEVICES"
            )
        self._runtime.setDevice(index)
        self.identity = str(self._runtime.deviceGetPCIBusId(index))
        self._owned: dict[int, int] = {}  # address to size
        self._opened: set[int] = set()
        self._pinned: list[int] = []

    def _use(self) -> Any:
        """The runtime, with this device set as the calling thread's current device."""
        self._runtime.setDevice(self.index)
        return self._runtime

    # -- memory ------------------------------------------------------------------------------------

    def allocate(self, size: int) -> int:
        """See Device."""
        runtime = self._use()
        try:
            address = int(runtime.malloc(size))
        except self._runtime.CUDARuntimeError as error:
            free, total = runtime.memGetInfo()
            raise DeviceError(
                f"expected {size:,} bytes of memory on GPU {self.index}, found {free:,} free of {total:,}: use fewer workers or"
                f" a smaller model, or let the fold run on the CPU with FASTPS_PLACEMENT=host ({error})"
            ) from error
        runtime.memsetAsync(address, 0, size, 0)
        runtime.streamSynchronize(0)
        self._owned[address] = size
        return address

    def export(self, address: int) -> bytes:
        """See Device."""
        return bytes(self._use().ipcGetMemHandle(address))

    def open(self, handle: bytes) -> int:
        """See Device. CUDA fails in the process that exported the handle, and between GPUs without peer access."""
        try:
            address = int(self._use().ipcOpenMemHandle(handle[:HANDLE_BYTES], _IPC_LAZY_PEER_ACCESS))
        except self._runtime.CUDARuntimeError as error:
            raise DeviceLostError(
                f"expected another process's memory to open on GPU {self.index}, found that CUDA refuses ({error}): it"
                " has ended, or the GPUs have no peer access; FASTPS_PLACEMENT=host needs none"
            ) from error
        self._opened.add(address)
        return address

    def close(self, address: int) -> None:
        """See Device."""
        if address in self._opened:
            self._opened.discard(address)
            self._use().ipcCloseMemHandle(address)
        else:
            del self._owned[address]
            self._use().free(address)

    def host_memory(self, size: int) -> npt.NDArray[np.uint8]:
        """See Device. The memory is page-locked, so that asynchronous copies really are asynchronous."""
        address = int(self._use().hostAlloc(size, _HOST_ALLOC_PORTABLE))
        self._pinned.append(address)
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        memory[:] = 0
        return memory

    def view(self, address: int, length: int, dtype: str = "float32") -> Any:
        """See Device. Returns a CuPy array over memory that the array does not own."""
        cupy = self._cupy
        with cupy.cuda.Device(self.index):
            memory = cupy.cuda.UnownedMemory(address, length * np.dtype(dtype).itemsize, self, self.index)
            return cupy.ndarray((length,), dtype, cupy.cuda.MemoryPointer(memory, 0))

    # -- streams and events ------------------------------------------------------------------------

    def compute_stream(self) -> int:
        """See Device. Returns torch's current stream on this GPU."""
        import torch

        return int(torch.cuda.current_stream(self.index).cuda_stream)

    def make_stream(self) -> Any:
        """See Device. Returns a CuPy stream that does not wait for the default stream."""
        with self._cupy.cuda.Device(self.index):
            return self._cupy.cuda.Stream(non_blocking=True)

    def make_event(self) -> int:
        """See Device."""
        event = int(self._use().eventCreateWithFlags(_EVENT_DISABLE_TIMING | _EVENT_INTERPROCESS))
        return event

    def export_event(self, event: int) -> bytes:
        """See Device."""
        return bytes(self._use().ipcGetEventHandle(event))

    def open_event(self, handle: bytes) -> int:
        """See Device."""
        try:
            event = int(self._use().ipcOpenEventHandle(handle[:HANDLE_BYTES]))
        except self._runtime.CUDARuntimeError as error:
            raise DeviceLostError(f"expected another process's event to open, found that CUDA refuses ({error})") from error
        return event

    def close_event(self, event: int) -> None:
        """See Device."""
        self._use().eventDestroy(event)

    def record(self, event: int, stream: Any) -> None:
        """See Device."""
        self._use().eventRecord(event, _pointer(stream))

    def wait(self, event: int, stream: Any) -> None:
        """See Device."""
        self._use().streamWaitEvent(_pointer(stream), event)

    def synchronize(self, stream: Any) -> None:
        """See Device."""
        try:
            self._use().streamSynchronize(_pointer(stream))
        except self._runtime.CUDARuntimeError as error:
            raise DeviceError(f"work on GPU {self.index} failed: {error}") from error

    def synchronize_all(self) -> None:
        """See Device."""
        self._use().deviceSynchronize()

    def synchronize_event(self, event: int) -> None:
        """See Device."""
        self._use().eventSynchronize(event)

    # -- work --------------------------------------------------------------------------------------

    def copy(self, to: int, source: int, size: int, stream: Any) -> None:
        """See Device."""
        self._use().memcpyAsync(to, source, size, _COPY_DEFAULT, _pointer(stream))

    def launch_fold(self, rule: int, dtype: str, order: int, tiles: int, blocks: int, stream: Any) -> None:
        """See Device."""
        self._use()
        if blocks:
            cuda.fold_kernel(self.index, rule, dtype)(stream, order, tiles, blocks)

    def shut(self) -> None:
        """See Device. Other processes must have closed this process's memory before."""
        runtime = self._use()
        runtime.deviceSynchronize()
        # The process's end destroys the events: another process may be about to wait for one, which CUDA leaves undefined.
        for address in [*self._opened, *self._owned]:
            self.close(address)
        for address in self._pinned:
            runtime.freeHost(address)
        self._pinned.clear()


def _pointer(stream: Any) -> int:
    """The cudaStream_t of a stream: of torch's, which is a number already, or of CuPy's."""
    return stream if isinstance(stream, int) else int(stream.ptr)
