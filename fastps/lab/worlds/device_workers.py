"""A worker of a simulated job on devices: a script of the actions of its life, on a device of which a call can be left out.

Gradients appear shard by shard, from the last to the first, and are marked as a hook of backward marks them, or not; some
change after that; some pushes turn out to be null. The worlds of this package
give it what it asks for.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import numpy.typing as npt

from fastps.device.arena import DeviceArena
from fastps.device.interface import Event, Stream
from fastps.device.memory import FirstVersion
from fastps.job.layout import GradientType, Layout, Parameter, place
from fastps.job.plan import plan
from fastps.job.update_rules import Hyper
from fastps.kernels.cuda import launch_args
from fastps.kernels.protocol.lane import BUSY, DONE, KIND_LEAVE, Lane
from fastps.kernels.shm.format import format_memory
from fastps.kernels.update import fold
from fastps.lab.gpus.stepped import SteppedDevice, SteppedNode
from fastps.membership.job_memory import JobMemory
from fastps.store.row_slots import presence_of
from fastps.system import shared_memory
from fastps.system.clock import SYSTEM_CLOCK

POST_FIRST, RELEASE_FIRST = "post before the record", "release before the reads"
FORGET_NOTHING, ONE_SIDE = "forget no changed gradients", "copy over what is shown"
GENERATION = 100  # between the process numbers of two owners of a lane
_MARKED_SHARE, _CHANGED_SHARE, _NULL_SHARE = 0.7, 0.15, 0.1
_UNREAD = 77.0  # no weight has this value

Floats = npt.NDArray[np.float32]


def _narrowed(weights: Floats, half: str) -> npt.NDArray[np.uint16]:
    """The bits of weights in half precision."""
    bits = np.zeros(len(weights), np.uint16)
    fold.narrow(np.ascontiguousarray(weights), bits, launch_args.DTYPES[half])
    return bits


def parts_of(arena: DeviceArena) -> dict[str, Event | Stream]:
    """A lane's events and streams by name, for checks that leave one out. Makes the streams of folds and copies."""
    named: dict[str, Event | Stream] = {"finished": arena._finished, "copied": arena._copied, "copies": arena._copies}
    named["compute"] = arena.compute_stream()
    for wave in sorted(set(arena._waves)):
        named |= {f"computed {wave}": arena._computed[wave], f"folded {wave}": arena._folded[wave]}
        named[f"fold {wave}"] = arena._queues[wave]
    return named


def rows_of(shards: int, values: int, types: Sequence[GradientType] = ()) -> tuple[Parameter, ...]:
    """The parameters of a job with one of so many values for each shard."""
    return place([(f"parameter {number}", (values,), (1,), 0) for number in range(shards)], types=types)


def memory_of(layout: Layout, hyper: Hyper) -> JobMemory:
    """The arena of a simulated job, as `Store` makes it."""
    header, size, ranges = plan(layout)
    descriptor = shared_memory.create(size, "a simulated job", ranges)
    memory = shared_memory.map_shared(descriptor)
    values = layout.policy.values(layout.workers)
    format_memory(memory, header, layout.segments, shards=layout.host_shards, started=layout.workers, **values)
    return JobMemory(descriptor, memory, layout, "simulated", 1.0, SYSTEM_CLOCK, [hyper] * layout.groups)


def set_up(layout: Layout, node: SteppedNode, parts: Sequence[tuple[Lane, DeviceArena]]) -> None:
    """Take the steps of a setup for all workers of a job that owns its memory, as under the shard locks."""
    for lane, arena in parts:
        lane.fold_with(arena.fold, ())
        arena.publish_handles()
    for _, arena in parts:
        arena.open()
    with closing(FirstVersion(layout, is_resumed=False)) as first:
        parts[0][1].fill(first)
    node.meet()


class ViolationError(Exception):
    """A promise of the protocol that a world broke."""


