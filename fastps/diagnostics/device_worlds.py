"""A simulated job on several devices: the real scheduler, lanes and arena on devices, driven by a seed, every access checked.

Each turn, one worker takes one action, or one stream runs one piece of work. A push's gradient is 1 at one place, so that every
lost or doubled push shows. What a worker reads must be the version that it pulled, whenever its stream comes to read it.

A world can leave out one record of an event or one wait for one, or swap two steps: it must then fail.

Gradients appear shard by shard, from the last to the first, and are marked as a hook of backward marks them, or not; some
change after that; some pushes turn out to be null. Where folds go by what has arrived, no fold may wait for work of another
worker that is not done.
"""

import itertools
import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from fastps.device.arena import DeviceArena
from fastps.device.hazards import HazardError
from fastps.device.interface import DeviceError
from fastps.device.plan import handle_table_bytes, homes, waits_before_posting
from fastps.device.stepped import SteppedDevice, SteppedEvent, SteppedNode, SteppedStream
from fastps.job.layout import Layout, place
from fastps.job.plan import plan
from fastps.job.policy import Policy
from fastps.job.specs import parse_policy
from fastps.job.update_rules import SGD
from fastps.kernels.protocol.fold_call import FoldCall
from fastps.kernels.protocol.lane import BUSY, DONE, KIND_LEAVE
from fastps.kernels.protocol.worker_lane import WorkerLane
from fastps.kernels.shm.format import format_memory
from fastps.kernels.update import fold
from fastps.membership.job_memory import JobMemory
from fastps.store.presence import presence_of
from fastps.system import shared_memory
from fastps.system.clock import SYSTEM_CLOCK

# The second column: whether every push is folded.
SPECS = (
    ("bsp", True),
    ("asp", True),
    ("ssp:1", True),
    ("dssp:1,3,hard_bound=true", True),
    ("softsync:2", True),
    ("backup:1", False),
    ("policy:fold=quorum,grant=next-version,count=2,scale=mean", False),
)
POST_FIRST, RELEASE_FIRST = "post before the record", "release before the record"
FORGET_NOTHING, ONE_SIDE = "forget no changed gradients", "copy over what is shown"
_BSP_SHARE, _MARKED_SHARE, _CHANGED_SHARE, _NULL_SHARE = 0.4, 0.7, 0.15, 0.1
_MOST_STEPS, _MOST_TURNS, _AFTER_DEATH = 5, 100_000, 80
_ITEMS = 2
_UNREAD = 77.0  # no weight has this value

Floats = npt.NDArray[np.float32]


class ViolationError(Exception):
    """A promise of the protocol that a world broke."""


class WatchedDevice(SteppedDevice):
    """A device of a world that leaves out one kind of call."""

    def __init__(self, node: SteppedNode, process: int, identity: str, world: "World") -> None:
        super().__init__(node, process, identity)
        self._world = world

    def record(self, event: SteppedEvent, stream: SteppedStream) -> None:
        """See Device."""
        if not self._world.leaves_out("record", event, stream):
            super().record(event, stream)

    def wait(self, event: SteppedEvent, stream: SteppedStream) -> None:
        """See Device."""
        if not self._world.leaves_out("wait", event, stream):
            self._world.check_wait(event, stream)
            super().wait(event, stream)

    def synchronize_event(self, event: SteppedEvent) -> None:
        """See Device."""
        if not self._world.leaves_out("host", event, None):
            super().synchronize_event(event)

    def is_done(self, event: SteppedEvent) -> bool:
        """See Device."""
        return self._world.leaves_out("host", event, None) or super().is_done(event)


@dataclass
class _Content:
    """What a weights buffer of a shard holds, with the state that belongs to it."""

    weights: Floats
    state: Floats
    steps: npt.NDArray[np.int64]


