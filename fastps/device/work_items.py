"""Launch arguments on their way to a device: a ring of pinned memory, and one on the device that a stream reads in order."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fastps.device.cuda import CudaDevice
from fastps.device.interface import Graph, Stream

MOST_ITEMS = 4  # work items of a shard that may be in flight to the device at a time
_LEAST_BYTES = 1 << 16


class _Entry(NamedTuple):
    """A place of the ring: its number, its address on the device, its pinned memory's, and the bytes of the item in it."""

    number: int
    address: int
    staging: int
    size: int


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
        self._graphs: dict[_Entry, Graph | None] = {}  # None: the same work was queued once
        self.events = [device.make_event() for _ in range(entries)]

    def queue(self, item: npt.NDArray[np.uint8], launch: Callable[[int], None], stream: Stream, *, repeats: bool) -> None:
        """Queue the copy of a work item, and the work that `launch` queues on `stream`, given the item's address on the device.

        `repeats`: the same work will come again for items of this size in the same place of the ring. From the second time on
        it is a graph, which costs one call. All that changes from one to the next must then be in the item.
        """
        entry = self._place(item)
        graph = self._graphs.get(entry)
        if graph is not None:
            self._device.launch(graph, stream)
        elif entry in self._graphs:
            self._device.begin_capture(stream)
            self._copy(entry, launch, stream)
            graph = self._graphs[entry] = self._device.end_capture(stream)
            self._device.launch(graph, stream)
        else:
            self._copy(entry, launch, stream)  # and loads the kernel, which must not happen in a capture
            if repeats:
                self._graphs[entry] = None
        self._device.record(self.events[entry.number], stream)

    def _copy(self, entry: _Entry, launch: Callable[[int], None], stream: Stream) -> None:
        self._device.copy(entry.address, entry.staging, entry.size, stream)
        launch(entry.address)

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
        return _Entry(index, self._address + index * self._capacity, int(staging.ctypes.data), item.nbytes)

    def _grow(self, size: int) -> None:
        """Allocate larger entries. The old memory stays until the device is shut, because the stream may still read it."""
        self._capacity = max(self._least_bytes, 1 << (size - 1).bit_length())
        self._address = self._device.allocate(self._capacity * self._entries)
        self._staging = [self._device.host_memory(self._capacity) for _ in range(self._entries)]
