"""The part of an arena that lies on devices: where a shard's weights, state and gradients are, who may fold them, and in what
order all of it happens.

The control words stay in the shared arena; a shard's floats are one allocation of its home, the lane that the layout names for
it. Every lane shows a board in the arena: its device, the handles of its two events and those of the memory that it is home of.
A lane on a shard's own device folds it; the others only push and pull. Where a server process is home of all shards, it alone
folds.

Two events a lane order everything. `computed` is recorded on the stream that computes, when a push is posted and when weights
are let go; `folded` on the stream that folds, after each fold. A fold waits for both of every lane; a pull waits for every
lane's `folded`. The host waits for nothing: the commit word says what will be true once the streams have come to it, and only
those who waited for the events read it.

Refuses to decide what is folded (kernels/scheduling/scheduler.pyx), to know torch (torch_cuda.py), and to survive a home's
death: its memory is gone with it, so the job ends with a named error and is started again from its last checkpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fastps.device.interface import HANDLE_BYTES, Device, Event, Stream
from fastps.errors import UnsupportedError
from fastps.kernels.cuda import host_fold as device_fold
from fastps.kernels.cuda import launch_args as device_order
from fastps.kernels.shm.arena import LANE_LEAVING, LANE_LIVE, LANE_SERVING, STATE_BUFFERS

if TYPE_CHECKING:
    from fastps.job.layout import Layout
    from fastps.store.store import Store

SHOWN, FILLED = 1, 2  # a board's `ready`: handles are there; and the first weights have been written (lane 0)
_RING_ENTRIES = 8  # orders that may be on their way to the device at a time
_LEAST_ORDER_BYTES = 1 << 16
PRESENT = (LANE_LIVE, LANE_LEAVING, LANE_SERVING)


def board_dtype(shards: int) -> np.dtype[Any]:
    """A lane's board, at the end of its room for model buffers. Written and read under the turns."""
    handle = f"V{HANDLE_BYTES}"
    return np.dtype(
        [("ready", "<i8"), ("identity", "S56"), ("computed", handle), ("folded", handle), ("memory", handle, (shards,))]
    )


def board_bytes(shards: int) -> int:
    """Size of a board.

    >>> board_bytes(1)
    256
    """
    return board_dtype(shards).itemsize


@dataclass(frozen=True)
class Region:
    """What lies where in the one allocation of a shard: `floats` of it from `first` of a buffer; distances in bytes."""

    first: int
    floats: int
    buffers: int
    planes: int
    lanes: int
    slots: int
    gradient_bytes: int  # of one value

    def weights(self, buffer: int) -> int:
        """A weights buffer."""
        return 4 * self.floats * buffer

    def state(self, buffer: int) -> int:
        """The planes of one of the buffers of rule state, one after the other."""
        return 4 * self.floats * (self.buffers + self.planes * buffer)

    def gradient(self, lane: int, slot: int) -> int:
        """A lane's slot."""
        begin = 4 * self.floats * (self.buffers + STATE_BUFFERS * self.planes)
        return begin + self.gradient_bytes * self.floats * (lane * self.slots + slot)

    @property
    def size(self) -> int:
        """Bytes in all; more than 0, for nobody can allocate nothing."""
        return max(256, self.gradient(self.lanes, 0))


def regions_of(layout: "Layout") -> list[Region]:
    """The region of each shard."""
    measures = layout.buffers, layout.planes, layout.workers, layout.slots, device_order.DTYPE_BYTES[layout.gradient_type]
    return [Region(first, last - first, *measures) for first, last in layout.shards]