class _Worker:
    """One worker of a world: its process's device, lane and arena, and what it has read."""

    def __init__(self, world: "World", rank: int, gpu: str) -> None:
        self.world, self.rank = world, rank
        self.device = WatchedDevice(world.node, rank, gpu, world)
        world.memory.arena.claim(rank, os.getpid(), False)
        self.lane = WorkerLane(world.memory.arena, rank)
        self.arena = DeviceArena(world.memory, rank, self.device, items=_ITEMS)
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
                self.gradients[step, parameter.offset + world.place_of(rank, step)] = 1
        self.has_left = False

    def script(self) -> Iterator[None]:
        """The actions of the worker's life, each up to a yield."""
        world, lane, arena = self.world, self.lane, self.arena
        for step in range(world.steps):
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

    def _mark_released(self) -> Iterator[None]:
        yield from self._finish("pull")
        self.arena.mark_released()
        yield

    def _pull(self) -> Iterator[None]:
        for action in self._in_order([self._mark_released, self._pin], RELEASE_FIRST):
            yield from action()
        self.arena.show_pulled(self.buffers)
        self.numbers = self.arena.shown_numbers(self.buffers)
        contents = self.world.contents
        self.shown = np.concatenate([contents[shard][buffer].weights for shard, buffer in enumerate(self.buffers)])

    def _pin(self) -> Iterator[None]:
        if (shard := self.lane.pull_all(self.buffers)) >= 0:
            raise ViolationError(f"the commit word of shard {shard} is damaged")
        yield

    def begin(self) -> None:
        """Pull for the first time."""
        list(self._pin())
        self.arena.show_pulled(self.buffers)
        self.numbers = self.arena.shown_numbers(self.buffers)
        self.shown = np.zeros(self.world.layout.buffer_floats, np.float32)

    def _read(self) -> None:
        """Queue a read of the shown weights, as a forward pass."""
        target = self.reads[len(self.expected)]
        for index, parameter in enumerate(self.world.layout.parameters):
            address = self.arena.shown_address(self.numbers[parameter.shard], index)
            to = target[parameter.offset :].ctypes.data
            self.device.copy(to, address, 4 * parameter.length, self.device.compute_stream())
        self.expected.append(self.shown)

    def _write_gradient(self, step: int, slot: int) -> Iterator[None]:
        """Queue the gradients of a step into the slot, as a backward pass, from the last shard to the first."""
        world, lane, draw = self.world, self.lane, self.world.random
        for shard in reversed(range(world.shards)):
            self._write_shard(step, slot, shard)
            if draw.random() < _MARKED_SHARE:
                world.moment = "hook"
                self.arena.mark_computed(shard, slot)
                yield
        for shard in range(world.shards):
            # A copy to host memory may run meanwhile: what it tears it copies again, which the check of accesses cannot know.
            if draw.random() < _CHANGED_SHARE and not self.arena.is_sent(shard):
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
        self._settle(self.lane.push(self.world.now(), 1.0, 1, slot is None))
        yield

    def combine(self) -> None:
        """Try the locks of the shards that this worker folds."""
        self._settle(self.lane.try_combine(self.world.now()))

    def _settle(self, outcome: int) -> None:
        if outcome in (DONE, BUSY):
            return
        if self.lane.fold_failure is not None:
            raise self.lane.fold_failure
        raise ViolationError(f"worker {self.rank} combined with outcome {outcome}")

    def _leave(self) -> None:
        lane = self.lane
        if not lane.post(KIND_LEAVE, lane.steps, 0, lane.version, self.world.now()):
            raise ViolationError(f"the ring of worker {self.rank} is full")
        self.world.memory.arena.leave(self.rank)
        self.has_left = True
        self.combine()

    def check_reads(self, *, are_all: bool) -> None:
        """Compare what was read with the versions that were pulled."""
        for number, expected in enumerate(self.expected):
            for parameter in self.world.layout.parameters:
                span = slice(parameter.offset, parameter.offset + parameter.length)
                found = self.reads[number, span]
                if not are_all and (found == _UNREAD).all():
                    continue
                if not np.array_equal(found, expected[span]):
                    raise ViolationError(
                        f"read {number} of worker {self.rank}: {parameter.name} is not as in the version that it pulled"
                    )


