"""One lane's side of the arena on devices: which lanes fold, and in what order work on streams runs.

A lane on a shard's home folds the shard: the kernel reads the slots of other devices over peer mappings.

Events order all work, two for each lane and wave of shards (plan.waves_of). A lane records a wave's `computed` once all its
gradients are in the slot, while backward still computes the others, and a wave's `folded` after each fold, on the stream of the
wave's folds. A fold waits for `computed` of every lane, and for `folded` of the lanes on its device; a pull waits for `folded`
of all lanes that fold. The host does not wait: the commit word describes the state that the streams will reach, and only work
that has waited for the events reads that state.

`computed` also says that a lane has read what the fold overwrites. A fold takes a push of every lane there, a null one too, and
a lane's reads of a version come before the record of its next push on the same stream. A lane that leaves records once more.

A push is checked for non-finite gradients unless the job allows them: a kernel looks behind the gradients, and the worker tells
in the slot what was found. The combiner rejects such a push instead of folding it.

Where folds and grants go by what has arrived, where pushes are checked, and in a job that goes on without lost workers, each
worker waits, on the host, for its own work before it posts a push or releases weights (`waits_before_posting`). So a push
counts only when its gradients are there, and a fold waits for nothing but other folds: the events of a process that has died
may never come.
"""

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from fastps.device.cuda import CudaDevice
from fastps.device.interface import Event, Stream
from fastps.device.memory import DeviceMemory, FirstVersion
from fastps.device.plan import FILLED, LEAST_BYTES, SHOWN, WAVES, owners_at
from fastps.errors import NonFiniteWeightsError, UnsupportedError
from fastps.job.layout import Layout
from fastps.kernels.combining.fold_call import FoldCall
from fastps.kernels.cuda import launch_args
from fastps.kernels.shm.arena import LANE_LEAVING, LANE_LIVE, LANE_SERVING
from fastps.kernels.update import fold
from fastps.membership.job_memory import JobMemory

VECTOR_BYTES = 16  # of which a copy consists
PRESENT = (LANE_LIVE, LANE_LEAVING, LANE_SERVING)
_Key = tuple[tuple[int, int], ...]
"""For each lane whose pushes a stream has waited for: how many it had posted."""


