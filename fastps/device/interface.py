"""The interface of a device that holds shards: memory that other processes can map, streams, events, and the fold.

A GPU implements it through CUDA. A second implementation, in host memory, lets tests run the rest of fastps between real
processes without a GPU. The interface knows no shards, no workers and no torch.

The rules are CUDA's. Work is queued on a stream and runs in the stream's order. Only the process that made an event records it
on a stream. Any process can make its stream wait for an event; the stream then waits for the last record before that call.
Folds, pulls and reads of optimizer state are the only such waits.
"""

import os
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fastps.errors import Error

HANDLE_BYTES = 64  # size of a handle of memory or of an event, as in CUDA

Stream = Any
"""An opaque stream of the device's own type."""

Event = Any
"""An opaque event of the device's own type."""


Graph = Any
"""Captured work of a device, of the device's own type. It lives as long as the device."""


class DeviceError(Error):
    """An operation on a device failed, or the device does not exist."""


class DeviceLostError(DeviceError):
    """Memory or an event belonged to a process that has ended, or whose work has failed. The job must be restarted."""


class DeviceMemoryError(DeviceError):
    """A device has too little free memory for an allocation."""


class DeviceFailedError(DeviceError):
    """A device is lost to this process: a hardware fault (an Xid), or a kernel that did what none may. No work on it runs."""


def no_room(size: int, gpu: str, free: int, total: int, cause: object = "") -> DeviceMemoryError:
    """The error for an allocation of `size` bytes that does not fit."""
    return DeviceMemoryError(
        f"expected {size:,} bytes of memory on {gpu}, found {free:,} free of {total:,}: spread the job over more GPUs, use an"
        f" update rule with less state, or let the fold run on the CPU with FASTPS_PLACEMENT=host{cause and f' ({cause})'}"
    )


def gone(gpu: str, cause: object) -> DeviceFailedError:
    """The error for a device that is lost to this process."""
    return DeviceFailedError(
        f"expected {gpu} to do its work, found it lost to process {os.getpid()} ({cause}): look for an Xid in the kernel's log"
        " (dmesg), start the job again from a checkpoint, and leave this GPU out if it happens again"
    )


class Device(Protocol):
    """One device as one process uses it. Sizes are in bytes, and addresses count bytes. Not thread-safe.

    Attributes:
        identity: a name of the device, the same in every process.
    """

    identity: str

    @property
    def reaches_all(self) -> bool:
        """Whether this device has peer access to every other device that this process sees."""
        ...

    def can_reach(self, identity: str) -> bool:
        """Whether this device has peer access to that one. A device reaches itself."""
        ...

    # -- memory ----------------------------------------------------------------------------------------------------------

    def allocate(self, size: int) -> int:
        """Allocate zeroed memory, aligned to 256 bytes; returns its address. Raises DeviceMemoryError."""
        ...

    def export(self, address: int) -> bytes:
        """The handle of an allocation, HANDLE_BYTES long. Other processes of this machine open the allocation by it."""
        ...

    def open(self, handle: bytes) -> int:
        """Map another process's allocation; returns its address in this process. Raises DeviceLostError for a stale handle."""
        ...

    def borrow(self, other: Any, address: int) -> None:
        """Let this device's work use an allocation of another device of this process, to which it has peer access."""
        ...

    def allocate_host(self, size: int) -> int:
        """Allocate zeroed, pinned host memory that other processes can open, and that copies and folds of every device use."""
        ...

    def export_host(self, address: int) -> bytes:
        """The handle of an allocation from allocate_host, HANDLE_BYTES long."""
        ...

    def open_host(self, handle: bytes) -> int:
        """Map another process's memory from allocate_host. Raises DeviceLostError for a stale handle."""
        ...

    def close(self, address: int) -> None:
        """Free an allocation, or unmap an opened one. All processes that opened it must close it before it is freed."""
        ...

    def host_memory(self, size: int) -> npt.NDArray[np.uint8]:
        """Host memory that asynchronous copies may read (pinned). It lives as long as the device."""
        ...

    def view(self, address: int, length: int, dtype: str = "float32") -> Any:
        """Memory as an array of a NumPy dtype, in a form that torch.from_dlpack takes."""
        ...

    # -- streams and events ----------------------------------------------------------------------------------------------

    def compute_stream(self) -> Stream:
        """The stream on which this process computes now: torch's current stream."""
        ...

    def make_stream(self) -> Stream:
        """Make a new stream."""
        ...

    def make_event(self) -> Event:
        """Make an event, which only this process may record and other processes may open."""
        ...

    def export_event(self, event: Event) -> bytes:
        """The handle of an event, HANDLE_BYTES long."""
        ...

    def open_event(self, handle: bytes) -> Event:
        """Open another process's event, to wait for it. Raises DeviceLostError for a stale handle."""
        ...

    def close_event(self, event: Event) -> None:
        """Release an event that this process made or opened."""
        ...

    def record(self, event: Event, stream: Stream) -> None:
        """Record the event behind all work that the stream has been given."""
        ...

    def wait(self, event: Event, stream: Stream) -> None:
        """Make later work on the stream wait for the event's last record; an event without a record delays nothing."""
        ...

    def synchronize(self, stream: Stream) -> None:
        """Block the host until all work on the stream is done. Raises DeviceError if some of it failed."""
        ...

    def check(self, stream: Stream) -> None:
        """Raise DeviceError if work on the stream has failed. Does not wait for work."""
        ...

    def synchronize_all(self) -> None:
        """Block the host until all work that this process has queued on any stream is done."""
        ...

    def synchronize_event(self, event: Event) -> None:
        """Block the host until the last record of one of this process's events is done."""
        ...

    def is_done(self, event: Event) -> bool:
        """Whether the last record of one of this process's events is done. Raises DeviceError if work before it failed."""
        ...

    # -- work ------------------------------------------------------------------------------------------------------------

    def copy(self, to: int, source: int, size: int, stream: Stream) -> None:
        """Queue a copy between any two of: this device, a device that it can reach, memory from host_memory."""
        ...

    def launch_fold(self, rule: int, dtype: str, order: int, tiles: int, blocks: int, stream: Stream) -> None:
        """Queue the kernel for a rule and a gradient dtype.

        order, tiles: addresses on the device of a work item and of a table of tiles; blocks: the number of tiles.
        """
        ...

    def use_rule(self, text: str) -> None:
        """Compile a user's rule, the text that the kernels include. Folds of RULE_USER then run it.

        Raises DeviceError if the compiler refuses it.
        """
        ...

    def launch_check(self, dtype: str, args: int, tiles: int, blocks: int, stream: Stream) -> None:
        """Queue the kernel that looks for non-finite values in a slot of gradients of a dtype.

        args, tiles: addresses on the device of a check's arguments and of a table of tiles; blocks: the number of tiles.
        """
        ...

    def begin_capture(self, stream: Stream) -> None:
        """Take copies and folds that are queued on the stream from now on into a graph, instead of running them.

        Until `end_capture` nothing else may be asked of the device.
        """
        ...

    def end_capture(self, stream: Stream) -> Graph:
        """End a capture; returns the graph."""
        ...

    def launch(self, graph: Graph, stream: Stream) -> None:
        """Queue the work of a graph."""
        ...

    def shut(self, *, waits: bool = True) -> None:
        """Release everything that is left. The device must not be used afterwards.

        Without `waits` queued work may never have run: it may wait for a process that waits for this one, or has failed.
        """
        ...