class World:
    """One seed's job. `left_out`: the call that is left out, by its key, or the steps that are swapped.

    Attributes:
        seen: the keys of all calls that a mutant could leave out.
        turns: actions and pieces of work so far.
        faults: how often what was drawn, by kind.
    """

    def __init__(self, seed: int, devices: int, left_out: str | None = None) -> None:
        self.random = random.Random(seed)
        self.left_out = left_out
        self.seen: set[str] = set()
        self.faults: Counter[str] = Counter(deaths=0, missing_peers=0)
        self.turns, self.moment, self._now_ns, self._is_running = 0, "", 0, False
        draw = self.random
        gpus = [f"gpu {number}" for number in range(draw.randint(1, devices))]
        count = draw.randint(max(2, len(gpus)), max(2, devices))
        self._gpus = [*gpus, *(draw.choice(gpus) for _ in range(count - len(gpus)))]
        self.steps = draw.randint(2, _MOST_STEPS)
        spec, self._folds_all = SPECS[0] if draw.random() < _BSP_SHARE else draw.choice(SPECS)
        momentum = draw.choice((0.0, 0.5))
        update = SGD(lr=1.0, momentum=momentum)
        self.hyper = update.hyper
        self.layout = self._layout_of(parse_policy(spec), update, count)
        self.policy, self.shards = self.layout.policy, len(self.layout.shards)
        self._waits = waits_before_posting(self.layout)
        self.spec = f"{spec}, {count} workers on {len(gpus)} devices"
        self.node = SteppedNode(draw.randrange(1 << 30), self._unreachable(gpus))
        self.memory = self._memory()
        self._dies = draw.random() < 0.2
        self.void_steps = {step for step in range(self.steps) if draw.random() < _NULL_SHARE}  # in which all pushes are null
        self._folded: Counter[tuple[int, int, int]] = Counter()
        self.workers: list[_Worker] = []
        self._roles: dict[int, str] = {}
        planes = len(update.rule.planes)
        first = []
        for begin, end in self.layout.shards:
            length = end - begin
            state = np.zeros((planes, length), np.float32)
            first.append(_Content(np.zeros(length, np.float32), state, np.zeros(1, np.int64)))
        self.contents = [{0: content} for content in first]
        self._states = [{0: content} for content in first]

    def _layout_of(self, policy: Policy, update: Any, workers: int) -> Layout:
        owners = [self._gpus.index(gpu) for gpu in dict.fromkeys(self._gpus)]
        shards = self.random.randint(len(owners), 2 * len(owners))
        rows = [(f"parameter {number}", (workers * self.steps,), (1,), 0) for number in range(shards)]
        layout = Layout(place(rows, 1), 1, update.rule, policy, workers).with_shards(shards)
        homes_of = homes([4 * (end - begin) for begin, end in layout.shards], owners)
        return replace(layout, owner_lanes=homes_of, extra_bytes=handle_table_bytes(len(homes_of)))

    def _unreachable(self, gpus: list[str]) -> set[frozenset[str]]:
        pairs = [frozenset((one, other)) for one in gpus for other in gpus if one < other]
        share = self.random.choice((0.0, 0.0, 0.3, 1.0))
        found = {pair for pair in pairs if self.random.random() < share}
        self.faults["missing_peers"] += len(found)
        return found

    def _memory(self) -> JobMemory:
        header, size, needed = plan(self.layout)
        descriptor = shared_memory.create(size, "a simulated job", needed)
        memory = shared_memory.map_shared(descriptor)
        segments = [(parameter.offset, parameter.length, parameter.group) for parameter in self.layout.parameters]
        values = self.policy.values(self.layout.workers)
        format_memory(memory, header, segments, shards=self.layout.host_shards, tables=[], started=len(self._gpus), **values)
        return JobMemory(descriptor, memory, self.layout, "simulated", 1.0, SYSTEM_CLOCK, [self.hyper])

    def place_of(self, rank: int, step: int) -> int:
        """The place at which a push's gradient is 1."""
        return rank * self.steps + step

    def now(self) -> int:
        """The time, which moves with each look."""
        self._now_ns += self.random.randint(1, 1000)
        return self._now_ns

    # -- what is left out --------------------------------------------------------------------------

    def leaves_out(self, verb: str, event: SteppedEvent, stream: SteppedStream | None) -> bool:
        """Whether this call is the one that the world leaves out."""
        if not self._is_running:
            return False
        role = self._roles[id(event)]
        on = self._roles[id(stream)] if stream is not None else ""
        if verb == "record":
            key = f"record {role}" + (f" at the {self.moment}" if role in ("computed", "finished") else "")
        elif verb == "wait":
            assert stream is not None
            key = f"{on} stream waits for {'own' if event.owner == stream.process else 'others'} {role}"
        else:
            key = f"host waits for {role}" + (f" at the {self.moment}" if role == "finished" else "")
        self.seen.add(key)
        return key == self.left_out

    def check_wait(self, event: SteppedEvent, stream: SteppedStream) -> None:
        """A fold waits for no work of another worker, where each worker waits for its own before it posts or releases."""
        if not (self._is_running and self._waits) or event.owner == stream.process or self._roles[id(stream)] != "fold":
            return
        role = self._roles[id(event)]
        work = self.workers[event.owner].device.compute_stream().work if role != "folded" else ()
        recorded = event, event.made
        before = itertools.takewhile(lambda piece: not piece.records or (piece.event, piece.number) != recorded, work)
        ahead = [piece.text for piece in before if piece.run is not None]
        if ahead and event.done < event.made:
            raise ViolationError(f"a fold waits for {role} of worker {event.owner}, which has still to do: {', '.join(ahead)}")

    # -- the run -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Play the seed. Raises ViolationError or HazardError for a broken promise."""
        try:
            self._begin()
            try:
                self._play()
            except HazardError:
                raise
            except DeviceError as error:
                if not self.node.dead:  # a death explains it: the job ends
                    raise ViolationError(f"{type(error).__name__}: {error}") from error
            for worker in self.workers:
                if worker.rank not in self.node.dead:
                    worker.check_reads(are_all=not self.node.dead)
            if not self.node.dead:
                self._check_pushes()
        finally:
            self.workers.clear()
            self.memory.close()

    def _begin(self) -> None:
        self.workers += [_Worker(self, rank, gpu) for rank, gpu in enumerate(self._gpus)]
        for worker in self.workers:
            worker.lane.fold_with(worker.arena.fold, ())
            worker.arena.show()
        for worker in self.workers:
            worker.arena.open()
        self.workers[0].arena.fill([np.zeros(parameter.length, np.float32) for parameter in self.layout.parameters])
        self.node.meet()  # as through the shard locks, under which each step of the setup is taken
        for worker in self.workers:
            worker.arena.take_first()
        self.node.meet()
        for worker in self.workers:
            parts = worker.arena.parts()
            self._roles |= {id(part): name.split()[0] for name, part in parts.items()}
            worker.begin()
            worker.lane.fold_with(partial(self._fold, worker), worker.arena.own_shards())
        self._is_running = True

    def _fold(self, worker: _Worker, call: FoldCall) -> None:
        """Let a worker's arena fold, and note what the buffers will then hold."""
        worker.arena.fold(call)
        shard, pushes = call.shard, []
        begin, end = self.layout.shards[shard]
        for push in call.pushes:
            step = self.workers[push.lane].slots[push.slot]
            self._folded[shard, push.lane, step] += 1
            gradient = self.workers[push.lane].gradients[step, begin:end]
            pushes.append((gradient, [self.hyper], [True], push.scale, push.rate_scale))
        before = _Content(self.contents[shard][call.weights_in].weights, *self._state_of(shard, call.state_in))
        weights, state, steps = fold.fold(
            self.layout.rule.number,
            call.mode,
            [(0, len(self.workers) * self.steps, 0)],
            pushes,
            before.weights,
            before.state,
            before.steps,
            scale=call.scale,
            rate_scale=call.rate_scale,
        )
        after = _Content(weights, state, steps)
        self.contents[shard][call.weights_out] = self._states[shard][call.state_out] = after

    def _state_of(self, shard: int, buffer: int) -> tuple[Floats, npt.NDArray[np.int64]]:
        found = self._states[shard][buffer]
        return found.state, found.steps

    def is_over(self) -> bool:
        """Whether every worker has left and every push is decided."""
        counters = self.memory.arena.counters
        return all(worker.has_left for worker in self.workers) and all(
            counters(worker.rank)["done"] >= counters(worker.rank)["posted"] for worker in self.workers
        )

    def _play(self) -> None:
        """Take turns until the job has ended."""
        scripts = {worker.rank: worker.script() for worker in self.workers}
        dies_at = self.random.randint(1, 80 * len(scripts)) if self._dies else 0
        eager = self.random.choice((0.1, 0.5, 0.9))  # how often a worker's turn comes before a stream's
        left = _MOST_TURNS
        while scripts and left:
            self.turns += 1
            left -= 1
            if self.turns == dies_at:
                victim = self.random.choice(list(scripts))
                self.node.kill(victim)
                del scripts[victim]
                self.faults["deaths"] += 1
                left = _AFTER_DEATH  # then the others have heard of it
                continue
            if self.random.random() >= eager and self.node.step():
                continue
            rank = self.random.choice(list(scripts))
            if next(scripts[rank], self) is self:
                del scripts[rank]
        if scripts and not self.node.dead:
            raise ViolationError(f"after {_MOST_TURNS} turns workers {sorted(scripts)} have not ended")
        while self.node.step():
            self.turns += 1
        if not self.node.dead and any(stream.work for stream in self.node.streams):
            raise ViolationError("a stream waits for an event that is never recorded")

    def _check_pushes(self) -> None:
        """Every push was folded once in every shard, or not at all where the discipline drops pushes."""
        for shard in range(self.shards):
            for worker in self.workers:
                for step in range(self.steps):
                    count = self._folded[shard, worker.rank, step]
                    if count > 1 or (self._folds_all and count + (step in worker.nulls) != 1):
                        raise ViolationError(f"the push of worker {worker.rank}, step {step} was folded {count} times")
