"""The part of an arena that is on devices: where a shard's weights, state and gradients are, which lanes fold, in what order.

The control words stay in the shared arena. Each shard has a home, the device of its owner lane, which the layout names; its
weights and state are one allocation there. A lane's slots lie on the lane's own device, or, with a server, on the server's.
Every lane writes a handle table in the arena: its device, and the handles of its two events and of the memory that it owns.

A lane on a shard's home folds the shard: the kernel reads the slots of other devices over peer mappings. Where a device is not
reached, the lane copies its gradients to host memory before it posts them, and the home mirrors its weights there. A lane
shows its model the home's weights themselves where it shares the home, and else a replica on its own device, which a pull
copies.

Two events per lane order all work. A lane records `computed` on its compute stream when it posts a push and when it releases
weights, and `folded` on its fold stream after each fold. A fold waits for `computed` of every lane, and for `folded` of the
lanes on its device; a pull waits for every lane's `folded`. The host does not wait: the commit word describes the state that
the streams will reach, and only work that has waited for the events reads that state.

Memory does not survive its owner: the job then ends with an error that names the worker, and must be restarted.

A job that goes on without lost workers has a server, which owns all memory. Its workers wait, on the host, for their own work
before they post a push or release weights: so a push counts only when its gradients are there, and no fold waits for the event
of a process that may die. A fold then waits for nothing but the folds of the server itself.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fastps.device.interface import HANDLE_BYTES, Device, Event, Stream
from fastps.device.plan import FILLED, LEAST_BYTES, SHOWN, Region, handle_table_dtype, regions_of, slots_of
from fastps.device.work_items import MOST_ITEMS, WorkItems
from fastps.errors import UnsupportedError
from fastps.kernels.cuda import host_fold, launch_args
from fastps.kernels.protocol.fold_call import FoldCall
from fastps.kernels.shm.arena import LANE_LEAVING, LANE_LIVE, LANE_SERVING

if TYPE_CHECKING:
    from fastps.membership.job_memory import JobMemory

PRESENT = (LANE_LIVE, LANE_LEAVING, LANE_SERVING)
_NOTHING = bytes(HANDLE_BYTES)


class DeviceArena:
    """One lane's side of the arena on devices. Its worker makes it on attaching, and is its only user."""

    def __init__(self, store: "JobMemory", rank: int, device: Device, *, items: int = MOST_ITEMS) -> None:
        """`items`: how many work items may be in flight."""
        self._store = store
        self._layout = store.layout
        self._rank = rank
        self._device = device
        self._regions = regions_of(self._layout)
        self._slots = slots_of(self._layout)
        self._parameters = [
            [index for index, parameter in enumerate(self._layout.parameters) if parameter.shard == shard]
            for shard in range(len(self._regions))
        ]
        self._bases = [0] * len(self._regions)  # 0: out of reach
        self._mirrors = [0] * len(self._regions)  # 0: the home has none
        self._lane_slots: dict[int, int] = {}  # by the lane that owns them
        self._slot_copies: dict[int, int] = {}
        self._own: set[int] = set()  # of those, this lane's allocations
        self._replica: int | None = None
        self._shown: dict[int, int] = {}  # by shard: the buffer of which the replica is
        self._computed, self._folded, self._copied = device.make_event(), device.make_event(), device.make_event()
        self._stream: Stream = device.make_stream()
        self._copies: Stream = device.make_stream()
        device.record(self._computed, device.compute_stream())  # so that no stream waits for an event without a record
        device.record(self._folded, self._stream)
        self._peers: dict[int, tuple[Event, Event]] = {}
        self._identities: dict[int, bytes] = {}
        self._shapes = [self._shape_of(shard) for shard in range(len(self._regions))]
        self._tiles: dict[int, tuple[int, int]] = {}  # by shard: address and number of tiles
        self._items = WorkItems(device, items)
        self.folds = 0

    def _shape_of(self, shard: int) -> launch_args.Shape:
        parameters = [self._layout.parameters[index] for index in self._parameters[shard]]
        first = self._regions[shard].first
        segments = tuple((parameter.offset - first, parameter.length, parameter.group) for parameter in parameters)
        try:
            return launch_args.Shape(self._layout.rule.number, self._layout.planes, self._layout.policy.ema, segments)
        except ValueError as error:
            raise UnsupportedError(f"this optimizer cannot fold on a device: {error}") from error

    def parts(self) -> dict[str, Event | Stream]:
        """This lane's events and streams by name, for checks that leave one out."""
        named: dict[str, Event | Stream] = {"computed": self._computed, "folded": self._folded, "copied": self._copied}
        named |= {f"item {index}": event for index, event in enumerate(self._items.events)}
        return named | {"compute": self._device.compute_stream(), "fold": self._stream, "copies": self._copies}

    # -- setup: memory and handle tables -------------------------------------------------------------

    @property
    def owner_lanes(self) -> tuple[int, ...]:
        """The owner lane of each shard."""
        return self._layout.owner_lanes

    @property
    def owns_memory(self) -> bool:
        """Whether other lanes map memory of this lane."""
        return bool(self._own)

    def _slot_owner(self, lane: int) -> int:
        """The lane that owns a lane's slots."""
        return self._layout.lanes if self._layout.has_server else lane

    def show(self, *, is_first: bool = True) -> None:
        """Allocate the shards and slots that this lane owns, and write its handle table. The caller holds the shard locks.

        `is_first`: whether this is the lane's first owner; a later one finds the first weights written.
        """
        table, device = np.zeros((), handle_table_dtype(len(self._regions))), self._device
        is_apart = not device.reaches_all and not self._layout.has_server
        for shard, region in enumerate(self._regions):
            if self.owner_lanes[shard] == self._rank:
                self._bases[shard] = self._allocated(region.size)
                table["memory"][shard] = np.void(device.export(self._bases[shard]))
                if is_apart:
                    self._mirrors[shard] = self._allocated(region.mirror_size, on_host=True)
                    table["mirrors"][shard] = np.void(device.export_host(self._mirrors[shard]))
        if self._slot_owner(self._rank) == self._rank:
            self._lane_slots[self._rank] = self._allocated(self._slots.size)
            table["slots"] = np.void(device.export(self._lane_slots[self._rank]))
            if is_apart:
                self._slot_copies[self._rank] = self._allocated(self._slots.size, on_host=True)
                table["slot_copies"] = np.void(device.export_host(self._slot_copies[self._rank]))
        table["identity"] = device.identity.encode()
        table["computed"] = np.void(device.export_event(self._computed))
        table["folded"] = np.void(device.export_event(self._folded))
        shown = self.handle_table(self._rank)
        shown[...] = table
        shown["ready"] = SHOWN if is_first else FILLED  # last, for a pull reads it without the locks

    def _allocated(self, size: int, *, on_host: bool = False) -> int:
        address = self._device.allocate_host(size) if on_host else self._device.allocate(size)
        self._own.add(address)
        return address

    def handle_table(self, lane: int) -> Any:
        """A lane's handle table. It may change unless the caller holds the shard locks."""
        dtype = handle_table_dtype(len(self._regions))
        room = self._store.extra_view(lane)
        return room[self._layout.extra_bytes - dtype.itemsize :].view(dtype).reshape(())

    def is_shown(self) -> bool:
        """Whether the owners of all shards, and of this lane's slots, wrote their handles. The caller holds the shard locks."""
        owners = {*self.owner_lanes, self._slot_owner(self._rank)}
        return all(self.handle_table(owner)["ready"] >= SHOWN for owner in owners)

    def is_filled(self) -> bool:
        """Whether lane 0 wrote the first weights, as far as it reaches. The caller holds the shard locks."""
        return bool(self.handle_table(0)["ready"] >= FILLED)

    def is_ready(self) -> bool:
        """Whether all first weights are in their places. The caller holds the shard locks."""
        late = {owner for owner in self.owner_lanes if self._is_apart(owner)}
        return self.is_filled() and all(self.handle_table(owner)["ready"] >= FILLED for owner in late)

    def _is_apart(self, owner: int) -> bool:
        """Whether lane 0 writes a home's first weights into its mirror: it could not reach it, and does not try."""
        table = self.handle_table(owner)
        return owner != 0 and bytes(table["mirrors"][self.owner_lanes.index(owner)]) != _NOTHING

    def open(self) -> None:
        """Map the homes and slots that this lane uses, and make its replica. The caller holds the shard locks."""
        for shard, owner in enumerate(self.owner_lanes):
            if owner == self._rank:
                continue
            table = self.handle_table(owner)
            if self._device.can_reach(self._identity(owner).decode()):
                self._bases[shard] = self._device.open(bytes(table["memory"][shard]))
            if (handle := bytes(table["mirrors"][shard])) != _NOTHING:
                self._mirrors[shard] = self._device.open_host(handle)
            if not self._bases[shard] and not self._mirrors[shard]:
                raise UnsupportedError(
                    f"expected peer access between {self._device.identity} and {self._identity(owner).decode()} in both"
                    " directions or in neither, found it in one: use FASTPS_PLACEMENT=host"
                )
        if self._rank < self._layout.lanes:
            self._open_slots(self._rank)
            if len(self.near_shards()) < len(self._regions):
                self._replica = self._device.allocate(max(LEAST_BYTES, 4 * self._layout.buffer_floats))

    def _open_slots(self, lane: int) -> tuple[int, int]:
        """Map a lane's slots; returns their address, and that of their copies in host memory where they are not reached."""
        owner = self._slot_owner(lane)
        if owner not in self._lane_slots and owner not in self._slot_copies:
            table = self.handle_table(owner)
            if self._device.can_reach(self._identity(owner).decode()):
                self._lane_slots[owner] = self._device.open(bytes(table["slots"]))
            else:
                self._slot_copies[owner] = self._device.open_host(bytes(table["slot_copies"]))
        return self._lane_slots.get(owner, 0), self._slot_copies.get(owner, 0)

    def unmap(self) -> None:
        """Unmap the memory of other lanes. No views of it may exist any more, and no work on it may be queued."""
        for addresses in (self._bases, self._mirrors, [*self._lane_slots.values()], [*self._slot_copies.values()]):
            for address in addresses:
                if address and address not in self._own:
                    self._device.close(address)
        self._bases, self._mirrors = [0] * len(self._regions), [0] * len(self._regions)
        self._lane_slots.clear()
        self._slot_copies.clear()

    def own_shards(self) -> list[int]:
        """The shards that this lane folds: those on its own device. With a server, only the server's lane folds."""
        if self._layout.has_server and self._rank < self._layout.lanes:
            return []
        return self.near_shards()

    def near_shards(self) -> list[int]:
        """The shards on this lane's device."""
        return [shard for shard in range(len(self._regions)) if self._is_near(shard)]

    def _is_near(self, shard: int) -> bool:
        return self._identity(self.owner_lanes[shard]) == self._device.identity.encode()

    def _identity(self, lane: int) -> bytes:
        """The device of a lane that has shown its handles."""
        if lane not in self._identities:
            self._identities[lane] = bytes(self.handle_table(lane)["identity"].item())
        return self._identities[lane]

    def fill(self, weights: Sequence[npt.NDArray[np.float32]]) -> None:
        """Write the first weights (float32, one array per parameter), state and average; return when the copies are done.

        A home that has a mirror finds them there, and takes them by `take_first`.
        """
        for shard, owner in enumerate(self.owner_lanes):
            is_direct = not self._is_apart(owner)
            for index in self._parameters[shard]:
                source = self._staged(weights[index].reshape(-1))
                if self._mirrors[shard]:
                    self._write(self._mirrors[shard] + self._inside(index), source, index)
                if is_direct:
                    self._begin_at_home(index, source)
        self.handle_table(0)["ready"] = FILLED

    def take_first(self) -> None:
        """Take the first weights of this lane's shards from their mirrors, if lane 0 wrote them there."""
        if self._rank not in self.owner_lanes or not self._is_apart(self._rank):
            return
        for shard, owner in enumerate(self.owner_lanes):
            for index in self._parameters[shard] if owner == self._rank else ():
                self._begin_at_home(index, self._mirrors[shard] + self._inside(index))
        self.handle_table(self._rank)["ready"] = FILLED

    def _begin_at_home(self, index: int, source: int) -> None:
        """Write a parameter's first weights, which are at `source`, and its first state."""
        rule, length = self._layout.rule, self._layout.parameters[index].length
        self._write(self.weights_address(0, index), source, index)
        if self._layout.policy.ema:
            self._write(self.plane_address(0, self._layout.planes - 1, index), source, index)
        for plane in range(len(rule.planes)):
            if rule.initial_value(plane):
                source = self._staged(np.full(length, rule.initial_value(plane), np.float32))
                self._write(self.plane_address(0, plane, index), source, index)

    def _staged(self, values: npt.NDArray[np.float32]) -> int:
        """The address of a copy of the values, for the writes up to the next call."""
        if self._staging is None:
            longest = max(parameter.length for parameter in self._layout.parameters)
            self._staging = self._device.host_memory(max(LEAST_BYTES, 4 * longest))
        self._staging[: values.nbytes].view(np.float32)[:] = values
        return int(self._staging.ctypes.data)

    def _write(self, address: int, source: int, index: int) -> None:
        if size := 4 * self._layout.parameters[index].length:
            self._device.copy(address, source, size, self._stream)
            self._device.synchronize(self._stream)  # because the staging memory is used again

    _staging: npt.NDArray[np.uint8] | None = None

    # -- addresses -----------------------------------------------------------------------------------

    def weights_address(self, buffer: int, index: int) -> int:
        """This process's address of a parameter in a weights buffer at its home. Raises UnsupportedError."""
        base, region, offset = self._place(index)
        return base + region.weights(buffer) + 4 * offset

    def shown_address(self, buffer: int, index: int) -> int:
        """The address at which the model sees a parameter of a pulled buffer: at a home that is near, else in the replica."""
        shard = self._layout.parameters[index].shard
        if self._is_near(shard):
            return self.weights_address(buffer, index)
        assert self._replica is not None
        return self._replica + 4 * self._layout.parameters[index].offset

    def plane_address(self, buffer: int, plane: int, index: int) -> int:
        """This process's address of a parameter in an optimizer-state tensor of a state buffer. Raises UnsupportedError."""
        base, region, offset = self._place(index)
        return base + region.state(buffer) + 4 * (region.floats * plane + offset)

    def gradient_address(self, lane: int, slot: int, index: int) -> int:
        """This process's address of a parameter's gradient in a lane's slot on that lane's device."""
        slots, _ = self._open_slots(lane)
        if not slots:
            raise UnsupportedError(
                f"the slots of lane {lane} are on a GPU that {self._device.identity} does not reach: expected peer access, or"
                " FASTPS_PLACEMENT=host"
            )
        return slots + self._slots.offset(lane, slot, self._layout.parameters[index].offset)

    def _inside(self, index: int) -> int:
        """The offset in bytes of a parameter in weights buffer 0 of its home."""
        return 4 * (self._layout.parameters[index].offset - self._regions[self._layout.parameters[index].shard].first)

    def _place(self, index: int) -> tuple[int, Region, int]:
        """The address of a parameter's shard, the shard's layout, and the parameter's offset in each part, in floats."""
        parameter = self._layout.parameters[index]
        region, base = self._regions[parameter.shard], self._bases[parameter.shard]
        if not base:
            raise UnsupportedError(
                f"parameter {parameter.name!r} is on a GPU that {self._device.identity} does not reach: expected peer access to"
                " read or write whole versions, or FASTPS_PLACEMENT=host"
            )
        return base, region, parameter.offset - region.first

    def view(self, address: int, index: int, dtype: str = "float32") -> Any:
        """The flat values of a parameter at an address, as the device's type of array."""
        return self._device.view(address, self._layout.parameters[index].length, dtype)

    # -- order ---------------------------------------------------------------------------------------

    def mark_computed(self, slot: int | None = None) -> None:
        """Order all work computed up to now before any later fold: gradients written, weights read for the last time.

        `slot`: the one that is pushed next; homes that do not reach this device find their part of it in host memory.
        """
        stream = self._device.compute_stream()
        if slot is not None and self._rank in self._slot_copies:
            slots, copies = self._lane_slots[self._rank], self._slot_copies[self._rank]
            for shard, region in enumerate(self._regions):
                if region.floats and not self._device.can_reach(self._identity(self.owner_lanes[shard]).decode()):
                    offset = self._slots.offset(self._rank, slot, region.first)
                    self._device.copy(copies + offset, slots + offset, self._slots.bytes * region.floats, stream)
        self._device.record(self._computed, stream)
        if self._layout.faults.continues:
            self._device.synchronize_event(self._computed)

    def await_folds(self) -> None:
        """Order all work computed from now on after all earlier folds."""
        stream = self._device.compute_stream()
        self._device.wait(self._folded, stream)
        for _, _, folded in self._present_peers():
            self._device.wait(folded, stream)

    def show_pulled(self, buffers: Sequence[int]) -> None:
        """Order all work computed from now on after the folds of these buffers, and after the copies of distant ones.

        The copies wait for what read the replica before, and for the folds, but not the host. Call `mark_computed` before.
        """
        self.await_folds()
        if self._replica is None:
            return
        distant = [shard for shard in range(len(self._regions)) if not self._is_near(shard)]
        changed = [shard for shard in distant if self._shown.get(shard) != buffers[shard] and self._regions[shard].floats]
        if not changed:
            return
        self._device.wait(self._computed, self._copies)
        for _, _, folded in self._present_peers():
            self._device.wait(folded, self._copies)
        # Each lane begins with another home: if all read one home at a time, its link would be the only one in use.
        for shard in sorted(changed, key=lambda each: (self.owner_lanes[each] - self._rank) % self._layout.lanes):
            region = self._regions[shard]
            source = (self._bases[shard] or self._mirrors[shard]) + region.weights(buffers[shard])
            self._device.copy(self._replica + 4 * region.first, source, 4 * region.floats, self._copies)
            self._shown[shard] = buffers[shard]
        self._device.record(self._copied, self._copies)
        self._device.wait(self._copied, self._device.compute_stream())

    def synchronize_all(self) -> None:
        """Block the host until this lane's folds and computations are done. Raises DeviceError if a fold failed."""
        self._device.synchronize(self._stream)
        self._device.synchronize_all()

    def _present_peers(self) -> Iterator[tuple[int, Event, Event]]:
        """Each other present lane and its two events. A lane that has left waited for its folds before it left."""
        for lane, (_, state) in enumerate(self._store.arena.members()):
            if lane == self._rank or state not in PRESENT:
                continue
            if self._layout.faults.continues and lane < self._layout.lanes:
                continue  # a worker, which does not fold, and whose events may never come
            if lane not in self._peers:
                table = self.handle_table(lane)
                if table["ready"] < SHOWN:
                    continue  # the lane has posted no push yet
                handles = bytes(table["computed"]), bytes(table["folded"])
                self._peers[lane] = self._device.open_event(handles[0]), self._device.open_event(handles[1])
            yield lane, *self._peers[lane]

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
        span = slice(self._parameters[shard][0], self._parameters[shard][-1] + 1)  # they are contiguous
        steps_in, steps_out = self._store.all_steps(call.state_in)[span], self._store.all_steps(call.state_out)[span]
        made = []
        for push in call.pushes:
            hypers, present = self._store.slot_words(push.lane, push.slot)
            slots, copies = self._open_slots(push.lane)
            gradient = (slots or copies) + self._slots.offset(push.lane, push.slot, region.first)
            made.append(launch_args.DevicePush(gradient, hypers, present[span], push.scale, push.rate_scale))
        item, counted = launch_args.make_launch_args(
            shape, call.mode, made, steps_in, buffers, scale=call.scale, rate_scale=call.rate_scale
        )
        self._await_lanes()
        tiles, blocks = self._tiles_of(shard)
        address = self._items.upload(item, self._stream)
        self._device.launch_fold(shape.rule, self._layout.gradient_type, address, tiles, blocks, self._stream)
        if self._mirrors[shard] and region.floats:
            target = self._mirrors[shard] + region.weights(call.weights_out)
            self._device.copy(target, buffers.weights_out, 4 * region.floats, self._stream)
        self._device.record(self._folded, self._stream)
        steps_out[:] = counted
        self.folds += 1

    def _await_lanes(self) -> None:
        """Order the next fold after every lane's gradients and reads, and after the folds of other lanes on this device."""
        mine = self._device.identity.encode()
        for lane, computed, folded in self._present_peers():
            self._device.wait(computed, self._stream)
            if self._identity(lane) == mine:
                self._device.wait(folded, self._stream)
        self._device.wait(self._computed, self._stream)

    def _tiles_of(self, shard: int) -> tuple[int, int]:
        """The address and length of the shard's tile table on this device; the shard's first fold writes it."""
        if shard not in self._tiles:
            tiles = launch_args.tiles_of(self._shapes[shard])
            address = self._device.allocate(max(LEAST_BYTES, tiles.nbytes))
            if tiles.nbytes:
                staging = self._device.host_memory(tiles.nbytes)
                staging[:] = tiles
                self._device.copy(address, staging.ctypes.data, tiles.nbytes, self._stream)
            self._tiles[shard] = address, tiles.nbytes // host_fold.TILE_BYTES
        return self._tiles[shard]
