"""A simulated job on several devices: the real scheduler, lanes and arena on devices, driven by a seed, every access checked.

Each turn, one worker takes one action, or one stream runs one piece of work. A push's gradient is 1 at one place, so that every
lost or doubled push shows. In some jobs a share of the pushes is non-finite, and must be rejected; in some the model shows
weights in half precision. What a worker reads must be
the version that it pulled, whenever its stream comes to read it.

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
from fastps.device.hazards import HazardError
from fastps.device.interface import DeviceError
from fastps.device.plan import handle_table_bytes, homes
from fastps.device.stepped import SteppedDevice, SteppedEvent, SteppedNode, SteppedStream
from fastps.job.fault_policy import FaultPolicy
from fastps.job.layout import GradientType, Layout, place
from fastps.job.plan import plan
from fastps.job.policy import Policy
from fastps.job.specs import parse_policy
from fastps.job.update_rules import SGD
from fastps.kernels.cuda import launch_args
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
_MOST_STEPS, _MOST_TURNS, _AFTER_DEATH = 5, 100_000, 80
_ITEMS = 2
_NONFINITE_SHARE = 0.1  # of the pushes to a shard
_UNREAD = 77.0  # no weight has this value

Floats = npt.NDArray[np.float32]


def _narrowed(weights: Floats, half: str) -> npt.NDArray[np.uint16]:
    """The bits of weights in half precision."""
    bits = np.zeros(len(weights), np.uint16)
    fold.narrow(np.ascontiguousarray(weights), bits, launch_args.DTYPES[half])
    return bits


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
        self.buffers = [0] * world.shards
        self.slots: dict[int, int] = {}  # by slot: the step of its last push
        floats = world.layout.buffer_floats
        self.reads = self.device.host_memory(4 * floats * (2 * world.steps + 2)).view(np.float32).reshape(-1, floats)
        self.reads[:] = _UNREAD
        self.expected: list[Floats] = []
        self.gradients = self.device.host_memory(4 * floats * world.steps).view(np.float32).reshape(-1, floats)
        for step in range(world.steps):
            for parameter in world.layout.parameters:
                value = world.nonfinite.get((parameter.shard, rank, step), 1.0)
                self.gradients[step, parameter.offset + world.place_of(rank, step)] = value
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
        contents = self.world.contents
        self.shown = np.concatenate([contents[shard][buffer].weights for shard, buffer in enumerate(self.buffers)])

    def _pin(self) -> None:
        if (shard := self.lane.pull_all(self.buffers)) >= 0:
            raise ViolationError(f"the commit word of shard {shard} is damaged")

    def begin(self) -> None:
        """Pull for the first time."""
        self._pin()
        self.arena.show_pulled(self.buffers)
        self.shown = np.zeros(self.world.layout.buffer_floats, np.float32)

    def _read(self) -> None:
        """Queue a read of the shown weights, as a forward pass."""
        target = self.reads[len(self.expected)]
        for index, parameter in enumerate(self.world.layout.parameters):
            address = self.arena.shown_address(self.buffers[parameter.shard], index)
            to, size = target[parameter.offset :].ctypes.data, 2 if self.arena.shows_half(index) else 4
            self.device.copy(to, address, size * parameter.length, self.device.compute_stream())
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
        self._settle(self.lane.push(self.world.now(), 1.0, 1, False))

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
        self.faults: Counter[str] = Counter(deaths=0, missing_peers=0, nonfinite=0)
        self.turns, self.moment, self._now_ns, self._is_running = 0, "", 0, False
        draw = self.random
        gpus = [f"gpu {number}" for number in range(draw.randint(1, devices))]
        count = draw.randint(max(2, len(gpus)), max(2, devices))
        self._gpus = [*gpus, *(draw.choice(gpus) for _ in range(count - len(gpus)))]
        self.steps = draw.randint(2, _MOST_STEPS)
        spec, self._folds_all = draw.choice(SPECS)
        momentum = draw.choice((0.0, 0.5))
        update = SGD(lr=1.0, momentum=momentum)
        self.hyper = update.hyper
        self.layout = self._layout_of(parse_policy(spec), update, count)
        self.policy, self.shards = self.layout.policy, len(self.layout.shards)
        self.spec = f"{spec}, {count} workers on {len(gpus)} devices"
        self.node = SteppedNode(draw.randrange(1 << 30), self._unreachable(gpus))
        self.memory = self._memory()
        self._dies = draw.random() < 0.2
        self.nonfinite = self._drawn_nonfinite()
        self._rejected: Counter[tuple[int, int, int]] = Counter()
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
        shards = self.random.randint(len(owners), len(owners) + 1)
        rows = [(f"parameter {number}", (workers * self.steps,), (1,), 0) for number in range(shards)]
        half: GradientType = self.random.choice(("float32", "bfloat16", "float16"))
        types: list[GradientType] = [self.random.choice((half, "float32")) for _ in range(shards)]
        faults = FaultPolicy(nonfinite=self.random.choice(("allow", "reject")))
        layout = Layout(place(rows, 1, types=types), 1, update.rule, policy, workers, faults=faults).with_shards(shards)
        homes_of = homes([4 * (end - begin) for begin, end in layout.shards], owners)
        return replace(layout, owner_lanes=homes_of, extra_bytes=handle_table_bytes(len(homes_of)))

    def _drawn_nonfinite(self) -> dict[tuple[int, int, int], float]:
        """By shard, worker and step: the value of a push's gradient that is non-finite. None in a job that allows them."""
        if self.layout.faults.nonfinite == "allow":
            return {}
        draw, ranks = self.random, range(len(self._gpus))
        places = [(shard, rank, step) for shard in range(self.shards) for rank in ranks for step in range(self.steps)]
        found = {each: draw.choice((np.nan, np.inf, -np.inf)) for each in places if draw.random() < _NONFINITE_SHARE}
        self.faults["nonfinite"] += len(found)
        return found

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

    def _fold(self, worker: _Worker, call: FoldCall) -> list[int] | None:
        """Let a worker's arena fold or reject, and note what the buffers will then hold."""
        told = worker.arena.fold(call)
        self._check_told(call, told)
        if told is not None:
            return told
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
        return None

    def _check_told(self, call: FoldCall, told: list[int] | None) -> None:
        """Check that exactly the non-finite pushes of a fold are rejected, under the name of their parameter."""
        of_shard = next(index for index, each in enumerate(self.layout.parameters) if each.shard == call.shard)
        for index, push in enumerate(call.pushes):
            key = call.shard, push.lane, self.workers[push.lane].slots[push.slot]
            expected, found = of_shard if key in self.nonfinite else -1, told[index] if told is not None else -1
            if found != expected:
                raise ViolationError(
                    f"the push of worker {key[1]}, step {key[2]} was told non-finite in parameter {found}, not {expected}"
                )
            self._rejected[key] += found >= 0

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
                    count = self._folded[shard, worker.rank, step] + self._rejected[shard, worker.rank, step]
                    if count > 1 or (self._folds_all and not count):
                        raise ViolationError(f"the push of worker {worker.rank}, step {step} was folded {count} times")
        counted, told = self.memory.arena.rejections, self._rejected.total()
        if counted != told:
            raise ViolationError(f"{told} pushes were rejected, and {counted} counted")
