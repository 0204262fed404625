"""A simulated job on several devices: the real scheduler, lanes and arena on devices, driven by a seed, every access checked.

Each turn, one worker takes one action, or one stream runs one piece of work. A push's gradient is 1 at one place, so that every
lost or doubled push shows. In some jobs a share of the pushes is non-finite, and must be rejected; in some the model shows
weights in half precision. What a worker reads must be the version that it pulled, whenever its stream comes to read it.

A world can leave out one record of an event or one wait for one, or swap two steps: it must then fail.

Where folds go by what has arrived, no fold may wait for work of another worker that is not done.
"""

import itertools
import random
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from fastps.device.arena import DeviceArena
from fastps.device.interface import DeviceError
from fastps.device.plan import placed_on, waits_before_posting
from fastps.job.fault_policy import FaultPolicy
from fastps.job.layout import GradientType, Layout
from fastps.job.policy import Policy
from fastps.job.specs import parse_policy
from fastps.job.update_rules import SGD
from fastps.kernels.combining.fold_call import FoldCall
from fastps.kernels.update import fold
from fastps.lab.gpus.hazards import Clock, HazardError, merge
from fastps.lab.gpus.stepped import SteppedNode
from fastps.lab.worlds.device_workers import Floats, ViolationError, WatchedDevice, Worker, memory_of, parts_of, rows_of, set_up

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
_BSP_SHARE, _NULL_SHARE = 0.4, 0.1
_EARLY_SHARE = 0.2  # of the workers that leave before the others, under bsp
_NONFINITE_SHARE = 0.1  # of the pushes to a shard
_MOST_STEPS, MOST_TURNS, _AFTER_DEATH = 5, 100_000, 80


@dataclass
class Content:
    """What a weights buffer of a shard holds, with the state that belongs to it."""

    weights: Floats
    state: Floats
    steps: npt.NDArray[np.int64]


