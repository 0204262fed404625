"""A simulated job on several devices: the real scheduler, lanes and arena on devices, driven by a seed, every access checked.

Each turn, one worker takes one action, or one stream runs one piece of work. A push's gradient is 1 at one place, so that every
lost or doubled push shows. What a worker reads must be the version that it pulled, whenever its stream comes to read it.

A world can leave out one record of an event or one wait for one, or swap two steps: it must then fail.
"""

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
from fastps.device.first import FirstVersion
from fastps.device.hazards import HazardError
from fastps.device.interface import DeviceError
from fastps.device.plan import handle_table_bytes, homes
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
_MOST_STEPS, MOST_TURNS, _AFTER_DEATH = 5, 100_000, 80
GENERATION = 100  # between the process numbers of two owners of a lane
ITEMS = 2
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
            super().wait(event, stream)

    def synchronize_event(self, event: SteppedEvent) -> None:
        """See Device."""
        if not self._world.leaves_out("host", event, None):
            super().synchronize_event(event)


@dataclass
class Content:
    """What a weights buffer of a shard holds, with the state that belongs to it."""

    weights: Floats
    state: Floats
    steps: npt.NDArray[np.int64]


class Worker:
    """One worker of a world: its process's device, lane and arena, and what it has read."""

    def __init__(self, world: "World", rank: int, gpu: str, generation: int = 0) -> None:
        """`generation`: how many workers had this lane before."""
        self.world, self.rank, self.generation = world, rank, generation
        self.process = rank + generation * GENERATION
        self.device = world.device_of(self.process, gpu)
        if world.memory.arena.claim(rank, os.getpid(), generation > 0) != generation:
            raise ViolationError(f"lane {rank} has another owner than number {generation}")
        self.lane = WorkerLane(world.memory.arena, rank)
        self.arena = DeviceArena(world.memory, rank, self.device, items=ITEMS)
        self.buffers = [0] * world.shards
        self.slots: dict[int, int] = {}  # by slot: the step of its last push
        floats = world.layout.buffer_floats
        self.reads = self.device.host_memory(4 * floats * (2 * world.steps + 2)).view(np.float32).reshape(-1, floats)
        self.reads[:] = _UNREAD
        self.expected: list[Floats] = []
        self.gradients = self.device.host_memory(4 * floats * world.steps).view(np.float32).reshape(-1, floats)
        for step in range(world.steps):
            for parameter in world.layout.parameters:
                self.gradients[step, parameter.offset + world.place_of(rank, step, generation)] = 1
        self.pushed = self.gradients.copy()  # which stays when the process dies
        self.posts = 0
        self.has_left = False

    def script(self) -> Iterator[None]:
        """The actions of the worker's life, each up to a yield."""
        world, lane, arena = self.world, self.lane, self.arena
        for step in range(world.steps):
            self._read()
            yield
            slot = self._write_gradient(step)
            yield
            for action in self._in_order([lambda slot=slot: arena.mark_computed(slot), self._post], POST_FIRST, "push"):
                action()
                yield
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

    def _in_order(self, actions: list[Any], swapped: str, moment: str) -> list[Any]:
        self.world.moment = moment
        return actions[::-1] if self.world.left_out == swapped else actions

    def _pull(self) -> Iterator[None]:
        for action in self._in_order([self.arena.mark_computed, self._pin], RELEASE_FIRST, "pull"):
            self.world.moment = "pull"
            action()
            yield
        self.arena.show_pulled(self.buffers)
        self.shown = self._pulled()

    def _pin(self) -> None:
        self.world.publish(self.process)
        if (shard := self.lane.pull_all(self.buffers)) >= 0:
            raise ViolationError(f"the commit word of shard {shard} is damaged")

    def begin(self) -> None:
        """Pull for the first time."""
        self._pin()
        self.arena.show_pulled(self.buffers)
        self.shown = self._pulled()

    def _pulled(self) -> Floats:
        """What the pulled buffers hold."""
        contents = self.world.contents
        return np.concatenate([contents[shard][buffer].weights for shard, buffer in enumerate(self.buffers)])

    def _read(self) -> None:
        """Queue a read of the shown weights, as a forward pass."""
        target = self.reads[len(self.expected)]
        for index, parameter in enumerate(self.world.layout.parameters):
            address = self.arena.shown_address(self.buffers[parameter.shard], index)
            to = target[parameter.offset :].ctypes.data
            self.device.copy(to, address, 4 * parameter.length, self.device.compute_stream())
        self.expected.append(self.shown)

    def _write_gradient(self, step: int) -> int:
        """Queue the gradients of a step into the slot, as a backward pass, parameter by parameter."""
        slot, lane = int(self.lane.slot), self.lane
        for index, parameter in enumerate(self.world.layout.parameters):
            source = self.gradients[step, parameter.offset :].ctypes.data
            target = self.arena.gradient_address(self.rank, slot, index)
            self.device.copy(target, source, 4 * parameter.length, self.device.compute_stream())
        lane.set_hyper(slot, 0, *self.world.hyper)
        lane.set_presence(slot, presence_of(range(self.world.shards), self.world.shards))
        self.slots[slot] = step
        return slot

    def _post(self) -> None:
        self.world.moment = "push"
        self.world.publish(self.process)
        self.posts += 1
        self._settle(self.lane.push(self.world.now(), 1.0, 1, False))

    def combine(self) -> None:
        """Try the locks of the shards that this worker folds."""
        self.world.publish(self.process)
        self._settle(self.lane.try_combine(self.world.now()))

    def _settle(self, outcome: int) -> None:
        if outcome in (DONE, BUSY):
            return
        if self.lane.fold_failure is not None:
            raise self.lane.fold_failure
        raise ViolationError(f"worker {self.rank} combined with outcome {outcome}")

    def _leave(self) -> None:
        lane = self.lane
        self.world.publish(self.process)
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

    _ends_with_the_dead = True  # whether a death explains a DeviceError

    def __init__(self, seed: int, devices: int, left_out: str | None = None) -> None:
        self.random = random.Random(seed)
        self.left_out = left_out
        self.seen: set[str] = set()
        self.faults: Counter[str] = Counter(deaths=0, missing_peers=0, rejoins=0, copies=0)
        self.turns, self.moment, self._now_ns, self._is_running = 0, "", 0, False
        draw = self.random
        gpus = [f"gpu {number}" for number in range(draw.randint(1, devices))]
        count = draw.randint(max(2, len(gpus)), max(2, devices))
        self._gpus = [*gpus, *(draw.choice(gpus) for _ in range(count - len(gpus)))]
        self.steps = draw.randint(2, _MOST_STEPS)
        spec, self.folds_all = draw.choice(SPECS)
        momentum = draw.choice((0.0, 0.5))
        update = SGD(lr=1.0, momentum=momentum)
        self.hyper = update.hyper
        self.layout = self._layout_of(parse_policy(spec), update, count)
        self.policy, self.shards = self.layout.policy, len(self.layout.shards)
        self.spec = f"{spec}, {count} workers on {len(gpus)} devices"
        self.node = SteppedNode(draw.randrange(1 << 30), self._unreachable(gpus))
        self.memory = self._memory()
        self._dies = draw.random() < 0.2
        self.folded: Counter[tuple[int, int, int]] = Counter()
        self.workers: list[Worker] = []
        self._roles: dict[int, str] = {}
        planes = len(update.rule.planes)
        first = []
        for begin, end in self.layout.shards:
            length = end - begin
            state = np.zeros((planes, length), np.float32)
            first.append(Content(np.zeros(length, np.float32), state, np.zeros(1, np.int64)))
        self.contents = [{0: content} for content in first]
        self._states = [{0: content} for content in first]

    def _layout_of(self, policy: Policy, update: Any, workers: int) -> Layout:
        owners = [self._gpus.index(gpu) for gpu in dict.fromkeys(self._gpus)]
        shards = self.random.randint(len(owners), len(owners) + 1)
        rows = [(f"parameter {number}", (self.places,), (1,), 0) for number in range(shards)]
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

    @property
    def places(self) -> int:
        """The length of a parameter: a place for each push of the job."""
        return len(self._gpus) * self.steps

    def place_of(self, rank: int, step: int, generation: int = 0) -> int:
        """The place at which a push's gradient is 1."""
        return (generation * len(self._gpus) + rank) * self.steps + step

    def device_of(self, process: int, gpu: str) -> WatchedDevice:
        """A device of the node as a process uses it."""
        return WatchedDevice(self.node, process, gpu, self)

    def publish(self, process: int) -> None:
        """A process writes control words: what its host knows to be done, others know that read them. Events say more here."""

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
            key = f"record {role}" + (f" at the {self.moment}" if role == "computed" else "")
        elif verb == "wait":
            assert stream is not None
            key = f"{on} stream waits for {'own' if event.owner == stream.process else 'others'} {role}"
        else:
            key = f"host waits for {role}"
        self.seen.add(key)
        return key == self.left_out

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
                if not self._ends_with_the_dead or not self.node.dead:
                    raise ViolationError(f"{type(error).__name__}: {error}") from error
            self._check()
        finally:
            self.workers.clear()
            self.memory.close()

    def _check(self) -> None:
        """Check what the job's processes have read and folded."""
        for worker in self.workers:
            if worker.rank not in self.node.dead:
                worker.check_reads(are_all=not self.node.dead)
        if not self.node.dead:
            self._check_pushes()

    def _begin(self) -> None:
        self.workers += [Worker(self, rank, gpu) for rank, gpu in enumerate(self._gpus)]
        for worker in self.workers:
            worker.lane.fold_with(worker.arena.fold, ())
            worker.arena.show()
        for worker in self.workers:
            worker.arena.open()
        first = FirstVersion(self.layout, is_resumed=False)
        self.workers[0].arena.fill(first)
        first.close()
        self.node.meet()  # as through the shard locks, under which each step of the setup is taken
        for worker in self.workers:
            worker.arena.take_first()
        self.node.meet()
        for worker in self.workers:
            parts = worker.arena.parts()
            self._roles |= {id(part): name.split()[0] for name, part in parts.items()}
            worker.begin()
            worker.lane.fold_with(partial(self.fold, worker.arena), worker.arena.own_shards())
        self._is_running = True

    def fold(self, arena: DeviceArena, call: FoldCall) -> None:
        """Let an arena fold, and note what the buffers will then hold."""
        arena.fold(call)
        shard, pushes = call.shard, []
        begin, end = self.layout.shards[shard]
        for push in call.pushes:
            worker = self.workers[push.lane]
            step = worker.slots[push.slot]
            self.folded[shard, worker.process, step] += 1
            gradient = worker.pushed[step, begin:end]
            pushes.append((gradient, [self.hyper], [True], push.scale, push.rate_scale))
        before = Content(self.contents[shard][call.weights_in].weights, *self.state_of(shard, call.state_in))
        weights, state, steps = fold.fold(
            self.layout.rule.number,
            call.mode,
            [(0, self.places, 0)],
            pushes,
            before.weights,
            before.state,
            before.steps,
            scale=call.scale,
            rate_scale=call.rate_scale,
        )
        after = Content(weights, state, steps)
        self.contents[shard][call.weights_out] = self._states[shard][call.state_out] = after

    def state_of(self, shard: int, buffer: int) -> tuple[Floats, npt.NDArray[np.int64]]:
        """What a state buffer of a shard holds, with the counts of steps."""
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
        left = MOST_TURNS
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
            raise ViolationError(f"after {MOST_TURNS} turns workers {sorted(scripts)} have not ended")
        while self.node.step():
            self.turns += 1
        if not self.node.dead and any(stream.work for stream in self.node.streams):
            raise ViolationError("a stream waits for an event that is never recorded")

    def _check_pushes(self) -> None:
        """Every push was folded once in every shard, or not at all where the discipline drops pushes."""
        for shard in range(self.shards):
            for worker in self.workers:
                for step in range(self.steps):
                    count = self.folded[shard, worker.process, step]
                    if count > 1 or (self.folds_all and not count):
                        raise ViolationError(f"the push of worker {worker.rank}, step {step} was folded {count} times")
