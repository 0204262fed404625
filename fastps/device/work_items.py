"""Launch arguments on their way to a device: a ring of pinned memory, and one on the device that a stream reads in order."""

import numpy as np
import numpy.typing as npt

from fastps.device.interface import Device, Stream

MOST_ITEMS = 4  # work items of a shard that may be in flight to the device at a time
_LEAST_BYTES = 1 << 16


class WorkItems:
    """Work items in flight to the device. Pinned memory that holds one is not reused before its copy is done.

    Attributes:
        events: for each entry, the event behind its last copy.
    """

    def __init__(self, device: Device, entries: int = MOST_ITEMS, least_bytes: int = _LEAST_BYTES) -> None:
        self._device = device
        self._entries = entries
        self._least_bytes = least_bytes
        self._next = 0
        self._capacity = 0
        self.events = [device.make_event() for _ in range(entries)]

    def upload(self, item: npt.NDArray[np.uint8], stream: Stream) -> int:
        """Queue a copy of a work item; returns its address on the device, valid for the work queued next on `stream`.

        An entry is reused after `entries` uploads, in the order of the one stream that uses this ring.
        """
        if item.nbytes > self._capacity:
            self._grow(item.nbytes)
        index = self._next % self._entries
        self._next += 1
        if self._next > self._entries:
            self._device.synchronize_event(self.events[index])  # waits only if the host is a whole ring ahead of the device
        staging = self._staging[index]
        staging[: item.nbytes] = item
        address = self._address + index * self._capacity
        self._device.copy(address, staging.ctypes.data, item.nbytes, stream)
        self._device.record(self.events[index], stream)
        return address

    def _grow(self, size: int) -> None:
        """Allocate larger entries. The old memory stays until the device is shut, because the stream may still read it."""
        self._capacity = max(self._least_bytes, 1 << (size - 1).bit_length())
        self._address = self._device.allocate(self._capacity * self._entries)
        self._staging = [self._device.host_memory(self._capacity) for _ in range(self._entries)]