class DeviceArena:
    """One lane's side of the arena on devices. Made when its worker attaches; only that worker uses it."""

    def __init__(self, store: "Store", rank: int, device: Device) -> None:
        self._store = store
        self._layout = store.layout
        self._rank = rank
        self._device = device
        self._regions = regions_of(self._layout)
        self._bases: list[int] = [0] * len(self._regions)
        self._computed, self._folded = device.make_event(), device.make_event()
        self._stream: Stream = device.make_stream()
        self._peers: dict[int, tuple[Event, Event]] = {}
        self._shapes = [self._shape_of(shard) for shard in range(len(self._regions))]
        self._tiles: dict[int, tuple[int, int]] = {}  # of a shard: address and number
        self._ring = OrderRing(device)
        self.folds = 0

    def _shape_of(self, shard: int) -> device_order.Shape:
        parameters = [parameter for parameter in self._layout.parameters if parameter.shard == shard]
        first = self._regions[shard].first
        segments = tuple((parameter.offset - first, parameter.length, parameter.group) for parameter in parameters)
        try:
            return device_order.Shape(self._layout.rule.number, self._layout.planes, self._layout.policy.ema, segments)
        except ValueError as error:
            raise UnsupportedError(f"this optimizer cannot fold on a device: {error}") from error

    # -- the beginning: who has what -----------------------------------------------------------------

    @property
    def homes(self) -> tuple[int, ...]:
        """The lane that each shard's memory belongs to."""
        return self._layout.homes

    def show(self) -> None:
        """Allocate the shards that this lane is home of, and write its board. The caller holds the turns."""
        board = np.zeros((), board_dtype(len(self._regions)))
        for shard, region in enumerate(self._regions):
            if self.homes[shard] == self._rank:
                self._bases[shard] = self._device.allocate(region.size)
                board["memory"][shard] = np.void(self._device.export(self._bases[shard]))
        board["identity"] = self._device.identity.encode()
        board["computed"] = np.void(self._device.export_event(self._computed))
        board["folded"] = np.void(self._device.export_event(self._folded))
        board["ready"] = SHOWN
        self.board(self._rank)[...] = board

    def board(self, lane: int) -> Any:
        """A lane's board. Only who holds the turns may rely on it."""
        dtype = board_dtype(len(self._regions))
        room = self._store.extra_view(lane)
        return room[self._layout.extra_bytes - dtype.itemsize :].view(dtype).reshape(())

    def is_ready(self) -> bool:
        """Whether all homes show their memory, and lane 0 the first weights. The caller holds the turns."""
        boards = [self.board(home) for home in self.homes]
        return all(board["ready"] >= SHOWN for board in boards) and (self._rank == 0 or self.board(0)["ready"] >= FILLED)

    def open(self) -> None:
        """Map the memory of the other homes. The caller holds the turns, or knows that boards stay as they are."""
        for shard, home in enumerate(self.homes):
            if home != self._rank and not self._bases[shard]:
                self._bases[shard] = self._device.open(bytes(self.board(home)["memory"][shard]))

    def unmap(self) -> None:
        """Let go of the memory of other homes; there are no views of it any more."""
        for shard, home in enumerate(self.homes):
            if home != self._rank and self._bases[shard]:
                self._device.close(self._bases[shard])
                self._bases[shard] = 0

    def own_shards(self) -> list[int]:
        """The shards that this lane folds: those on its own device, or with a server none but the server's."""
        if self._layout.has_server and self._rank < self._layout.lanes:
            return []
        return self.near_shards()

    def near_shards(self) -> list[int]:
        """The shards on this lane's device."""
        identity = self._device.identity.encode()
        return [shard for shard, home in enumerate(self.homes) if self.board(home)["identity"].item() == identity]

    def fill(self, weights: Sequence[npt.NDArray[np.float32]]) -> None:
        """Write the first weights (float32 of each parameter), state and average; return when they are there."""
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
        self.board(0)["ready"] = FILLED

    def _write(self, address: int, values: npt.NDArray[np.float32]) -> None:
        self._device.copy(address, values.ctypes.data, values.nbytes, self._stream)
        self._device.synchronize(self._stream)  # the staging is used again at once

    # -- places --------------------------------------------------------------------------------------

    def weights_address(self, buffer: int, index: int) -> int:
        """The address here of a parameter in a weights buffer."""
        base, region, offset = self._place(index)
        return base + region.weights(buffer) + 4 * offset

    def plane_address(self, buffer: int, plane: int, index: int) -> int:
        """The address here of a parameter in a plane of a buffer of rule state."""
        base, region, offset = self._place(index)
        return base + region.state(buffer) + 4 * (region.floats * plane + offset)

    def gradient_address(self, lane: int, slot: int, index: int) -> int:
        """The address here of a parameter's gradient in a lane's slot."""
        base, region, offset = self._place(index)
        return base + region.gradient(lane, slot) + region.gradient_bytes * offset

    def _place(self, index: int) -> tuple[int, Region, int]:
        """Where a parameter's shard begins here, what lies in it, and how far into each part the parameter is, in floats."""
        parameter = self._layout.parameters[index]
        region = self._regions[parameter.shard]
        return self._bases[parameter.shard], region, parameter.offset - region.first

    def view(self, address: int, index: int, dtype: str = "float32") -> Any:
        """Memory at an address as the flat values of a parameter, of the device's kind of array."""
        return self._device.view(address, self._layout.parameters[index].length, dtype)

    # -- order ---------------------------------------------------------------------------------------

    def mark_computed(self) -> None:
        """What was computed up to now comes before any fold from now on: gradients written, weights read for the last time."""
        self._device.record(self._computed, self._device.compute_stream())

    def await_folds(self) -> None:
        """What is computed from now on comes after all folds up to now."""
        stream = self._device.compute_stream()
        self._device.wait(self._folded, stream)
        for _, folded in self._present_peers():
            self._device.wait(folded, stream)

    def synchronize_all(self) -> None:
        """Wait, on the host, until this lane's folds and all that it computes are done. Raises DeviceError if a fold failed."""
        self._device.synchronize(self._stream)
        self._device.synchronize_all()

    def _present_peers(self) -> list[tuple[Event, Event]]:
        """The two events of each other lane that is there; one that has left has waited for its folds before."""
        found = []
        for lane, (_, state) in enumerate(self._store.arena.members()):
            if lane == self._rank or state not in PRESENT:
                continue
            if lane not in self._peers:
                board = self.board(lane)
                if board["ready"] < SHOWN:
                    continue  # it has posted nothing yet
                handles = bytes(board["computed"]), bytes(board["folded"])
                self._peers[lane] = self._device.open_event(handles[0]), self._device.open_event(handles[1])
            found.append(self._peers[lane])
        return found

    # -- the fold ------------------------------------------------------------------------------------

    def fold(
        self,
        shard: int,
        mode: int,
        scale: float,
        rate_scale: float,
        weights_in: int,
        weights_out: int,
        state_in: int,
        state_out: int,
        pushes: Sequence[tuple[int, int, float, float]],
    ) -> None:
        """Queue a fold: what Lane.fold_with is given. Returns at once; the turn's holder then flips the commit word."""
        region, base, shape = self._regions[shard], self._bases[shard], self._shapes[shard]
        buffers = device_order.Buffers(
            base + region.weights(weights_in),
            base + region.weights(weights_out),
            base + region.state(state_in),
            base + region.state(state_out),
            region.floats,
        )
        span = self._span_of(shard)
        steps_in, steps_out = self._steps(state_in)[span], self._steps(state_out)[span]
        made = [
            device_order.DevicePush(base + region.gradient(lane, slot), *self._slot_words(lane, slot, span), *scales)
            for lane, slot, *scales in pushes
        ]
        order, counted = device_order.make_order(shape, mode, made, steps_in, buffers, scale=scale, rate_scale=rate_scale)
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
        """The numbers of a shard's parameters, which follow one another."""
        numbers = [index for index, parameter in enumerate(self._layout.parameters) if parameter.shard == shard]
        return slice(numbers[0], numbers[-1] + 1)

    def _steps(self, buffer: int) -> npt.NDArray[np.int64]:
        """Every parameter's count of applications, which stays in the shared arena."""
        count = len(self._layout.parameters)
        return np.frombuffer(self._store.memory, np.int64, count, self._store.arena.steps_offset(buffer))

    def _slot_words(self, lane: int, slot: int, span: slice) -> tuple[list[tuple[float, ...]], npt.NDArray[np.bool_]]:
        """The hyper-parameters and presence bits that travel with a push: see fps_hyper of kernels/update/fold.h."""
        begin = self._store.arena.slot_offset(lane, slot)
        groups, count = self._layout.groups, len(self._layout.parameters)
        words = np.frombuffer(self._store.memory, np.float64, 16 * groups, begin).reshape(groups, 16)
        flags = words[:, 15].copy().view(np.uint64)
        hypers = [(*row[:8], int(flag)) for row, flag in zip(words.tolist(), flags.tolist(), strict=True)]
        present = np.frombuffer(self._store.memory, np.uint8, 8 * -(-count // 64), begin + 128 * groups)
        return hypers, np.unpackbits(present, count=count, bitorder="little").view(np.bool_)[span]

    def _tiles_of(self, shard: int) -> tuple[int, int]:
        """The shard's table of tiles on this device; written there at its first fold."""
        if shard not in self._tiles:
            tiles = device_order.tiles_of(self._shapes[shard])
            address = self._device.allocate(max(256, tiles.nbytes))
            if tiles.nbytes:
                staging = self._device.host_memory(tiles.nbytes)
                staging[:] = tiles
                self._device.copy(address, staging.ctypes.data, tiles.nbytes, self._stream)
            self._tiles[shard] = address, tiles.nbytes // device_fold.TILE_BYTES
        return self._tiles[shard]


class OrderRing:
    """Orders on their way to the device: each is copied from pinned memory that is not written again before that is done."""

    def __init__(self, device: Device, entries: int = _RING_ENTRIES) -> None:
        self._device = device
        self._entries = entries
        self._next = 0
        self._capacity = 0
        self._events = [device.make_event() for _ in range(entries)]

    def upload(self, order: npt.NDArray[np.uint8], stream: Stream) -> int:
        """Queue the copy; returns the address on the device, which holds the order for work that is queued next on `stream`.

        The entry is used again after as many uploads as there are entries, in the order of the one stream that uses this ring.
        """
        if order.nbytes > self._capacity:
            self._grow(order.nbytes)
        index = self._next % self._entries
        self._next += 1
        self._device.synchronize_event(self._events[index])  # over long ago, unless the host is that far ahead
        staging = self._staging[index]
        staging[: order.nbytes] = order
        address = self._address + index * self._capacity
        self._device.copy(address, staging.ctypes.data, order.nbytes, stream)
        self._device.record(self._events[index], stream)
        return address

    def _grow(self, size: int) -> None:
        """Room for larger orders; the old memory stays until the device is shut, for the stream may still read it."""
        self._capacity = max(_LEAST_ORDER_BYTES, 1 << (size - 1).bit_length())
        self._address = self._device.allocate(self._capacity * self._entries)
        self._staging = [self._device.host_memory(self._capacity) for _ in range(self._entries)]
