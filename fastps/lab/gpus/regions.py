"""Memory of this machine that processes share by handles: memfds, opened through /proc by process id, descriptor and secret.

The device of host memory makes all its memory and events of them. Freed memory is poisoned for every process that maps it.
"""

import ctypes
import mmap
import os
import secrets
import struct
from dataclasses import dataclass

import numpy as np

from fastps.device.interface import HANDLE_BYTES, DeviceError, DeviceLostError

_HANDLE = struct.Struct("<qqq16s")  # process, descriptor, size, secret
_TRAILER = struct.Struct("<16s64s")  # behind the memory: the secret, and the name of the device that holds it
POISON = 0xFF  # of every byte of freed memory: read as a float it is not a number
_MAP_FIXED = 0x10


@dataclass
class Region:
    """A mapped memfd: `size` bytes of memory of the device `identity`. `pidfd` is that of its maker, or -1 in its maker."""

    descriptor: int
    memory: mmap.mmap
    size: int
    secret: bytes
    address: int
    identity: str
    pidfd: int = -1

    def holds(self, address: int, size: int) -> bool:
        """Whether the bytes lie in this region."""
        return self.address <= address and address + size <= self.address + self.size


def make_region(size: int, identity: str) -> Region:
    """Make zeroed memory. Raises DeviceError if there is too little."""
    descriptor = os.memfd_create("fastps-device", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, size + _TRAILER.size)
    except OSError as error:
        os.close(descriptor)
        raise DeviceError(f"expected {size:,} bytes of memory for a device of the host, found too little: {error}") from error
    secret = secrets.token_bytes(16)
    region = _mapped(descriptor, size, secret, identity, -1)
    region.memory[size:] = _TRAILER.pack(secret, identity.encode())
    return region


def handle_of(region: Region) -> bytes:
    """The handle by which other processes of this machine open the region."""
    return _HANDLE.pack(os.getpid(), region.descriptor, region.size, region.secret).ljust(HANDLE_BYTES, b"\0")


def open_region(handle: bytes) -> Region:
    """Map the memory that a handle names. The secret exposes a process id or descriptor number that has been reused.

    Raises DeviceLostError if the memory is gone, and DeviceError in the process that made it: CUDA refuses that, too.
    """
    process_id, number, size, secret = _HANDLE.unpack_from(handle)
    stale = DeviceLostError(f"expected memory of process {process_id}, found none: it has ended, or has freed that memory")
    try:
        pidfd = os.pidfd_open(process_id)
    except OSError as error:
        raise stale from error
    try:
        descriptor = os.open(f"/proc/{process_id}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        os.close(pidfd)
        raise stale from error
    if os.fstat(descriptor).st_size != size + _TRAILER.size:
        os.close(descriptor)
        os.close(pidfd)
        raise stale
    region = _mapped(descriptor, size, secret, "", pidfd)
    found, identity = _TRAILER.unpack(region.memory[size:])
    region.identity = identity.rstrip(b"\0").decode(errors="replace")
    if found == secret and process_id != os.getpid():
        return region
    release(region)
    if found != secret:
        raise stale
    raise DeviceError("expected another process's memory to open, found a handle that this process has exported")


def release(region: Region, *, poisons: bool = True) -> None:
    """Unmap a region; its maker frees it. Views that still live see poison, and so do other processes if the maker frees it.

    Without `poisons` other processes keep what they see.
    """
    whole = region.size + _TRAILER.size
    if region.pidfd < 0 and poisons:
        ctypes.memset(region.address, POISON, whole)
    mapped = ctypes.CDLL(None, use_errno=True).mmap
    mapped.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    found = mapped(
        ctypes.c_void_p(region.address), ctypes.c_size_t(whole), mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, ctypes.c_long(0)
    )
    if found != region.address:
        raise DeviceError(f"expected to unmap {region.size} bytes, found errno {ctypes.get_errno()}")
    ctypes.memset(region.address, POISON, whole)
    os.close(region.descriptor)
    if region.pidfd >= 0:
        os.close(region.pidfd)
        region.pidfd = -1


def _mapped(descriptor: int, size: int, secret: bytes, identity: str, pidfd: int) -> Region:
    memory = mmap.mmap(descriptor, size + _TRAILER.size)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    return Region(descriptor, memory, size, secret, address, identity, pidfd)
