"""The part of an arena that is on devices: where a shard's weights, state and gradients are, which lanes fold, in what order.

The control words stay in the shared arena. A shard's floats are one allocation of its owner lane, which the layout names. Every
lane writes a handle table in the arena: its device, the handles of its two events, and the handles of the memory that it owns.
A lane on a shard's own device folds the shard; other lanes only push and pull. A server process that owns all shards is the
only one that folds.

Two events per lane order all work. A lane records `computed` on its compute stream when it posts a push and when it releases
weights, and `folded` on its fold stream after each fold. A fold waits for both events of every lane; a pull waits for every
lane's `folded`. The host does not wait: the commit word describes the state that the streams will reach, and only work that has
waited for the events reads that state.

A shard's memory does not survive its owner: the job then ends with an error that names the worker, and must be restarted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fastps.device.interface import HANDLE_BYTES, Device, Event, Stream
from fastps.errors import UnsupportedError
from fastps.kernels.cuda import host_fold, launch_args
from fastps.kernels.protocol.fold_call import FoldCall
from fastps.kernels.shm.arena import LANE_LEAVING, LANE_LIVE, LANE_SERVING, STATE_BUFFERS

if TYPE_CHECKING:
    from fastps.job.layout import Layout
    from fastps.store.store import Store

SHOWN, FILLED = 1, 2  # a handle table's `ready`: the handles are written; the first weights are written, too (lane 0 only)
_RING_ENTRIES = 8  # work items that may be in flight to the device at a time
_LEAST_ARGS_BYTES = 1 << 16
PRESENT = (LANE_LIVE, LANE_LEAVING, LANE_SERVING)


def handle_table_dtype(shards: int) -> np.dtype[Any]:
    """The dtype of a lane's handle table, at the end of its room for model buffers. Read and write it under the shard locks."""
    handle = f"V{HANDLE_BYTES}"
    return np.dtype(
        [("ready", "<i8"), ("identity", "S56"), ("computed", handle), ("folded", handle), ("memory", handle, (shards,))]
    )


def handle_table_bytes(shards: int) -> int:
    """Size of a handle table in bytes.

    >>> handle_table_bytes(1)
    256
    """
    return handle_table_dtype(shards).itemsize


@dataclass(frozen=True)
class Region:
    """The layout of a shard's one allocation. The shard has `floats` floats, from float `first` of a buffer on.

    The methods return offsets in bytes.
    """

    first: int
    floats: int
    buffers: int
    planes: int
    lanes: int
    slots: int
    gradient_bytes: int  # bytes of one gradient value

    def weights(self, buffer: int) -> int:
        """The offset of a weights buffer."""
        return 4 * self.floats * buffer

    def state(self, buffer: int) -> int:
        """The offset of a state buffer: its optimizer-state tensors, one after the other."""
        return 4 * self.floats * (self.buffers + self.planes * buffer)

    def gradient(self, lane: int, slot: int) -> int:
        """The offset of a lane's slot."""
        begin = 4 * self.floats * (self.buffers + STATE_BUFFERS * self.planes)
        return begin + self.gradient_bytes * self.floats * (lane * self.slots + slot)

    @property
    def size(self) -> int:
        """Total size in bytes; at least 256, because an empty allocation is not possible."""
        return max(256, self.gradient(self.lanes, 0))


def regions_of(layout: "Layout") -> list[Region]:
    """The region of each shard."""
    measures = layout.buffers, layout.planes, layout.workers, layout.slots, launch_args.DTYPE_BYTES[layout.gradient_type]
    return [Region(first, last - first, *measures) for first, last in layout.shards]


