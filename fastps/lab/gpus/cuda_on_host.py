"""CUDA in host memory: the functions of the runtime that a CudaDevice calls, over devices of host memory.

With it the module that has every CUDA call runs between real processes without a GPU. It shows that the calls fit together;
what CUDA itself does, only a GPU shows. Others record its calls and check them against the rules.
"""

import contextlib
import ctypes
import inspect
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fastps.device.cuda import SUCCESS
from fastps.device.cuda_errors import NOT_READY
from fastps.device.interface import DeviceError, DeviceFailedError, DeviceMemoryError
from fastps.lab.gpus.host import HostDevice, Teeth

_DEFAULT_STREAM = 0
_MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation


class HostCudaError(DeviceError):
    """An error with a code of CUDA's, as CuPy raises it."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@contextlib.contextmanager
def _numbered(teeth: Teeth) -> Iterator[None]:
    """Raise the errors of a device of host memory as those of CUDA."""
    try:
        yield
    except DeviceMemoryError as error:
        raise HostCudaError(_MEMORY_ALLOCATION, "cudaErrorMemoryAllocation: out of memory") from error
    except DeviceFailedError as error:
        raise HostCudaError(teeth.status, f"simulated error {teeth.status}") from error


class HostCuda:
    """See fastps.device.cuda.Cuda. `gpus`: the bus ids of the GPUs that this process sees, its own first.

    `teeth`: those of the devices; a device named there is out of reach of the first one.

    >>> from fastps.device.cuda import CudaDevice
    >>> device = CudaDevice(0, HostCuda(["00:01.0"]))
    >>> device.identity, device.view(device.allocate(64), 16)[:2].tolist()
    ('00:01.0', [0.0, 0.0])
    >>> device.shut()
    """

    def __init__(self, gpus: Sequence[str], teeth: Teeth | None = None) -> None:
        self.runtime = HostRuntime(gpus, teeth or Teeth())

    def launch_fold(self, device: int, rule: int, dtype: str, order: int, tiles: int, blocks: int, stream: int) -> None:
        """See Cuda."""
        runtime = self.runtime
        with _numbered(runtime.teeth):
            runtime.devices[device].launch_fold(rule, dtype, order, tiles, blocks, runtime.streams[stream])

    def use_rule(self, device: int, text: str) -> None:
        """See Cuda."""
        self.runtime.devices[device].use_rule(text)

    def launch_check(self, device: int, dtype: str, args: int, tiles: int, blocks: int, stream: int) -> None:
        """See Cuda."""
        runtime = self.runtime
        runtime.devices[device].launch_check(dtype, args, tiles, blocks, runtime.streams[stream])

    def array(self, device: int, address: int, length: int, dtype: str, owner: object) -> Any:
        """See Cuda. Returns a NumPy array."""
        return self.runtime.devices[device].view(address, length, dtype)

    def compute_stream(self, device: int) -> int:
        """See Cuda. A stream of its own, on which work is done at once: its caller computes on the CPU."""
        runtime = self.runtime
        return runtime.number_of(runtime.devices[device].compute_stream())


class HostRuntime:
    """The functions of the CUDA runtime, as cupy.cuda.runtime names them. Errors of devices have CUDA's codes."""

    CUDARuntimeError = DeviceError

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if name.startswith("_") or not inspect.ismethod(found):
            return found

        def call(*arguments: Any) -> Any:
            with _numbered(self.teeth):
                return found(*arguments)

        return call

    def __init__(self, gpus: Sequence[str], teeth: Teeth) -> None:
        self.devices = [HostDevice(gpu, teeth=teeth) for gpu in gpus]
        self.streams: dict[int, Any] = {}
        self._gpus = list(gpus)
        self.teeth = teeth
        self._events: dict[int, Any] = {}
        self._graphs: dict[int, Any] = {}
        self._numbers = itertools.count(1)
        self._registered: dict[int, Any] = {}
        self._thread = threading.local()

    @property
    def _device(self) -> HostDevice:
        return self.devices[getattr(self._thread, "device", 0)]

    def number_of(self, stream: Any) -> int:
        """The number that stands for a stream."""
        for number, found in self.streams.items():
            if found is stream:
                return number
        number = next(self._numbers)
        self.streams[number] = stream
        return number

    # -- devices -----------------------------------------------------------------------------------

    def getDeviceCount(self) -> int:
        """How many devices there are."""
        return len(self.devices)

    def setDevice(self, device: int) -> None:
        """Set the calling thread's device."""
        self._thread.device = device

    def deviceGetPCIBusId(self, device: int) -> str:
        """The name of a device that all processes share."""
        return self._gpus[device]

    def deviceCanAccessPeer(self, device: int, peer: int) -> int:
        """Whether two devices reach each other. Devices that the teeth name are reached by none but themselves."""
        named = self.teeth.unreachable
        return int(self._gpus[device] not in named and self._gpus[peer] not in named)

    def deviceEnablePeerAccess(self, peer: int) -> None:
        """Let the thread's device use the memory of another."""
        self._device.lend(self.devices[peer])

    def deviceSynchronize(self) -> None:
        """Wait for all streams of the thread's device."""
        self._device.synchronize_all()

    def memGetInfo(self) -> tuple[int, int]:
        """Free and all memory."""
        return self._device.free_memory(), self.teeth.memory

    # -- memory ------------------------------------------------------------------------------------

    def malloc(self, size: int) -> int:
        """Allocate memory on the thread's device."""
        return self._device.allocate(size)

    def free(self, address: int) -> None:
        """Free it."""
        self._device.close(address)

    def memsetAsync(self, address: int, value: int, size: int, stream: int) -> None:
        """Fill memory, at once."""
        self._device.view(address, size, "uint8")[:] = value

    def memcpyAsync(self, to: int, source: int, size: int, kind: int, stream: int) -> None:
        """Queue a copy."""
        self._device.copy(to, source, size, self.streams[stream])

    def ipcGetMemHandle(self, address: int) -> bytes:
        """The handle of an allocation."""
        return self._device.export(address)

    def ipcOpenMemHandle(self, handle: bytes, flags: int) -> int:
        """Map another process's allocation."""
        return self._device.open(handle)

    def ipcCloseMemHandle(self, address: int) -> None:
        """Unmap it."""
        self._device.close(address)

    def hostAlloc(self, size: int, flags: int) -> int:
        """Allocate host memory for copies of every device of the process."""
        memory = self._device.host_memory(size)
        for device in self.devices:
            if device is not self._device:
                device.pin(memory)
        return int(memory.ctypes.data)

    def freeHost(self, address: int) -> None:
        """Keep it: the device does."""

    def hostRegister(self, address: int, size: int, flags: int) -> None:
        """Let every device use host memory."""
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        self._registered[address] = memory
        for device in self.devices:
            device.pin(memory)

    def hostUnregister(self, address: int) -> None:
        """Undo it."""
        memory = self._registered.pop(address)
        for device in self.devices:
            device.unpin(memory)

    # -- streams and events ------------------------------------------------------------------------

    def streamCreateWithFlags(self, flags: int) -> int:
        """Make a stream of the thread's device."""
        return self.number_of(self._device.make_stream())

    def streamDestroy(self, stream: int) -> None:
        """Wait for a stream, and end it."""
        self._device.end_stream(self.streams.pop(stream))

    def streamSynchronize(self, stream: int) -> None:
        """Wait for a stream. The default stream has no work."""
        if stream != _DEFAULT_STREAM:
            self._device.synchronize(self.streams[stream])

    def streamQuery(self, stream: int) -> int:
        """The code of a stream's work: 0 without a failure, whether it is done or not, else that of a lost device."""
        failure = self.streams[stream].failure
        return self.teeth.status if failure is not None else 0

    def eventCreateWithFlags(self, flags: int) -> int:
        """Make an event."""
        return self._keep(self._device.make_event())

    def _keep(self, event: Any) -> int:
        number = next(self._numbers)
        self._events[number] = event
        return number

    def eventDestroy(self, event: int) -> None:
        """Release an event."""
        self._device.close_event(self._events.pop(event))

    def ipcGetEventHandle(self, event: int) -> bytes:
        """The handle of an event."""
        return self._device.export_event(self._events[event])

    def ipcOpenEventHandle(self, handle: bytes) -> int:
        """Open another process's event."""
        return self._keep(self._device.open_event(handle))

    def eventRecord(self, event: int, stream: int) -> None:
        """Record an event."""
        self._device.record(self._events[event], self.streams[stream])

    def streamWaitEvent(self, stream: int, event: int) -> None:
        """Let a stream wait."""
        self._device.wait(self._events[event], self.streams[stream])

    def eventSynchronize(self, event: int) -> None:
        """Wait for an event."""
        self._device.synchronize_event(self._events[event])

    def eventQuery(self, event: int) -> int:
        """0 if an event's last record is done, else CUDA's number of the answer that it is not."""
        return SUCCESS if self._device.is_done(self._events[event]) else NOT_READY

    # -- graphs ------------------------------------------------------------------------------------

    def streamBeginCapture(self, stream: int, mode: int) -> None:
        """Begin to capture a stream."""
        self._device.begin_capture(self.streams[stream])

    def streamEndCapture(self, stream: int) -> int:
        """End it; returns a graph."""
        number = next(self._numbers)
        self._graphs[number] = self._device.end_capture(self.streams[stream])
        return number

    def graphInstantiate(self, graph: int) -> int:
        """Make a graph executable."""
        number = next(self._numbers)
        self._graphs[number] = self._graphs[graph]
        return number

    def graphLaunch(self, graph: int, stream: int) -> None:
        """Queue the work of a graph."""
        self._device.launch(self._graphs[graph], self.streams[stream])

    def graphDestroy(self, graph: int) -> None:
        """Release a graph."""
        del self._graphs[graph]

    def graphExecDestroy(self, graph: int) -> None:
        """Release an executable graph."""
        self.graphDestroy(graph)
