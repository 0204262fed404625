"""CUDA's errors by name: one place that turns the codes of the runtime and the driver into errors that say what to do.

A sticky error leaves a process no use of the device: every later call fails with the same code. The codes are those of
cudaError_t and CUresult, which agree where both have one; CuPy's errors have them as `status`.
"""

import os
from collections.abc import Callable
from typing import Any

from fastps.device.interface import DeviceError, DeviceFailedError, DeviceMemoryError

MEMORY_ALLOCATION = 2
NOT_READY = 600
PEER_ACCESS_ALREADY_ENABLED = 704
LOST = {
    46: "the device is busy or unavailable",
    214: "an ECC error that could not be corrected",
    220: "an NVLink error that could not be corrected",
    700: "a kernel or a copy used an illegal address",
    702: "a kernel took too long",
    710: "a kernel's assertion failed",
    714: "a hardware stack error",
    715: "an illegal instruction",
    716: "a misaligned address",
    717: "an address in the wrong space",
    718: "an invalid program counter",
    719: "a kernel's launch failed",
    999: "an unknown error",
}
"""The codes after which a process cannot use a device any more."""


def named(error: Exception, gpu: str, call: str) -> DeviceError:
    """The DeviceError for an error of CUDA's that `call` raised on `gpu`.

    >>> from fastps.device.interface import DeviceError
    >>> class Error(Exception):
    ...     status = 719
    >>> print(named(Error("cudaErrorLaunchFailure"), "GPU 0", "memcpyAsync"))  # doctest: +ELLIPSIS
    expected GPU 0 to do its work, found it lost to process ... (memcpyAsync: a kernel's launch failed, code 719: ...
    """
    status = getattr(error, "status", None)
    if status in LOST:
        return of_status(status, gpu, call, f": {error}")
    if isinstance(error, DeviceError):
        return error
    return DeviceError(f"{call} on {gpu} failed: {error}")


def of_status(status: int, gpu: str, call: str, more: str = "") -> DeviceError:
    """The DeviceError for a code that `call` returned.

    >>> print(of_status(1, "GPU 0", "streamQuery"))
    streamQuery on GPU 0 failed: code 1
    """
    if status in LOST:
        return DeviceFailedError(
            f"expected {gpu} to do its work, found it lost to process {os.getpid()} ({call}: {LOST[status]}, code"
            f" {status}{more}): look for an Xid in the kernel's log (dmesg), start the job again from a checkpoint, and leave"
            " this GPU out if it happens again"
        )
    return DeviceError(f"{call} on {gpu} failed: code {status}{more}")


class NamedRuntime:
    """The functions of a CUDA runtime, whose errors are DeviceErrors. Allocations name what is free."""

    def __init__(self, runtime: Any, gpu: str) -> None:
        """`gpu`: the device's name for errors."""
        self._runtime = runtime
        self.gpu = gpu

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = self.checked(getattr(self._runtime, name), name)
        setattr(self, name, call)  # so that the next access finds it at once
        return call

    def checked(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A function whose errors of CUDA are DeviceErrors."""

        def call(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            except Exception as error:
                if not hasattr(error, "status"):
                    raise
                raise named(error, self.gpu, name) from error

        return call

    def malloc(self, size: int) -> int:
        """Allocate memory on the thread's device. Raises DeviceMemoryError, DeviceFailedError."""
        try:
            return int(self._runtime.malloc(size))
        except Exception as error:
            if getattr(error, "status", None) != MEMORY_ALLOCATION:
                raise named(error, self.gpu, "malloc") from error
            free, total = self._runtime.memGetInfo()
            raise DeviceMemoryError(
                f"expected {size:,} bytes of memory on {self.gpu}, found {free:,} free of {total:,}: spread the job over more"
                " GPUs, use an update rule with less state, or let the fold run on the CPU with FASTPS_PLACEMENT=host"
                f" ({error})"
            ) from error

    def deviceEnablePeerAccess(self, peer: int) -> None:
        """Enable the thread's device to use a peer's memory. Does nothing where that is enabled."""
        try:
            self._runtime.deviceEnablePeerAccess(peer)
        except Exception as error:
            if getattr(error, "status", None) != PEER_ACCESS_ALREADY_ENABLED:
                raise named(error, self.gpu, "deviceEnablePeerAccess") from error