class DeviceArena:
    """One lane's side of the arena on devices. Its worker makes it on attaching, and is its only user."""

    def __init__(self, store: "Store", rank: int, device: Device) -> None:
        self._store = store
        self._layout = store.layout
        self._rank = rank
        self._device = device
        self._regions = regions_of(self._layout)
        self._bases: list[int] = [0] * len(self._regions)
        self._computed, self._folded = device.make_event(), device.make_event()
        self._stream: Stream = device.make_stream()
        device.record(self._computed, device.compute_stream())  # nobody waits for an event that was never recorded
        device.record(self._folded, self._stream)
        self._peers: dict[int, tuple[Event, Event]] = {}
        self._shapes = [self._shape_of(shard) for shard in range(len(self._regions))]
        self._tiles: dict[int, tuple[int, int]] = {}  # by shard: address and number of tiles
        self._ring = OrderRing(device)
        self.folds = 0

    def _shape_of(self, shard: int) -> launch_args.Shape:
        parameters = [parameter for parameter in self._layout.parameters if parameter.shard == shard]
        first = self._regions[shard].first
        segments = tuple((parameter.offset - first, parameter.length, parameter.group) for parameter in parameters)
        try:
            return launch_args.Shape(self._layout.rule.number, self._layout.planes, self._layout.policy.ema, segments)
        except ValueError as error:
            raise UnsupportedError(f"this optimizer cannot fold on a device: {error}") from error

    # -- setup: memory and handle tables -------------------------------------------------------------

    @property
    def owner_lanes(self) -> tuple[int, ...]:
        """The owner lane of each shard."""
        return self._layout.owner_lanes

    def show(self) -> None:
        """Allocate the shards that this lane owns, and write its handle table. The caller holds the shard locks."""
        table = np.zeros((), handle_table_dtype(len(self._regions)))
        for shard, region in enumerate(self._regions):
            if self.owner_lanes[shard] == self._rank:
                self._bases[shard] = self._device.allocate(region.size)
                table["memory"][shard] = np.void(self._device.export(self._bases[shard]))
        table["identity"] = self._device.identity.encode()
        table["computed"] = np.void(self._device.export_event(self._computed))
        table["folded"] = np.void(self._device.export_event(self._folded))
        table["ready"] = SHOWN
        self.handle_table(self._rank)[...] = table

    def handle_table(self, lane: int) -> Any:
        """A lane's handle table. It may change unless the caller holds the shard locks."""
        dtype = handle_table_dtype(len(self._regions))
        room = self._store.extra_view(lane)
        return room[self._layout.extra_bytes - dtype.itemsize :].view(dtype).reshape(())

    def is_ready(self) -> bool:
        """Whether all owner lanes wrote their handles, and lane 0 the first weights. The caller holds the shard locks."""
        tables = [self.handle_table(owner) for owner in self.owner_lanes]
        return all(table["ready"] >= SHOWN for table in tables) and (self._rank == 0 or self.handle_table(0)["ready"] >= FILLED)

    def open(self) -> None:
        """Map the memory of the other owner lanes. The caller holds the shard locks, or knows that the tables do not change."""
        for shard, owner in enumerate(self.owner_lanes):
            if owner != self._rank and not self._bases[shard]:
                self._bases[shard] = self._device.open(bytes(self.handle_table(owner)["memory"][shard]))

    def unmap(self) -> None:
        """Unmap the memory of other owner lanes. No views of it may exist any more."""
        for shard, owner in enumerate(self.owner_lanes):
            if owner != self._rank and self._bases[shard]:
                self._device.close(self._bases[shard])
                self._bases[shard] = 0

    def own_shards(self) -> list[int]:
        """The shards that this lane folds: those on its own device. With a server, only the server's lane folds."""
        if self._layout.has_server and self._rank < self._layout.lanes:
            return []
        return self.near_shards()

    def near_shards(self) -> list[int]:
        """The shards on this lane's device."""
        identity = self._device.identity.encode()
        return [
            shard for shard, owner in enumerate(self.owner_lanes) if self.handle_table(owner)["identity"].item() == identity
        ]

    def fill(self, weights: Sequence[npt.NDArray[np.float32]]) -> None:
        """Write the first weights (float32, one array per parameter), state and average; return when the copies are done."""
        rule = self._layout.rule
        size = max((4 * parameter.length for parameter in self._layout.parameters), default=0)
        staging = self._device.host_memory(max(size, 4))
        floats = staging[: size // 4 * 4].view(np.float32)
        for index, parameter in enumerate(self._layout.parameters):
            values = floats[: parameter.length]
            values[:] = weights[index].reshape(-1)
            self._write(self.weights_address(0, index), values)
            if self._layout.policy.ema:
                self._write(self.plane_address(0, self._layout.planes - 1, index), values)
            for plane in range(len(rule.planes)):
                if rule.initial_value(plane):
                    values[:] = rule.initial_value(plane)
                    self._write(self.plane_address(0, plane, index), values)
        self.handle_table(0)["ready"] = FILLED

    def _write(self, address: int, values: npt.NDArray[np.float32]) -> None:
        self._device.copy(address, values.ctypes.data, values.nbytes, self._stream)
        self._device.synchronize(self._stream)  # because the caller reuses the staging memory immediately

    # -- addresses -----------------------------------------------------------------------------------

    def weights_address(self, buffer: int, index: int) -> int:
        """This process's address of a parameter in a weights buffer."""
        base, region, offset = self._place(index)
        return base + region.weights(buffer) + 4 * offset

    def plane_address(self, buffer: int, plane: int, index: int) -> int:
        """This process's address of a parameter in an optimizer-state tensor of a state buffer."""
        base, region, offset = self._place(index)
        return base + region.state(buffer) + 4 * (region.floats * plane + offset)

    def gradient_address(self, lane: int, slot: int, index: int) -> int:
        """This process's address of a parameter's gradient in a lane's slot."""
        base, region, offset = self._place(index)
        return base + region.gradient(lane, slot) + region.gradient_bytes * offset

    def _place(self, index: int) -> tuple[int, Region, int]:
        """The address of a parameter's shard, the shard's layout, and the parameter's offset in each part, in floats."""
        parameter = self._layout.parameters[index]
        region = self._regions[parameter.shard]
        return self._bases[parameter.shard], region, parameter.offset - region.first

    def view(self, address: int, index: int, dtype: str = "float32") -> Any:
        """The flat values of a parameter at an address, as the device's type of array."""
        return self._device.view(address, self._layout.parameters[index].length, dtype)

    # -- order ---------------------------------------------------------------------------------------

    def mark_computed(self) -> None:
        """Order all work computed up to now before any later fold: gradients written, weights read for the last time."""
        self._device.record(self._computed, self._device.compute_stream())

    def await_folds(self) -> None:
        """Order all work computed from now on after all earlier folds."""
        stream = self._device.compute_stream()
        self._device.wait(self._folded, stream)
        for _, folded in self._present_peers():
            self._device.wait(folded, stream)

    def synchronize_all(self) -> None:
        """Block the host until this lane's folds and computations are done. Raises DeviceError if a fold failed."""
        self._device.synchronize(self._stream)
        self._device.synchronize_all()

    def _present_peers(self) -> list[tuple[Event, Event]]:
        """The two events of each other present lane. A lane that has left waited for its folds before it left."""
        found = []
        for lane, (_, state) in enumerate(self._store.arena.members()):
            if lane == self._rank or state not in PRESENT:
                continue
            if lane not in self._peers:
                table = self.handle_table(lane)
                if table["ready"] < SHOWN:
                    continue  # the lane has posted no push yet
                handles = bytes(table["computed"]), bytes(table["folded"])
                self._peers[lane] = self._device.open_event(handles[0]), self._device.open_event(handles[1])
            found.append(self._peers[lane])
        return found

    # -- the fold ------------------------------------------------------------------------------------

    def fold(self, call: FoldCall) -> None:
        """Queue a fold; the function given to Lane.fold_with. Returns immediately; the combiner then flips the commit word."""
        shard = call.shard
        region, base, shape = self._regions[shard], self._bases[shard], self._shapes[shard]
        buffers = launch_args.Buffers(
            base + region.weights(call.weights_in),
            base + region.weights(call.weights_out),
            base + region.state(call.state_in),
            base + region.state(call.state_out),
            region.floats,
        )
        span = self._span_of(shard)
        steps_in, steps_out = self._store.all_steps(call.state_in)[span], self._store.all_steps(call.state_out)[span]
        made = []
        for push in call.pushes:
            hypers, present = self._store.slot_words(push.lane, push.slot)
            gradient = base + region.gradient(push.lane, push.slot)
            made.append(launch_args.DevicePush(gradient, hypers, present[span], push.scale, push.rate_scale))
        order, counted = launch_args.make_launch_args(
            shape, call.mode, made, steps_in, buffers, scale=call.scale, rate_scale=call.rate_scale
        )
        for computed, folded in self._present_peers():
            self._device.wait(computed, self._stream)
            self._device.wait(folded, self._stream)
        self._device.wait(self._computed, self._stream)
        tiles, blocks = self._tiles_of(shard)
        address = self._ring.upload(order, self._stream)
        self._device.launch_fold(shape.rule, self._layout.gradient_type, address, tiles, blocks, self._stream)
        self._device.record(self._folded, self._stream)
        steps_out[:] = counted
        self.folds += 1

    def _span_of(self, shard: int) -> slice:
        """The indices of a shard's parameters, which are contiguous."""
        numbers = [index for index, parameter in enumerate(self._layout.parameters) if parameter.shard == shard]
        return slice(numbers[0], numbers[-1] + 1)

    def _tiles_of(self, shard: int) -> tuple[int, int]:
        """The address and length of the shard's tile table on this device; the shard's first fold writes it."""
        if shard not in self._tiles:
            tiles = launch_args.tiles_of(self._shapes[shard])
            address = self._device.allocate(max(256, tiles.nbytes))
            if tiles.nbytes:
                staging = self._device.host_memory(tiles.nbytes)
                staging[:] = tiles
                self._device.copy(address, staging.ctypes.data, tiles.nbytes, self._stream)
            self._tiles[shard] = address, tiles.nbytes // host_fold.TILE_BYTES
        return self._tiles[shard]


class OrderRing:
    """Work items in flight to the device. Pinned memory that holds one is not reused before its copy is done."""

    def __init__(self, device: Device, entries: int = _RING_ENTRIES) -> None:
        self._device = device
        self._entries = entries
        self._next = 0
        self._capacity = 0
        self._events = [device.make_event() for _ in range(entries)]

    def upload(self, order: npt.NDArray[np.uint8], stream: Stream) -> int:
        """Queue a copy of a work item; returns its address on the device, valid for the work queued next on `stream`.

        An entry is reused after `entries` uploads, in the order of the one stream that uses this ring.
        """
        if order.nbytes > self._capacity:
            self._grow(order.nbytes)
        index = self._next % self._entries
        self._next += 1
        if self._next > self._entries:
            self._device.synchronize_event(self._events[index])  # waits only if the host is a whole ring ahead of the device
        staging = self._staging[index]
        staging[: order.nbytes] = order
        address = self._address + index * self._capacity
        self._device.copy(address, staging.ctypes.data, order.nbytes, stream)
        self._device.record(self._events[index], stream)
        return address

    def _grow(self, size: int) -> None:
        """Allocate larger entries. The old memory stays until the device is shut, because the stream may still read it."""
        self._capacity = max(_LEAST_ARGS_BYTES, 1 << (size - 1).bit_length())
        self._address = self._device.allocate(self._capacity * self._entries)
        self._staging = [self._device.host_memory(self._capacity) for _ in range(self._entries)]
