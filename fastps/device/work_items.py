"""Launch arguments on their way to a device: a ring of pinned memory, and one on the device that a stream reads in order."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fastps.device.cuda import CudaDevice
from fastps.device.interface import Stream

MOST_ITEMS = 4  # work items of a shard that may be in flight to the device at a time
_LEAST_BYTES = 1 << 16


class _Entry(NamedTuple):
    """A place of the ring: its number, its address on the device, and its pinned memory's."""

    number: int
    address: int
    staging: int


class WorkItems:
    """Work items in flight to the device. Memory that holds one is not reused before the work on it is done.

    Attributes:
        events: for each entry, the event behind the last work on it.
    """

    def __init__(self, device: CudaDevice, entries: int = MOST_ITEMS, least_bytes: int = _LEAST_BYTES) -> None:
        self._device = device
        self._entries = entries
        self._least_bytes = least_bytes
        self._next = 0
        self._capacity = 0
        self.events = [device.make_event() for _ in range(entries)]

    def queue(self, item: npt.NDArray[np.uint8], launch: Callable[[int], None], stream: Stream) -> None:
        """Queue the copy of a work item, and the work that `launch` queues, given the item's address on the device."""
        entry = self._place(item)
        self._device.copy(entry.address, entry.staging, item.nbytes, stream)
        launch(entry.address)
        self._device.record(self.events[entry.number], stream)

    def _place(self, item: npt.NDArray[np.uint8]) -> _Entry:
        """Write a work item into the next place of the ring, which is reused after `entries` items."""
        if item.nbytes > self._capacity:
            self._grow(item.nbytes)
        index = self._next % self._entries
        self._next += 1
        if self._next > self._entries:
            self._device.synchronize_event(self.events[index])  # waits only if the host is a whole ring ahead of the device
        staging = self._staging[index]
        staging[: item.nbytes] = item
        return _Entry(index, self._address + index * self._capacity, int(staging.ctypes.data))

    def _grow(self, size: int) -> None:
        """Allocate larger entries. The old memory stays until the device is shut, because the stream may still read it."""
        self._capacity = max(self._least_bytes, 1 << (size - 1).bit_length())
        self._address = self._device.allocate(self._capacity * self._entries)
        self._staging = [self._device.host_memory(self._capacity) for _ in range(self._entries)]