class WatchedDevice(SteppedDevice):
    """A device of a world that leaves out one kind of call."""

    def __init__(self, node: SteppedNode, process: int, identity: str, world: Any) -> None:
        super().__init__(node, process, identity)
        self._world = world

    def record(self, event: int, stream: int) -> None:
        if not self._world.leaves_out("record", event, stream):
            super().record(event, stream)

    def wait(self, event: int, stream: int) -> None:
        if not self._world.leaves_out("wait", event, stream):
            self._world.check_wait(event, stream)
            super().wait(event, stream)

    def synchronize_event(self, event: int) -> None:
        if not self._world.leaves_out("host", event, None):
            super().synchronize_event(event)

    def is_done(self, event: int) -> bool:
        return self._world.leaves_out("host", event, None) or super().is_done(event)


class Worker:
    """One worker of a world: its process's device, lane and arena, and what it has read."""

    def __init__(self, world: Any, rank: int, gpu: str, generation: int = 0) -> None:
        """`generation`: how many workers had this lane before."""
        self.world, self.rank, self.generation = world, rank, generation
        self.process = rank + generation * GENERATION
        self.device = world.device_of(self.process, gpu)
        if world.memory.arena.claim(rank, os.getpid(), generation > 0) != generation:
            raise ViolationError(f"lane {rank} has another owner than number {generation}")
        self.lane = Lane(world.memory.arena, rank)
        self.arena = DeviceArena(world.memory, rank, self.device)
        if world.left_out == ONE_SIDE:
            self.arena.sides = 1
        self.buffers = [0] * world.shards
        self.slots: dict[int, int] = {}  # by slot: the step of its last push
        self.nulls: set[int] = set()  # the steps whose pushes were null
        floats = world.layout.buffer_floats
        self.reads = self.device.host_memory(4 * floats * (2 * world.steps + 2)).view(np.float32).reshape(-1, floats)
        self.reads[:] = _UNREAD
        self.expected: list[Floats] = []
        self.gradients = self.device.host_memory(4 * floats * world.steps).view(np.float32).reshape(-1, floats)
        for step in range(world.steps):
            for parameter in world.layout.parameters:
                value = world.nonfinite.get((parameter.shard, self.process, step), 1.0)
                self.gradients[step, parameter.offset + world.place_of(rank, step, generation)] = value
        self.pushed = self.gradients.copy()  # which stays when the process dies
        self.posts = 0
        self.has_left = False

    def script(self) -> Iterator[None]:
        """The actions of the worker's life, each up to a yield."""
        world, lane, arena = self.world, self.lane, self.arena
        for step in range(world.steps_of(self.rank)):
            self._read()
            yield
            slot = int(lane.slot)
            yield from self._write_gradient(step, slot)
            is_null = step in world.void_steps or world.random.random() < _NULL_SHARE
            marked = None if is_null else slot
            if is_null:
                self.nulls.add(step)
            for action in self._in_order([self._mark_pushed, self._post], POST_FIRST):
                yield from action(marked)
            if world.random.random() < 0.5:
                self._read()
                yield
            while not lane.advance(world.now(), world.policy.at_once):
                self.combine()
                yield
            yield from self._pull()
        self._leave()
        yield
        while not world.is_over():
            self.combine()
            yield
        yield from self._pull()
        self._read()
        arena.await_folds()

    def _in_order(self, actions: list[Any], swapped: str) -> list[Any]:
        return actions[::-1] if self.world.left_out == swapped else actions

    def _finish(self, moment: str, slot: int | None = None) -> Iterator[None]:
        """Wait for this worker's own work, where its discipline needs that, and fold what others push meanwhile."""
        self.world.moment = moment
        self.arena.begin_finish(slot)
        while not self._is_finished(moment):
            self.combine()
            yield

    def _is_finished(self, moment: str) -> bool:
        self.world.moment = moment
        return self.arena.is_finished()

    def _mark_pushed(self, slot: int | None) -> Iterator[None]:
        yield from self._finish("push", slot)
        self.world.moment = "push"
        self.arena.mark_pushed(slot)
        yield

    def _mark_read(self) -> Iterator[None]:
        """What a worker does before it releases weights: it waits for its reads, or has recorded that they come first."""
        yield from self._finish("pull")
        if self.has_left:
            self.world.moment = "end"
            self.arena.mark_left()
        yield

    def _pull(self) -> Iterator[None]:
        for action in self._in_order([self._mark_read, self._pin], RELEASE_FIRST):
            yield from action()
        self.arena.show_pulled(self.buffers)
        self.numbers = self.arena.shown_numbers(self.buffers)
        self.shown = self._pulled()

    def _pin(self) -> Iterator[None]:
        self.world.publish(self.process)
        if (shard := self.lane.pull_all(self.buffers)) >= 0:
            raise ViolationError(f"the commit word of shard {shard} is damaged")
        yield

    def begin(self) -> None:
        """Pull for the first time."""
        list(self._pin())
        self.arena.show_pulled(self.buffers)
        self.numbers = self.arena.shown_numbers(self.buffers)
        self.shown = self._pulled()

    def _pulled(self) -> Floats:
        """What the pulled buffers hold."""
        contents = self.world.contents
        return np.concatenate([contents[shard][buffer].weights for shard, buffer in enumerate(self.buffers)])

    def _read(self) -> None:
        """Queue a read of the shown weights, as a forward pass."""
        target = self.reads[len(self.expected)]
        for index, parameter in enumerate(self.world.layout.parameters):
            address = self.arena.shown_address(self.numbers[parameter.shard], index)
            to, size = target[parameter.offset :].ctypes.data, 2 if self.arena.shows_half(index) else 4
            self.device.copy(to, address, size * parameter.length, self.device.compute_stream())
        self.expected.append(self.shown)

    def _write_gradient(self, step: int, slot: int) -> Iterator[None]:
        """Queue the gradients of a step into the slot, as a backward pass, from the last shard to the first."""
        world, lane, draw = self.world, self.lane, self.world.random
        for shard in reversed(range(world.shards)):
            self._write_shard(step, slot, shard)
            if draw.random() < _MARKED_SHARE:
                world.moment = "hook"
                self.arena.mark_computed(shard)
                yield
        for shard in range(world.shards):
            if draw.random() < _CHANGED_SHARE:
                self._write_shard(step, slot, shard)
                if world.left_out != FORGET_NOTHING:
                    self.arena.forget(shard)
        lane.set_hyper(slot, 0, *world.hyper)
        lane.set_presence(slot, presence_of(range(world.shards), world.shards))
        self.slots[slot] = step
        yield

    def _write_shard(self, step: int, slot: int, shard: int) -> None:
        for index, parameter in enumerate(self.world.layout.parameters):
            if parameter.shard == shard:
                source = self.gradients[step, parameter.offset :].ctypes.data
                target = self.arena.gradient_address(self.rank, slot, index)
                self.device.copy(target, source, 4 * parameter.length, self.device.compute_stream())

    def _post(self, slot: int | None) -> Iterator[None]:
        self.world.publish(self.process)
        self.world.learn(self.process)
        self.posts += 1
        self._finish_combine(self.lane.push(self.world.now(), 1.0, 1, slot is None))
        yield

    def combine(self) -> None:
        """Try the locks of the shards that this worker folds."""
        self.world.publish(self.process)
        self.world.learn(self.process)
        self._finish_combine(self.lane.try_combine(self.world.now()))

    def _finish_combine(self, outcome: int) -> None:
        if outcome in (DONE, BUSY):
            return
        if self.lane.fold_failure is not None:
            raise self.lane.fold_failure
        raise ViolationError(f"worker {self.rank} combined with outcome {outcome}")

    def _leave(self) -> None:
        lane = self.lane
        self.world.moment = "end"
        self.arena.mark_left()
        self.world.publish(self.process)
        if not lane.post(KIND_LEAVE, lane.steps, 0, lane.version, self.world.now()):
            raise ViolationError(f"the ring of worker {self.rank} is full")
        self.world.memory.arena.leave(self.rank)
        self.has_left = True
        self.combine()

    def check_reads(self, *, are_all: bool) -> None:
        """Compare what was read with the versions that were pulled."""
        for number, expected in enumerate(self.expected):
            for index, parameter in enumerate(self.world.layout.parameters):
                span = slice(parameter.offset, parameter.offset + parameter.length)
                found: Any = self.reads[number, span]
                if not are_all and (found == _UNREAD).all():
                    continue
                shown: Any = expected[span]
                if self.arena.shows_half(index):
                    found, shown = found.view(np.uint16)[: parameter.length], _narrowed(shown, parameter.type)
                if not np.array_equal(found, shown):
                    raise ViolationError(
                        f"read {number} of worker {self.rank}: {parameter.name} is not as in the version that it pulled"
                    )
