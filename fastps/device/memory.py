"""The memory of an arena on devices: where a shard's weights, state and gradients are, and how another process maps them.

The control words stay in the shared arena. Each shard has a home, the device of its owner lane, which the layout names; its
weights and state are one allocation there. A lane's slots lie on the lane's own device, or, with a server, on the server's.
Every lane writes a handle table in the arena: its device, and the handles of its events and of the memory that it owns.

Where a device is not reached, the lane copies its gradients to host memory before it posts them, and the home mirrors its
weights there. A lane shows its model the home's weights themselves where it shares the home, and else a replica on its own
device, which a pull copies. The replica has two sides in turn where a push may be posted while it is computed: backward still
reads the one while the next weights are copied into the other.

Memory does not survive its owner: the job then ends with an error that names the worker, and must be restarted. A job that goes
on without lost workers has a server, which owns all memory.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fastps.device.interface import HANDLE_BYTES, Device, Stream
from fastps.device.plan import (
    FILLED,
    LEAST_BYTES,
    SHOWN,
    Region,
    handle_table_dtype,
    regions_of,
    slots_of,
    waits_before_posting,
)
from fastps.errors import UnsupportedError

if TYPE_CHECKING:
    from fastps.membership.job_memory import JobMemory

_NOTHING = bytes(HANDLE_BYTES)


class DeviceMemory:
    """The memory of one lane's side of the arena on devices, its own and what it has mapped of other lanes.

    Attributes:
        waits: whether this lane waits for its own work before it posts a push or releases weights.
        sides: how many sides a replica has: two where copies into one may run while backward still reads the other.
    """

    def __init__(self, store: "JobMemory", rank: int, device: Device) -> None:
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
        self.waits = waits_before_posting(self._layout)
        self.sides = 1 if self.waits else 2
        self._replica: int | None = None
        self._sides = [0] * len(self._regions)  # by shard: which of the replica's sides shows it
        self._computed = [device.make_event() for _ in self._regions]
        self._folded = [device.make_event() for _ in self._regions]
        self._released = device.make_event()
        self._sends: Stream = device.make_stream()
        self._identities: dict[int, bytes] = {}

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
        table["released"] = np.void(device.export_event(self._released))
        for shard, (computed, folded) in enumerate(zip(self._computed, self._folded, strict=True)):
            table["computed"][shard] = np.void(device.export_event(computed))
            table["folded"][shard] = np.void(device.export_event(folded))
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
                self._replica = self._device.allocate(max(LEAST_BYTES, 4 * self._layout.buffer_floats * self.sides))

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
            self._device.copy(address, source, size, self._sends)
            self._device.synchronize(self._sends)  # because the staging memory is used again

    _staging: npt.NDArray[np.uint8] | None = None

    # -- addresses -----------------------------------------------------------------------------------

    def weights_address(self, buffer: int, index: int) -> int:
        """This process's address of a parameter in a weights buffer at its home. Raises UnsupportedError."""
        base, region, offset = self._place(index)
        return base + region.weights(buffer) + 4 * offset

    def shown_numbers(self, buffers: Sequence[int]) -> list[int]:
        """What shows each shard of pulled buffers: the buffer at a home that is near, else a side of the replica."""
        return [buffer if self._is_near(shard) else self._sides[shard] for shard, buffer in enumerate(buffers)]

    def shown_address(self, number: int, index: int) -> int:
        """The address at which the model sees a parameter whose shard is shown by that number."""
        shard = self._layout.parameters[index].shard
        if self._is_near(shard):
            return self.weights_address(number, index)
        assert self._replica is not None
        side = number % self.sides
        return self._replica + 4 * (side * self._layout.buffer_floats + self._layout.parameters[index].offset)

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