class World:
    """One seed's job. `left_out`: the call that is left out, by its key, or the steps that are swapped.

    Attributes:
        seen: the keys of all calls that a mutant could leave out.
        turns: actions and pieces of work so far.
        faults: how often what was drawn, by kind.
    """

    _ends_with_the_dead = True  # whether a death explains a DeviceError
    _on_worker_loss, _served_by = "stop", "workers"

    def __init__(self, seed: int, devices: int, left_out: str | None = None) -> None:
        self.random = random.Random(seed)
        self.published: Clock = {}
        self.left_out = left_out
        self.seen: set[str] = set()
        self.faults: Counter[str] = Counter(deaths=0, rejoins=0, nonfinite=0, copies=0)
        self.turns, self.moment, self._now_ns, self._is_running = 0, "", 0, False
        draw = self.random
        gpus = [f"gpu {number}" for number in range(draw.randint(1, devices))]
        count = draw.randint(max(2, len(gpus)), max(2, devices))
        self._gpus = [*gpus, *(draw.choice(gpus) for _ in range(count - len(gpus)))]
        self.steps = draw.randint(2, _MOST_STEPS)
        spec, self.folds_all = SPECS[0] if draw.random() < _BSP_SHARE else draw.choice(SPECS)
        self._last_steps = [draw.randint(1, self.steps) if draw.random() < _EARLY_SHARE else self.steps for _ in self._gpus]
        momentum = draw.choice((0.0, 0.5))
        update = SGD(lr=1.0, momentum=momentum)
        self.hyper = update.hyper
        self.layout = self._layout_of(parse_policy(spec), update, count)
        self.policy, self.shards = self.layout.policy, len(self.layout.shards)
        self._waits = waits_before_posting(self.layout)
        self.spec = f"{spec}, {count} workers on {len(gpus)} devices"
        self.node = SteppedNode(draw.randrange(1 << 30))
        self.memory = memory_of(self.layout, self.hyper)
        self._dies = draw.random() < 0.2
        self.void_steps = {step for step in range(self.steps) if draw.random() < _NULL_SHARE}  # in which all pushes are null
        self.nonfinite = self._drawn_nonfinite()
        self.rejected: Counter[tuple[int, int, int]] = Counter()
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
        """The job's layout, with a parameter for each shard: of float32, or some of them of one half precision."""
        devices = len(set(self._gpus))
        shards = self.random.randint(devices, 2 * devices)
        faults = FaultPolicy(self._on_worker_loss, self.random.choice(("allow", "reject")))
        half: GradientType = self.random.choice(("float32", "bfloat16", "float16"))
        types: list[GradientType] = [self.random.choice((half, "float32")) for _ in range(shards)]
        parameters = rows_of(shards, self.places, types)
        layout = Layout(parameters, 1, update.rule, policy, workers, faults=faults, server=self._served_by)
        return placed_on(layout.with_shards(shards), self._gpus)

    def _drawn_nonfinite(self) -> dict[tuple[int, int, int], float]:
        """By shard, worker and step: the value of a push's gradient that is non-finite. None in a job that allows them."""
        if self.layout.faults.nonfinite == "allow":
            return {}
        draw, ranks = self.random, self._processes()
        places = [(shard, rank, step) for shard in range(self.shards) for rank in ranks for step in range(self.steps)]
        found = {each: draw.choice((np.nan, np.inf, -np.inf)) for each in places if draw.random() < _NONFINITE_SHARE}
        self.faults["nonfinite"] += len(found)
        return found

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

    def steps_of(self, rank: int) -> int:
        """How many steps a worker takes."""
        return self._last_steps[rank] if self.policy.spec == "bsp" else self.steps

    def _processes(self) -> list[int]:
        """The numbers of all processes that may push."""
        return list(range(len(self._gpus)))

    def publish(self, process: int) -> None:
        """A process writes control words: what its host knows to be done, others know that read them."""
        merge(self.published, self.node.clocks[process])

    def learn(self, process: int) -> None:
        """A process reads control words."""
        merge(self.node.clocks[process], self.published)

    def now(self) -> int:
        """The time, which moves with each look."""
        self._now_ns += self.random.randint(1, 1000)
        return self._now_ns

    # -- what is left out --------------------------------------------------------------------------

    def leaves_out(self, verb: str, event: int, stream: int | None) -> bool:
        """Whether this call is the one that the world leaves out."""
        if not self._is_running:
            return False
        role = self._roles[event]
        on = self._roles[stream] if stream is not None else ""
        if verb == "record":
            key = f"record {role}" + (f" at the {self.moment}" if role in ("computed", "finished") else "")
        elif verb == "wait":
            assert stream is not None
            key = f"{on} stream waits for {'own' if self.is_own(event, stream) else 'others'} {role}"
        else:
            key = f"host waits for {role}" + (f" at the {self.moment}" if role == "finished" else "")
        self.seen.add(key)
        return key == self.left_out

    def is_own(self, event: int, stream: int) -> bool:
        """Whether the process of a stream made an event."""
        return self.node.events[event].owner == self.node.streams[stream].process

    def check_wait(self, number: int, stream: int) -> None:
        """A fold waits for no work of another worker, where each worker waits for its own before it posts or releases."""
        if not (self._is_running and self._waits) or self.is_own(number, stream) or self._roles[stream] != "fold":
            return
        role, event = self._roles[number], self.node.events[number]
        computing = self.workers[event.owner].device.compute_stream()
        work = self.node.streams[computing].work if role != "folded" else ()
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
        set_up(self.layout, self.node, [(worker.lane, worker.arena) for worker in self.workers])
        for worker in self.workers:
            parts = parts_of(worker.arena)
            self._roles |= {part: name.split()[0] for name, part in parts.items()}
            worker.begin()
            worker.lane.fold_with(partial(self.fold, worker.arena), worker.arena.own_shards())
        self._is_running = True

    def fold(self, arena: DeviceArena, call: FoldCall) -> list[int] | None:
        """Let an arena fold or reject, and note what the buffers will then hold."""
        told = arena.fold(call)
        self._check_told(call, told)
        if told is not None:
            return told
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
        return None

    def _check_told(self, call: FoldCall, told: list[int] | None) -> None:
        """Check that exactly the non-finite pushes of a fold are rejected, under the name of their parameter."""
        of_shard = next(index for index, each in enumerate(self.layout.parameters) if each.shard == call.shard)
        for index, push in enumerate(call.pushes):
            worker = self.workers[push.lane]
            key = call.shard, worker.process, worker.slots[push.slot]
            expected, found = of_shard if key in self.nonfinite else -1, told[index] if told is not None else -1
            if found != expected:
                raise ViolationError(
                    f"the push of worker {key[1]}, step {key[2]} was told non-finite in parameter {found}, not {expected}"
                )
            self.rejected[key] += found >= 0

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
        if not self.node.dead and any(stream.work for stream in self.node.streams.values()):
            raise ViolationError("a stream waits for an event that is never recorded")

    def _check_pushes(self) -> None:
        """Every push was folded once in every shard, or not at all where the discipline drops pushes."""
        for shard in range(self.shards):
            for worker in self.workers:
                for step in range(self.steps_of(worker.rank)):
                    key = shard, worker.process, step
                    count = self.folded[key] + self.rejected[key]
                    if count > 1 or (self.folds_all and count + (step in worker.nulls) != 1):
                        raise ViolationError(f"the push of worker {worker.rank}, step {step} was folded {count} times")
        counted, told = self.memory.arena.rejections, self.rejected.total()
        if counted != told:
            raise ViolationError(f"{told} pushes were rejected, and {counted} counted")
