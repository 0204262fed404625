"""What a device says to the rest of fastps: its errors, and the numbers that stand for streams and events."""

import os

from fastps.errors import Error

HANDLE_BYTES = 64  # size of a handle of memory or of an event, as in CUDA
# What CUDA calls so is a pointer.
Stream = int
Event = int


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
