"""The memory of an arena on devices: where a shard's weights, state and gradients are, and how another process maps them.

The control words stay in the shared arena. Each shard has a home, the device of its owner, which the layout names; its weights
and state are one allocation there. A lane's slots lie on the lane's own device. A server owns all of it, and has a device
object for each GPU. Every owner writes a handle table in the arena: its device, and handles of its events and its memory.

Every lane's device has peer access to every home. A lane shows its model the home's weights themselves where it shares the
home, and else a replica on its own device, which a pull copies. The replica has two sides in turn where a push may be posted
while it is computed: backward still reads the one while the next weights are copied into the other.

Memory does not survive its owner: the job then ends with an error that names the worker, and must be restarted. A job that goes
on without lost workers has a server.
"""

import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastps.device import plan
from fastps.device.cuda import CudaDevice
from fastps.device.plan import FILLED, LEAST_BYTES, SHOWN, WAVES, Region, handle_table_dtype
from fastps.errors import ArenaError, UnsupportedError
from fastps.job.layout import Layout
from fastps.kernels.cuda import launch_args
from fastps.membership.job_memory import JobMemory

Views = list[npt.NDArray[np.float32]]


class FirstVersion:
    """The first weights and optimizer-state tensors of a layout, in host memory until the devices' memory exists.

    Store and checkpoint write them as they write an arena's first buffers: flat views of float32, one for each parameter. A
    server reads them in its own process: the memory is a memfd that it inherits.
    """

    def __init__(self, layout: Layout, *, is_resumed: bool, descriptor: int = -1) -> None:
        """Make the memory; with a `descriptor`, map what another process wrote. Raises ArenaError if there is too little."""
        size = max(mmap.PAGESIZE, 4 * layout.buffer_floats * (1 + layout.planes))
        self.descriptor = descriptor  # the memfd, until `close`
        try:
            if descriptor < 0:
                self.descriptor = os.memfd_create("fastps-first", os.MFD_CLOEXEC)
                os.ftruncate(self.descriptor, size)
            self._memory = mmap.mmap(self.descriptor, size)
        except (OSError, ValueError) as error:
            self.close()
            raise ArenaError(
                f"expected {size:,} bytes of host memory for the first weights, found too little: {error}"
            ) from error
        floats = np.frombuffer(self._memory, np.float32)
        first = [
            [floats[layout.buffer_floats * number + each.offset :][: each.length] for each in layout.parameters]
            for number in range(1 + layout.planes)
        ]
        self.weights, self.planes = first[0], first[1:]  # the last plane is the weights' average, if there is one
        self.is_resumed = is_resumed  # from a checkpoint
        initial = [layout.rule.initial_value(plane) for plane in range(len(layout.rule.planes))]
        begun = [*initial, *([1.0] if layout.policy.ema else [])]
        # The planes that are not all zeros.
        self.written = [plane for plane, value in enumerate(begun) if value or is_resumed]

    def close(self) -> None:
        """Close the descriptor. The views stay as long as they are used. May be called twice."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class DeviceMemory:
    """The memory of one owner's side of the arena on devices, its own and what it has mapped of other owners."""

    def __init__(self, store: JobMemory, rank: int, device: CudaDevice) -> None:
        """`rank`: the owner's number: a lane, or that of a device of the server."""
        self._store = store
        self.layout = layout = store.layout
        self.owner_lanes = layout.owner_lanes  # by shard
        self._rank = rank
        self._lane = min(rank, layout.lanes)
        self._device = device
        parts = layout.buffers, layout.planes, layout.shown_type != "float32"
        self._regions = [Region(first, last - first, *parts) for first, last in layout.shards]
        self._slot_owners = plan.slot_owners(layout)
        self._slots = {owner: plan.slots_of(layout, owner) for owner in self._slot_owners}
        self._halves_type = 0 if layout.shown_type == "float32" else launch_args.DTYPES[layout.shown_type]
        self._float_runs = [plan.shown_floats(layout, shard) for shard in range(len(self._regions))]
        # In a replica halves come behind the floats, which a model in half precision alone does not have.
        self._replica_halves = 4 * layout.buffer_floats * any(self._float_runs)
        self._side_bytes = self._replica_halves + 2 * layout.buffer_floats * (self._halves_type > 0)
        self._parameters = [
            [index for index, parameter in enumerate(layout.parameters) if parameter.shard == shard]
            for shard in range(len(self._regions))
        ]
        self._bases = [0] * len(self._regions)  # 0: of another device of the server
        self._lane_slots: dict[int, int] = {}  # by their owner
        self.own: set[int] = set()  # of those, the allocations of this process, which other lanes map
        self._siblings: Mapping[int, DeviceMemory] = {}
        self.waits = plan.waits_before_posting(layout)  # for its own work before it posts a push or releases weights
        self.sides = 1 if self.waits else 2  # of a replica: copies into one may run while backward still reads the other
        self._replica: int | None = None
        self._sides = [0] * len(self._regions)  # by shard: which of the replica's sides shows it
        self._waves = plan.waves_of(layout)  # by shard
        self._computed = [device.make_event() for _ in range(WAVES)]
        self._folded = [device.make_event() for _ in range(WAVES)]
        self._identities: dict[int, bytes] = {}
        self._staging: npt.NDArray[np.uint8] | None = None

    def set_siblings(self, siblings: "Mapping[int, DeviceMemory]") -> None:
        """Use the memory of the other devices of this process, by their owners' numbers. Raises DeviceError."""
        self._siblings = siblings
        for sibling in siblings.values():
            self._device.borrow(sibling._device)

    def publish_handles(self, *, is_first: bool = True) -> None:
        """Allocate the shards and slots that this lane owns, and write its handle table. The caller holds the shard locks.

        `is_first`: whether this is the lane's first owner; a later one finds the first weights written.
        """
        table, device = np.zeros((), handle_table_dtype(len(self._regions))), self._device
        for shard, region in enumerate(self._regions):
            if self.owner_lanes[shard] == self._rank:
                self._bases[shard] = self._allocated(region.size)
                table["memory"][shard] = np.void(device.export(self._bases[shard]))
        if self._rank in self._slot_owners:
            self._lane_slots[self._rank] = self._allocated(self._slots[self._rank].size)
            table["slots"] = np.void(device.export(self._lane_slots[self._rank]))
        table["identity"] = device.identity.encode()
        for wave, (computed, folded) in enumerate(zip(self._computed, self._folded, strict=True)):
            table["computed"][wave] = np.void(device.export_event(computed))
            table["folded"][wave] = np.void(device.export_event(folded))
        shown = self.handle_table(self._rank)
        shown[...] = table
        shown["ready"] = SHOWN if is_first else FILLED  # last, for a pull reads it without the locks

    def _allocated(self, size: int) -> int:
        address = self._device.allocate(size)
        self.own.add(address)
        return address

    def handle_table(self, owner: int) -> Any:
        """An owner's handle table. It may change unless the caller holds the shard locks."""
        dtype, lane = handle_table_dtype(len(self._regions)), min(owner, self.layout.lanes)
        begin = self.layout.extra_bytes - (owner - lane + 1) * dtype.itemsize
        return self._store.extra_view(lane)[begin : begin + dtype.itemsize].view(dtype).reshape(())

    def is_shown(self) -> bool:
        """Whether the owners of all shards, and of this lane's slots, wrote their handles. The caller holds the shard locks."""
        owners = {*self.owner_lanes, self._slot_owners[self._rank]}
        return all(self.handle_table(owner)["ready"] >= SHOWN for owner in owners)

    def is_filled(self) -> bool:
        """Whether the server, or lane 0, wrote the first weights. The caller holds the shard locks."""
        return bool(self.handle_table(self.layout.lanes if self.layout.has_server else 0)["ready"] >= FILLED)

    def open(self) -> None:
        """Map the homes and slots that this lane uses, and make its replica. The caller holds the shard locks.

        Raises UnsupportedError without peer access to a home.
        """
        for shard, owner in enumerate(self.owner_lanes):
            if owner == self._rank:
                continue
            if not self._device.can_reach(self._identity(owner).decode()):
                raise UnsupportedError(
                    f"expected peer access from {self._device.identity} to {self._identity(owner).decode()}, which has shards,"
                    " found none: use FASTPS_PLACEMENT=host (`fastps doctor` shows the pairs)"
                )
            self._bases[shard] = self._device.open(bytes(self.handle_table(owner)["memory"][shard]))
        if self._rank < self.layout.lanes:
            self._open_slots(self._rank)
            if self._identity(self._slot_owners[self._rank]) != self._device.identity.encode():
                raise UnsupportedError(
                    f"expected worker {self._rank} on {self._identity(self._slot_owners[self._rank]).decode()}, where the"
                    f" server has its slots, found it on {self._device.identity}: start the workers with `fastps run --gpus`,"
                    " or use FASTPS_PLACEMENT=host"
                )
            if len(self.near_shards()) < len(self._regions):
                self._replica = self._device.allocate(max(LEAST_BYTES, self._side_bytes * self.sides))

    def _open_slots(self, lane: int) -> int:
        owner = self._slot_owners[lane]
        if owner in self._siblings:
            return self._siblings[owner]._lane_slots[owner]
        if owner not in self._lane_slots:
            self._lane_slots[owner] = self._device.open(bytes(self.handle_table(owner)["slots"]))
        return self._lane_slots[owner]

    def unmap(self) -> None:
        """Unmap the memory of other lanes. No views of it may exist any more, and no work on it may be queued."""
        for address in [*self._bases, *self._lane_slots.values()]:
            if address and address not in self.own:
                self._device.close(address)
        self._bases = [0] * len(self._regions)
        self._lane_slots.clear()

    def own_shards(self) -> list[int]:
        """The shards that this owner folds: those on its own device. With a server, only the server's devices fold."""
        if self.layout.has_server:
            return [shard for shard, owner in enumerate(self.owner_lanes) if owner == self._rank]
        return self.near_shards()

    def near_shards(self) -> list[int]:
        """The shards on this lane's device."""
        return [shard for shard in range(len(self._regions)) if self._is_near(shard)]

    def _is_near(self, shard: int) -> bool:
        return self._identity(self.owner_lanes[shard]) == self._device.identity.encode()

    def _identity(self, owner: int) -> bytes:
        if owner not in self._identities:
            self._identities[owner] = bytes(self.handle_table(owner)["identity"].item())
        return self._identities[owner]

    def write_first(self, first: FirstVersion) -> None:
        """Write the first weights, state and average, those of this device of a server; return when the copies are done."""
        for shard, owner in enumerate(self.owner_lanes):
            if self.layout.has_server and owner != self._rank:
                continue
            for index in self._parameters[shard]:
                self._write(self.weights_address(0, index), first.weights[index])
                for plane in first.written:
                    self._write(self.plane_address(0, plane, index), first.planes[plane][index])

    def _write(self, address: int, values: npt.NDArray[np.float32]) -> None:
        """Copy values of the host to an address, and wait, because the staging memory is used again."""
        if self._staging is None:
            longest = max(parameter.length for parameter in self.layout.parameters)
            self._staging = self._device.host_memory(4 * longest)
        if size := values.nbytes:
            self._staging[:size].view(np.float32)[:] = values
            self._device.copy(address, int(self._staging.ctypes.data), size, self._device.compute_stream())
            self._device.synchronize(self._device.compute_stream())

    def weights_address(self, buffer: int, index: int) -> int:
        """This process's address of a parameter in a weights buffer at its home."""
        base, region, offset = self._place(index)
        return base + region.weights(buffer) + 4 * offset

    def shown_numbers(self, buffers: Sequence[int]) -> list[int]:
        """What shows each shard of pulled buffers: the buffer at a home that is near, else a side of the replica."""
        return [buffer if self._is_near(shard) else self._sides[shard] for shard, buffer in enumerate(buffers)]

    def shown_address(self, number: int, index: int) -> int:
        """The address at which the model sees a parameter, in its own precision, whose shard is shown by that number."""
        parameter, is_half = self.layout.parameters[index], self.shows_half(index)
        if self._is_near(parameter.shard):
            base, region, offset = self._place(index)
            return base + region.halves(number) + 2 * offset if is_half else self.weights_address(number, index)
        assert self._replica is not None
        side = self._replica + number % self.sides * self._side_bytes
        return side + (self._replica_halves + 2 * parameter.offset if is_half else 4 * parameter.offset)

    def shows_half(self, index: int) -> bool:
        """Whether the model shows a parameter in half precision."""
        return self.layout.parameters[index].type != "float32"

    def plane_address(self, buffer: int, plane: int, index: int) -> int:
        """This process's address of a parameter in an optimizer-state tensor of a state buffer."""
        base, region, offset = self._place(index)
        return base + region.state(buffer) + 4 * (region.floats * plane + offset)

    def gradient_address(self, lane: int, slot: int, index: int) -> int:
        """This process's address of a parameter's gradient in a lane's slot on that lane's device."""
        return self._slot_address(lane, slot, self.layout.parameters[index].offset)

    def _slot_address(self, lane: int, slot: int, first: int = 0) -> int:
        return self._open_slots(lane) + self._slots[self._slot_owners[lane]].offset(lane, slot, first)

    def _place(self, index: int) -> tuple[int, Region, int]:
        """The address of a parameter's shard, the shard's layout, and the parameter's offset in each part, in floats."""
        parameter = self.layout.parameters[index]
        region, base = self._regions[parameter.shard], self._bases[parameter.shard]
        assert base, "a device of the server asks for its own shards alone"
        return base, region, parameter.offset - region.first

    def view(self, address: int, index: int, dtype: str = "float32") -> Any:
        """The flat values of a parameter at an address, as the device's type of array."""
        return self._device.view(address, self.layout.parameters[index].length, dtype)
