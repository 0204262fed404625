"""What a device says to the rest of fastps: its errors, and the numbers that stand for streams and events."""

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
    """A device is lost to this process: by a hardware fault (an Xid), or a kernel that accessed invalid memory."""