class DeviceArena(DeviceMemory):
    """One lane's side of the arena on devices. Its worker makes it on attaching, and is its only user."""

    def __init__(self, store: JobMemory, rank: int, device: CudaDevice) -> None:
        super().__init__(store, rank, device)
        self._shown: dict[int, int] = {}  # by shard: the buffer of which the replica is
        self._finished, self._copied = device.make_event(), device.make_event()
        for event in (*self._computed, *self._folded):
            device.record(event, device.compute_stream())  # so that no stream waits for an event without a record
        self.marked: set[int] = set()  # the shards whose gradients for the next push are marked
        self._opened: dict[tuple[int, str, int], Event] = {}
        self._with_events: set[int] = set()  # the lanes that have shown their handles
        self._shapes = [self._shape_of(shard) for shard in range(len(self._regions))]
        shards = [shard for shard, indices in enumerate(self._parameters) if indices]
        self._members = [{shard for shard in shards if self._waves[shard] == wave} for wave in range(WAVES)]
        self._tiles: dict[int, int] = {}  # by shard: the address of its table of tiles
        self._queues: dict[int, Stream] = defaultdict(device.make_stream)  # of folds, by wave
        self._awaited: dict[int, _Key] = {}  # by wave: the pushes that its folds have waited for
        checks = self.layout.faults.nonfinite != "allow"
        self._finite = FiniteCheck(device, self.layout) if checks and rank < self.layout.lanes else None
        self._results = ResultsCheck(device, len(self._regions)) if checks else None
        self.folds = 0  # queued by this lane

    def _shape_of(self, shard: int) -> launch_args.Shape:
        if (most := self.layout.lanes * self.layout.slots) > launch_args.MOST_SUMMED:
            raise UnsupportedError(
                f"expected at most {launch_args.MOST_SUMMED} pushes in a fold on a device, found up to {most}: start fewer"
                " workers, or use FASTPS_PLACEMENT=host"
            )
        layout, first = self.layout, self._regions[shard].first
        parameters = [layout.parameters[index] for index in self._parameters[shard]]
        segments = tuple((parameter.offset - first, parameter.length, parameter.group) for parameter in parameters)
        try:
            shown = layout.shown_type if self._halves_type else "float16"
            return launch_args.Shape(layout.rule.number, layout.planes, layout.policy.ema, segments, shown)
        except ValueError as error:
            raise UnsupportedError(f"this optimizer cannot fold on a device: {error}") from error

    def compute_stream(self) -> Stream:
        """The stream on which the calling thread computes."""
        return self._device.compute_stream()

    def mark_computed(self, shard: int) -> None:
        """Order a shard's gradients in the slot of the next push, written by work queued up to now, before the shard's fold.

        The last shard of a wave records its event. `mark_pushed` then leaves the wave out, unless `forget` comes between. Does
        nothing where this lane waits for its work.
        """
        if self.waits:
            return
        self.marked.add(shard)
        if self._members[self._waves[shard]] <= self.marked:
            self._device.record(self._computed[self._waves[shard]], self._device.compute_stream())

    def forget(self, shard: int) -> None:
        """Take back `mark_computed`: more work on the shard's gradients was queued since, or may have been."""
        self.marked.discard(shard)

    def begin_finish(self, slot: int | None = None) -> None:
        """Where this lane waits for its own work, note the work that `is_finished` asks for: all that is queued up to now.

        `slot`: the one that is pushed next, whose gradients are checked, or None.
        """
        if self.waits:
            stream = self._device.compute_stream()
            if slot is not None and self._finite is not None:
                self._finite.queue(self._slot_address(self._rank, slot), stream)
            self._device.record(self._finished, stream)

    def is_finished(self) -> bool:
        """Whether the work that `begin_finish` noted is done; True where this lane does not wait. Raises DeviceError."""
        return not self.waits or self._device.is_done(self._finished)

    def mark_pushed(self, slot: int | None) -> None:
        """Order the gradients in `slot`, and reads of weights up to now, before any later fold. None: no gradient is pushed.

        Leaves out the waves that `mark_computed` has recorded. Call it before the push is posted, and where this lane waits for
        its work, after that is finished: it then tells in the slot which gradients are non-finite.
        """
        if slot is not None and self._finite is not None:
            bits = np.packbits(self._finite.found(), bitorder="little")
            self._store.nonfinite_words(self._rank, slot)[: len(bits)] = bits  # its post orders this before a combiner's look
        self._record_computed(self.marked if slot is not None else set())
        self.marked.clear()

    def mark_left(self) -> None:
        """Order all reads of weights up to now before any later fold, of a lane whose next push will not say so.

        Call it before the lane leaves, and before it releases weights after that.
        """
        self._record_computed(set())

    def _record_computed(self, marked: set[int]) -> None:
        """Record the waves that have shards beside the marked ones."""
        for wave in sorted(set(self._waves)):
            if not self.waits and not (marked and self._members[wave] <= marked):
                self._device.record(self._computed[wave], self._device.compute_stream())

    def await_folds(self, stream: Stream | None = None) -> None:
        """Order the work queued from now on after all earlier folds: on a stream, by default that of computations."""
        self._await_folds(range(len(self._regions)), self._device.compute_stream() if stream is None else stream)

    def _await_folds(self, shards: Iterable[int], stream: Stream) -> None:
        """Order later work on a stream after all earlier folds of the waves of shards, wherever these are folded."""
        wanted = {(self._waves[shard], self.owner_lanes[shard]) for shard in shards}
        for owner in (self._rank, *self._present_peers()):
            for wave in sorted({wave for wave, home in wanted if self._folds(owner, home)}):
                self._device.wait(self._event(owner, "folded", wave), stream)

    def show_pulled(self, buffers: Sequence[int]) -> None:
        """Order all work computed from now on after the folds of these buffers, and after the copies of distant ones.

        One kernel copies what is new of a wave, as soon as that is folded: it reads from all homes at a time, so that the links
        to all of them are busy. This lane has waited for all that read a replica of one side. Of a replica of two, the side
        that is written was read before this lane's last push, which the fold took.
        """
        compute, near = self._device.compute_stream(), self.near_shards()
        self._await_folds(near, compute)
        changed = [shard for shard in range(len(buffers)) if shard not in near and self._shown.get(shard) != buffers[shard]]
        if self._replica is None or not changed:
            return
        stream = self._copies
        for wave in range(WAVES):
            shards = [shard for shard in changed if self._waves[shard] == wave]
            self._await_folds(shards, stream)
            runs = [run for shard in shards for run in self._runs_to_copy(shard, buffers[shard])]
            for launch in launch_args.copy_launches(runs):
                self._device.launch(launch_args.COPY_KERNEL, launch, stream)
        self._shown |= {shard: buffers[shard] for shard in changed}
        self._device.record(self._copied, stream)
        self._device.wait(self._copied, compute)

    def _runs_to_copy(self, shard: int, buffer: int) -> Iterator[tuple[int, int, int]]:
        """Turn to the replica's other side of a shard; yield (from, to, bytes) of what models show of a buffer."""
        assert self._replica is not None
        self._sides[shard] = (self._sides[shard] + 1) % self.sides
        region, base, side = self._regions[shard], self._bases[shard], self._replica + self._sides[shard] * self._side_bytes
        for begin, length in (run for run in self._float_runs[shard] if run[1]):
            size = -(-4 * length // VECTOR_BYTES) * VECTOR_BYTES  # with padding behind the last parameter
            yield base + region.weights(buffer) + 4 * begin, side + 4 * (region.first + begin), size
        if self._halves_type and region.floats:
            yield base + region.halves(buffer), side + self._replica_halves + 2 * region.first, 2 * region.floats

    @functools.cached_property
    def _copies(self) -> Stream:
        return self._device.make_stream()

    def synchronize_all(self) -> None:
        """Block the host until this lane's folds and computations are done.

        Raises DeviceError if a fold failed, NonFiniteWeightsError if one had non-finite results.
        """
        for queue in self._queues.values():
            self._device.synchronize(queue)
        self._device.synchronize_all()
        if self._results is not None:
            self._results.check()

    def check(self) -> None:
        """Raise DeviceError if a fold of this lane has failed. Does not wait for folds."""
        for queue in self._queues.values():
            self._device.check(queue)

    def _present_peers(self) -> Iterator[int]:
        """Each other present owner with events. A lane that has left waited for its folds before it left."""
        for lane, (_, state) in enumerate(self._store.arena.members()):
            if lane == self._lane or state not in PRESENT:
                continue
            if self.layout.faults.continues and lane < self.layout.lanes:
                continue  # a worker, which does not fold, and whose events may never come
            for owner in owners_at(self.layout, lane):
                if owner not in self._with_events and self.handle_table(owner)["ready"] >= SHOWN:
                    self._with_events.add(owner)
                if owner in self._with_events:  # else the lane has posted no push yet
                    yield owner

    def _event(self, owner: int, name: str, wave: int) -> Event:
        if owner == self._rank:
            return (self._folded if name == "folded" else self._computed)[wave]
        key = owner, name, wave
        if key not in self._opened:
            self._opened[key] = self._device.open_event(bytes(self.handle_table(owner)[name][wave]))
        return self._opened[key]

    def _folds(self, owner: int, home: int) -> bool:
        """Whether an owner folds the shards of a home: the server's device there, or each worker on the home's device."""
        return owner == home if self.layout.has_server else self._identity(owner) == self._identity(home)

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
            gradient = self._slot_address(push.lane, push.slot, region.first)
            made.append(launch_args.DevicePush(gradient, hypers, present[span], push.scale, push.rate_scale))
        wave, factors, tiles = self._waves[shard], (call.scale, call.rate_scale), self._tiles_of(shard)
        stream = self._queues[wave]
        launches, counted = launch_args.make_launches(
            shape, call.mode, made, steps_in, buffers, tiles, factors=factors, nonfinite=flag
        )
        self._await_lanes(shard, stream)
        for launch in launches:
            self._device.launch(launch_args.fold_kernel(shape.rule, self.layout.gradient_type), launch, stream)
        if self._results is not None:
            self._results.tell(shard, stream)
        self._device.record(self._folded[wave], stream)
        steps_out[:] = counted
        self.folds += 1
        return None

    def fill(self, first: FirstVersion) -> None:
        """Write the first version, and its halves, to all shards, or those of this device of a server; then say so."""
        self.write_first(first)
        self.write_halves([0] * len(self._regions))
        self.handle_table(self._rank)["ready"] = FILLED

    def write_halves(self, buffers: Sequence[int]) -> None:
        """Write the weights of these buffers, one a shard, once more in half precision, and wait until it is done.

        Call it under the shard locks, after work on the compute stream has written the weights. It is a fold of no pushes.
        """
        if not self._halves_type:
            return
        stream, kernel = self._device.compute_stream(), launch_args.fold_kernel(fold.RULE_SGD, self.layout.gradient_type)
        for shard, buffer in enumerate(buffers):
            region, shape, base = self._regions[shard], self._shapes[shard], self._bases[shard]
            if not base or not region.floats:
                continue
            weights, halves = base + region.weights(buffer), base + region.halves(buffer)
            plain = launch_args.Shape(fold.RULE_SGD, 0, 0.0, shape.segments, shape.shown_type)
            at = launch_args.Buffers(weights, weights, 0, 0, region.floats, halves)
            steps = np.zeros(len(shape.segments), np.int64)
            launches, _ = launch_args.make_launches(plain, fold.FOLD_SUM, [], steps, at, self._tiles_of(shard))
            self._device.synchronize(self._queues[self._waves[shard]])  # which may just have written the tiles
            for launch in launches:
                self._device.launch(kernel, launch, stream)
            self._device.synchronize(stream)

    def _nonfinite_parameter(self, shard: int, lane: int, slot: int) -> int:
        """The first parameter of a shard that a push has and its worker found non-finite, or -1."""
        words = self._store.nonfinite_words(lane, slot)
        if not words.any():
            return -1
        _, present = self._store.slot_words(lane, slot)
        found = present & np.unpackbits(words, count=len(present), bitorder="little").view(np.bool_)
        return next((index for index in self._parameters[shard] if found[index]), -1)

    def _await_lanes(self, shard: int, stream: Stream) -> None:
        """Order the shard's next fold after every lane's gradients and reads, and after other lanes' folds of it.

        A wave's folds wait once for the pushes of a version: until a lane posts another push, its events say nothing new, but
        those of a lane that leaves do.
        """
        wave, peers = self._waves[shard], list(self._present_peers())
        for lane in peers:
            if self._folds(lane, self.owner_lanes[shard]):
                self._device.wait(self._event(lane, "folded", wave), stream)
        if self.waits:
            return
        states, lanes = self._store.arena.lane_states(), (*peers, *((self._rank,) if self._rank < self.layout.lanes else ()))
        posted = tuple((lane, self._store.arena.counters(lane)["posted"]) for lane in lanes)
        is_new, self._awaited[wave] = self._awaited.get(wave) != posted, posted
        for lane in lanes:
            if is_new or states[lane] == LANE_LEAVING:
                self._device.wait(self._event(lane, "computed", wave), stream)

    def _tiles_of(self, shard: int) -> int:
        """The address of the shard's tile table on this device; the shard's first fold writes it."""
        if shard not in self._tiles:
            tiles = launch_args.tiles_of(self._shapes[shard])
            address = self._device.allocate(max(LEAST_BYTES, tiles.nbytes))
            if tiles.nbytes:
                staging = self._device.host_memory(tiles.nbytes)
                staging[:] = tiles
                self._device.copy(address, staging.ctypes.data, tiles.nbytes, self._queues[self._waves[shard]])
            self._tiles[shard] = address
        return self._tiles[shard]


class FiniteCheck:
    """The check of one worker's slots on its device for non-finite gradients. Call `queue`, wait for the stream, call `found`.

    A kernel reads the slot behind the work that writes it, and names each parameter with a non-finite value. The kernel marks
    a parameter with the check's number, so no memory is cleared in between, and what an earlier check has written counts for
    nothing.
    """

    def __init__(self, device: CudaDevice, layout: Layout) -> None:
        self._device = device
        self._kernel = launch_args.check_kernel(layout.gradient_type)
        self._segments = [(each.offset, each.length) for each in layout.parameters]
        self._is_empty = not any(length for _, length in self._segments)
        self._number = 0
        self._check: launch_args.Launch | None = None

    def queue(self, slot: int, stream: Stream) -> None:
        """Queue the check of the gradients at an address on the device, behind the stream's work."""
        device = self._device
        if self._is_empty:
            return
        if self._check is None:
            self._check = self._prepare(stream)
        self._number = self._number % 0x7FFFFFFF + 1
        device.launch(self._kernel, launch_args.aim(self._check, slot, self._number), stream)
        device.copy(self._marks.ctypes.data, self._device_marks, self._marks.nbytes, stream)

    def _prepare(self, stream: Stream) -> launch_args.Launch:
        """Allocate, and make the launch, at the first check: a device of a worker that never pushes needs nothing."""
        device, tiles = self._device, launch_args.tiles_of_segments(self._segments)
        self._marks = device.host_memory(4 * len(self._segments)).view(np.int32)
        table = device.host_memory(tiles.nbytes)
        table[:] = tiles
        address = device.allocate(max(LEAST_BYTES, tiles.nbytes))
        device.copy(address, table.ctypes.data, tiles.nbytes, stream)
        self._device_marks = device.allocate(max(LEAST_BYTES, self._marks.nbytes))
        return launch_args.check_launch(self._segments, 0, self._device_marks, 0, address)

    def found(self) -> npt.NDArray[np.bool_]:
        """Whether each parameter of the slot is non-finite (bool[parameters]). The caller has waited for the stream."""
        return np.zeros(len(self._segments), np.bool_) if self._is_empty else np.equal(self._marks, self._number)


class ResultsCheck:
    """The flags of the folds that one lane queues, one a shard, on its device and in pinned memory of the host.

    A fold's own kernel sets its flag if finite gradients gave non-finite results. The weights are published by then, so nothing
    is rejected: the next fold of this lane, or its end, raises an error.
    """

    def __init__(self, device: CudaDevice, shards: int) -> None:
        self._device = device
        self._shards = shards
        self._address = 0  # allocated at the first fold, because most lanes of several devices fold some shards only
        self._told: npt.NDArray[np.int32] | None = None

    def flag(self, shard: int) -> int:
        """The address on the device that a fold of the shard sets to 1."""
        if not self._address:
            self._address = self._device.allocate(max(LEAST_BYTES, 4 * self._shards))
            self._told = self._device.host_memory(4 * self._shards).view(np.int32)
        return self._address + 4 * shard

    def tell(self, shard: int, stream: Stream) -> None:
        """Queue the copy of a shard's flag to the host, behind a fold on the stream."""
        assert self._told is not None
        self._device.copy(self._told.ctypes.data + 4 * shard, self.flag(shard), 4, stream)

    def check(self) -> None:
        """Raise NonFiniteWeightsError if a fold that is known to have ended had non-finite results. Does not wait."""
        if self._told is None or not self._told.any():
            return
        shards = ", ".join(str(shard) for shard in np.flatnonzero(self._told))
        raise NonFiniteWeightsError(
            f"expected finite weights on the device {self._device.identity}, found Inf or NaN in shard {shards} after a fold of"
            " finite gradients: lower the learning rate, or clip the gradients, and restart from a checkpoint"
        )
