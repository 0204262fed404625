"""One lane's side of the arena on devices: which lanes fold, and in what order work on streams runs.

A lane on a shard's home folds the shard: the kernel reads the slots of other devices over peer mappings.

Two events per lane order all work. A lane records `computed` on its compute stream when it posts a push and when it releases
weights, and `folded` on its fold stream after each fold. A fold waits for `computed` of every lane, and for `folded` of the
lanes on its device; a pull waits for every lane's `folded`. The host does not wait: the commit word describes the state that
the streams will reach, and only work that has waited for the events reads that state.

A push is checked for non-finite gradients unless the job allows them: a kernel looks behind the gradients, and the worker waits
on the host before it posts, and tells in the slot what was found. The combiner rejects such a push instead of folding it.

In a job that goes on without lost workers, each worker waits, on the host, for its own work before it posts a push or releases
weights: so a push counts only when its gradients are there, and no fold waits for the event of a process that may die. A fold
then waits for nothing but the folds of the server itself.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fastps.device import users_rule
from fastps.device.finite_check import FiniteCheck, ResultsCheck
from fastps.device.interface import Device, Event, Stream
from fastps.device.memory import DeviceMemory
from fastps.device.plan import LEAST_BYTES, SHOWN
from fastps.device.work_items import MOST_ITEMS, WorkItems
from fastps.errors import UnsupportedError
from fastps.kernels.cuda import host_fold, launch_args
from fastps.kernels.protocol.fold_call import FoldCall
from fastps.kernels.shm.arena import LANE_LEAVING, LANE_LIVE, LANE_SERVING
from fastps.kernels.update import fold

if TYPE_CHECKING:
    from fastps.membership.job_memory import JobMemory

PRESENT = (LANE_LIVE, LANE_LEAVING, LANE_SERVING)


class DeviceArena(DeviceMemory):
    """One lane's side of the arena on devices. Its worker makes it on attaching, and is its only user.

    Attributes:
        folds: folds that this lane has queued.
    """

    def __init__(self, store: "JobMemory", rank: int, device: Device, *, items: int = MOST_ITEMS) -> None:
        """`items`: how many work items may be in flight."""
        super().__init__(store, rank, device)
        users_rule.prepare(device, self._layout.rule, store.hypers)
        self._shown: dict[int, int] = {}  # by shard: the buffer of which the replica is
        self._copied: Event = device.make_event()
        self._copies: Stream = device.make_stream()
        device.record(self._computed, device.compute_stream())  # so that no stream waits for an event without a record
        device.record(self._folded, self._stream)
        self._peers: dict[int, tuple[Event, Event]] = {}
        self._shapes = [self._shape_of(shard) for shard in range(len(self._regions))]
        self._tiles: dict[int, tuple[int, int]] = {}  # by shard: address and number of tiles
        self._items = WorkItems(device, items)
        self._by_hand: WorkItems | None = None  # of folds on the compute stream
        checks = self._layout.faults.nonfinite != "allow" and rank < self._layout.lanes
        self._finite = FiniteCheck(device, self._layout) if checks else None
        self._results = ResultsCheck(device, len(self._regions)) if self._layout.faults.nonfinite != "allow" else None
        self.folds = 0

    def _shape_of(self, shard: int) -> launch_args.Shape:
        parameters = [self._layout.parameters[index] for index in self._parameters[shard]]
        first = self._regions[shard].first
        segments = tuple((parameter.offset - first, parameter.length, parameter.group) for parameter in parameters)
        try:
            layout, shown = self._layout, self._layout.shown_type if self._halves_type else "float16"
            return launch_args.Shape(layout.rule.number, layout.planes, layout.policy.ema, segments, shown)
        except ValueError as error:
            raise UnsupportedError(f"this optimizer cannot fold on a device: {error}") from error

    def parts(self) -> dict[str, Event | Stream]:
        """This lane's events and streams by name, for checks that leave one out."""
        named: dict[str, Event | Stream] = {"computed": self._computed, "folded": self._folded, "copied": self._copied}
        named |= {f"item {index}": event for index, event in enumerate(self._items.events)}
        return named | {"compute": self._device.compute_stream(), "fold": self._stream, "copies": self._copies}

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
        if slot is not None and self._finite is not None:
            slots, _ = self._open_slots(self._rank)
            self._finite.queue(slots + self._slots.offset(self._rank, slot, 0), stream)
        self._device.record(self._computed, stream)
        if self._layout.faults.continues or (slot is not None and self._finite is not None):
            self._device.synchronize_event(self._computed)
        if slot is not None and self._finite is not None:
            self._tell_nonfinite(slot, self._finite)

    def _tell_nonfinite(self, slot: int, check: FiniteCheck) -> None:
        """Write into the slot which parameters are non-finite. Its post orders this before a combiner's look."""
        words = self._store.nonfinite_words(self._rank, slot)
        bits = np.packbits(check.found(), bitorder="little")
        words[: len(bits)] = bits

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
            region, buffer, base = self._regions[shard], buffers[shard], self._bases[shard]
            source, halves = base or self._mirrors[shard], region.halves(buffer) if base else region.mirror_halves(buffer)
            for begin, length in self._float_runs[shard]:
                begin_at = source + region.weights(buffer) + 4 * begin
                self._device.copy(self._replica + 4 * (region.first + begin), begin_at, 4 * length, self._copies)
            if self._halves_type:
                target = self._replica + self._replica_halves + 2 * region.first
                self._device.copy(target, source + halves, 2 * region.floats, self._copies)
            self._shown[shard] = buffer
        self._device.record(self._copied, self._copies)
        self._device.wait(self._copied, self._device.compute_stream())

    def synchronize_all(self) -> None:
        """Block the host until this lane's folds and computations are done.

        Raises DeviceError if a fold failed, NonFiniteWeightsError if one had non-finite results.
        """
        self._device.synchronize(self._stream)
        self._device.synchronize_all()
        if self._results is not None:
            self._results.check()

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

    def fold(self, call: FoldCall) -> list[int] | None:
        """Queue a fold; the function given to Lane.fold_with. Returns immediately; the combiner then flips the commit word.

        If some of the pushes are non-finite it queues nothing, and returns for each push the index of such a parameter, or -1.
        Raises NonFiniteWeightsError for an earlier fold of this lane.
        """
        shard, flag = call.shard, 0
        if self._results is not None:
            self._results.check()
            flag = self._results.flag(shard)
            told = [self._nonfinite_parameter(shard, push.lane, push.slot) for push in call.pushes]
            if max(told, default=-1) >= 0:
                return told
        region, base, shape = self._regions[shard], self._bases[shard], self._shapes[shard]
        buffers = launch_args.Buffers(
            base + region.weights(call.weights_in),
            base + region.weights(call.weights_out),
            base + region.state(call.state_in),
            base + region.state(call.state_out),
            region.floats,
            base + region.halves(call.weights_out) if self._halves_type else 0,
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
            shape, call.mode, made, steps_in, buffers, scale=call.scale, rate_scale=call.rate_scale, nonfinite=flag
        )
        self._await_lanes()
        tiles, blocks = self._tiles_of(shard)
        address = self._items.upload(item, self._stream)
        self._device.launch_fold(shape.rule, self._layout.gradient_type, address, tiles, blocks, self._stream)
        if self._results is not None:
            self._results.tell(shard, self._stream)
        if self._mirrors[shard] and region.floats:
            self._renew_mirror(shard, call.weights_out)
        self._device.record(self._folded, self._stream)
        steps_out[:] = counted
        self.folds += 1
        return None

    def _renew_mirror(self, shard: int, buffer: int) -> None:
        """Queue the copies of a folded buffer, as far as models show it, to the shard's mirror in host memory."""
        region, mirror, base = self._regions[shard], self._mirrors[shard], self._bases[shard]
        for begin, length in self._float_runs[shard]:
            offset = region.weights(buffer) + 4 * begin
            self._device.copy(mirror + offset, base + offset, 4 * length, self._stream)
        if self._halves_type:
            target, source = mirror + region.mirror_halves(buffer), base + region.halves(buffer)
            self._device.copy(target, source, 2 * region.floats, self._stream)

    def write_halves(self, buffers: Sequence[int]) -> None:
        """Write the weights of these buffers, one a shard, once more in half precision, and wait until it is done.

        Call it under the shard locks, after work on the compute stream has written the weights. It is a fold of no pushes.
        """
        if not self._halves_type:
            return
        stream = self._device.compute_stream()
        self._by_hand = self._by_hand or WorkItems(self._device, 1)
        for shard, buffer in enumerate(buffers):
            region, shape = self._regions[shard], self._shapes[shard]
            base, _, _ = self._place(self._parameters[shard][0])
            weights, halves = base + region.weights(buffer), base + region.halves(buffer)
            plain = launch_args.Shape(fold.RULE_SGD, 0, 0.0, shape.segments, shape.shown_type)
            at = launch_args.Buffers(weights, weights, 0, 0, region.floats, halves)
            steps = np.zeros(len(shape.segments), np.int64)
            item, _ = launch_args.make_launch_args(plain, fold.FOLD_SUM, [], steps, at)
            tiles, blocks = self._tiles_of(shard)
            self._device.synchronize(self._stream)  # which may just have written the tiles
            address = self._by_hand.upload(item, stream)
            self._device.launch_fold(plain.rule, self._layout.gradient_type, address, tiles, blocks, stream)
            self._device.synchronize(stream)

    def _nonfinite_parameter(self, shard: int, lane: int, slot: int) -> int:
        """The first parameter of a shard that a push has and its worker found non-finite, or -1."""
        words = self._store.nonfinite_words(lane, slot)
        if not words.any():
            return -1
        _, present = self._store.slot_words(lane, slot)
        found = present & np.unpackbits(words, count=len(present), bitorder="little").view(np.bool_)
        return next((index for index in self._parameters[shard] if found[index]), -1)

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
