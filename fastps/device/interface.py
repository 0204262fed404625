"""What fastps asks of a device that holds shards: memory that other processes can map, streams, events, and the fold.

Two things implement it: device_cuda.py on a GPU, and device_host.py with memory of the host, which lets everything above be
tested between real processes where there is no GPU. Refuses to know shards, workers and torch: device_arena.py does.

The rules are CUDA's. Work is queued on a stream and runs in its order. An event is recorded on a stream by the one process that
made it; whoever waits for it, in this process or another, has its stream wait for the last record before the call. Only the
fold's owner, or a pull, ever orders two streams by the host.
"""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fastps.errors import Error

HANDLE_BYTES = 64  # of memory and of an event, as CUDA's are

Stream = Any
"""A stream of the device's own kind; opaque."""

Event = Any
"""An event of the device's own kind; opaque."""


class DeviceError(Error):
    """A device cannot do what was asked of it, or is not there."""


class DeviceLostError(DeviceError):
    """Memory or an event of a process that has ended: the job cannot go on, and is started again from its last checkpoint."""


class Device(Protocol):
    """One device as one process uses it. Sizes and addresses are in bytes; only one thread at a time may use it.

    Attributes:
        identity: a text that names the device itself, the same in every process.
    """

    identity: str

    # -- memory ----------------------------------------------------------------------------------------------------------

    def allocate(self, size: int) -> int:
        """Zeroed memory of its own, aligned to 256 bytes; returns its address. Raises DeviceError if there is too little."""
        ...

    def export(self, address: int) -> bytes:
        """The handle of an allocation, HANDLE_BYTES long, by which another process of this machine may open it."""
        ...

    def open(self, handle: bytes) -> int:
        """Map another process's allocation; returns its address here. Raises DeviceLostError for a handle that is stale."""
        ...

    def close(self, address: int) -> None:
        """Free an allocation, or unmap one that was opened. Whoever opened it must have closed it before it is freed."""
        ...

    def host_memory(self, size: int) -> npt.NDArray[np.uint8]:
        """Memory of the host that copies may read while the host goes on (pinned). Lives as long as the device."""
        ...

    def view(self, address: int, length: int, dtype: str = "float32") -> Any:
        """Memory as an array of NumPy's dtype, of a kind that torch.from_dlpack takes."""
        ...

    # -- streams and events ----------------------------------------------------------------------------------------------

    def compute_stream(self) -> Stream:
        """The stream on which this process computes at this moment: torch's current one."""
        ...

    def make_stream(self) -> Stream:
        """A stream of its own."""
        ...

    def make_event(self) -> Event:
        """An event that this process records; others may open it."""
        ...

    def export_event(self, event: Event) -> bytes:
        """The handle of an event, HANDLE_BYTES long."""
        ...

    def open_event(self, handle: bytes) -> Event:
        """Another process's event, to wait for. Raises DeviceLostError for a handle that is stale."""
        ...

    def close_event(self, event: Event) -> None:
        """Let go of an event, made or opened."""
        ...

    def record(self, event: Event, stream: Stream) -> None:
        """Mark the place that the stream's work has come to."""
        ...

    def wait(self, event: Event, stream: Stream) -> None:
        """Let what is queued on the stream from now on wait for the event's last record; an event never recorded is over."""
        ...

    def synchronize(self, stream: Stream) -> None:
        """Wait, on the host, until everything on the stream is done. Raises DeviceError if something of it failed."""
        ...

    def synchronize_all(self) -> None:
        """Wait, on the host, until everything that this process has queued on any stream is done."""
        ...

    def synchronize_event(self, event: Event) -> None:
        """Wait, on the host, for the last record of an event of this process."""
        ...

    # -- work ------------------------------------------------------------------------------------------------------------

    def copy(self, to: int, source: int, size: int, stream: Stream) -> None:
        """Queue a copy between any two of: this device, a device that it can reach, host_memory."""
        ...

    def launch_fold(self, rule: int, dtype: str, order: int, tiles: int, blocks: int, stream: Stream) -> None:
        """Queue the kernel of a rule and a gradient's dtype on an order and a table of tiles that lie on the device."""
        ...

    def shut(self) -> None:
        """Let go of everything that is left. The device must not be used afterwards."""
        ...
