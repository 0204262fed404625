"""A simulated job on several devices with a server: it owns all memory, and goes on without the workers that die.

A worker dies before any one operation of its device. The server marks it dead later. Another process may then take its lane.
Every push that was posted is folded once, also those of the dead, and the survivors read what they pulled. What processes learn
from each other's control words is part of the order: a host that has waited for its own work and then posts has ordered that
work before the server's fold.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from fastps.device.arena import DeviceArena
from fastps.device.memory import FirstVersion
from fastps.device.store import Snapshots
from fastps.kernels.protocol.lane import BUSY, DONE, Lane
from fastps.kernels.shm.arena import LANE_FREE, LANE_JOINING, LANE_LIVE
from fastps.lab.gpus.hazards import merge
from fastps.lab.gpus.stepped import SteppedNode
from fastps.lab.worlds.device_workers import GENERATION, ViolationError, WatchedDevice, Worker, parts_of
from fastps.lab.worlds.device_worlds import MOST_TURNS, World

_SERVER = 1000  # its process number
_EXPECTED = (LANE_FREE, LANE_LIVE, LANE_JOINING)


class _Dies(BaseException):
    """The process ends before this operation of its device. No code of it runs any more."""


class _MortalDevice(WatchedDevice):
    """A device whose process dies before its operation number `dies_at`; 0: never."""

    def __init__(self, node: SteppedNode, process: int, identity: str, world: World) -> None:
        super().__init__(node, process, identity, world)
        self.dies_at = self._operations = 0

    def _operate(self) -> None:
        self._operations += 1
        if self._operations == self.dies_at:
            raise _Dies

    def record(self, event: int, stream: int) -> None:
        self._operate()
        super().record(event, stream)

    def wait(self, event: int, stream: int) -> None:
        self._operate()
        super().wait(event, stream)

    def copy(self, to: int, source: int, size: int, stream: int) -> None:
        self._operate()
        super().copy(to, source, size, stream)

    def open(self, handle: bytes) -> int:
        self._operate()
        return super().open(handle)

    def is_done(self, event: int) -> bool:
        """Whether the event is done. The process can die before the look and after it."""
        self._operate()
        found = super().is_done(event)
        self._operate()
        return found


class _Server:
    """The server of a world: a device for each GPU, and a lane that folds all shards."""

    def __init__(self, world: "ServedWorld", gpus: list[str]) -> None:
        self.world = world
        self._share = world.random.choice((0.2, 0.5, 1.0))  # of the shards that are tried at a time
        arena = world.memory.arena
        self.lane = Lane(arena, arena.server_lane)
        self.devices = [world.device_of(_SERVER, gpu) for gpu in gpus]
        self.arenas = {
            self.lane.index + number: DeviceArena(world.memory, self.lane.index + number, device)
            for number, device in enumerate(self.devices)
        }
        for each in self.arenas.values():
            each.set_siblings(self.arenas)
            each.publish_handles()
        first = FirstVersion(world.layout, is_resumed=False)
        for each in self.arenas.values():
            each.fill(first)
        first.close()
        self._by_shard = {shard: partial(world.fold, each) for each in self.arenas.values() for shard in each.own_shards()}
        if not arena.serve(os.getpid()):
            raise ViolationError("the arena has a server already")

    def combine(self) -> None:
        """Decide and fold what is posted in some shards, after reading what the others have written.

        A worker that pulls meanwhile finds some shards new and others not.
        """
        self.world.learn(_SERVER)
        some = [shard for shard in self._by_shard if self.world.random.random() < self._share]
        self.lane.fold_with(lambda call: self._by_shard[call.shard](call), some)
        outcome = self.lane.try_combine(self.world.now())
        if self.lane.fold_failure is not None:
            raise self.lane.fold_failure
        if outcome not in (DONE, BUSY):
            raise ViolationError(f"the server combined with outcome {outcome}")
        self.world.publish(_SERVER)

    def lose(self, rank: int, generation: int) -> None:
        """Find a worker dead. Its context is gone by then, so all that it ever ran is over."""
        for stream in self.world.node.streams.values():
            if stream.process == self.world.process_of(rank, generation):
                merge(self.world.published, stream.clock)
        self.world.learn(_SERVER)
        self.lane.lose(rank, generation, self.world.now())


class ServedWorld(World):
    """One seed's job with a server. `left_out` as in World."""

    _ends_with_the_dead = False
    _on_worker_loss, _served_by = "continue", "process"

    def __init__(self, seed: int, devices: int, left_out: str | None = None) -> None:
        self._dying: dict[int, int] = {}  # rank to the operation before which its worker dies
        super().__init__(seed, devices, left_out)
        self.spec += ", with a server"
        draw = self.random
        for rank in range(len(self._gpus)):
            if draw.random() < 0.25 and len(self._dying) + 1 < len(self._gpus):
                self._dying[rank] = draw.randint(3, 30 * self.steps)

    @property
    def places(self) -> int:
        """See World: also for the pushes of workers that take a lane."""
        return 2 * super().places

    def _processes(self) -> list[int]:
        """See World: a lane has at most two owners."""
        return [self.process_of(rank, generation) for rank in range(len(self._gpus)) for generation in range(2)]

    def process_of(self, rank: int, generation: int) -> int:
        """The number of a worker's process."""
        return rank + generation * GENERATION

    def device_of(self, process: int, gpu: str) -> WatchedDevice:
        return _MortalDevice(self.node, process, gpu, self)

    def leaves_out(self, verb: str, event: int, stream: int | None) -> bool:
        """See World. Waits for a further device of the server are calls of their own."""
        if event not in self._roles or (stream is not None and stream not in self._roles):
            return False  # a part of an arena that is being set up
        further = list(self._server.arenas.values())[1:] if self._is_running else []
        is_further = any(event in parts_of(each).values() for each in further)
        if verb != "wait" or stream is None or self.is_own(event, stream) or not is_further:
            return super().leaves_out(verb, event, stream)
        key = f"{self._roles[stream]} stream waits for {self._roles[event]} of a further device"
        self.seen.add(key)
        return key == self.left_out

    # -- the run -----------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._server = _Server(self, list(dict.fromkeys(self._gpus)))
        for each in self._server.arenas.values():
            self._roles |= {part: name.split()[0] for name, part in parts_of(each).items()}
        self.publish(_SERVER)
        self._is_running = True

    def _attach(self, rank: int, generation: int = 0) -> Worker:
        """A worker's setup, up to its first pull. Raises _Dies."""
        worker = Worker(self, rank, self._gpus[rank], generation)
        self._roles |= {part: name.split()[0] for name, part in parts_of(worker.arena).items()}
        worker.lane.fold_with(worker.arena.fold, ())
        assert isinstance(worker.device, _MortalDevice)
        if generation == 0:
            worker.device.dies_at = self._dying.get(rank, 0)
        self.learn(worker.process)
        worker.arena.publish_handles(is_first=generation == 0)
        worker.arena.open()
        return worker

    def _life(self, rank: int, generation: int) -> Iterator[None]:
        worker = self._attach(rank, generation)
        self._everyone[rank, generation] = worker
        yield
        arena = self.memory.arena
        if generation:
            while not arena.has_joined(rank):
                yield
            arena.joined(rank)
        self.workers[rank] = worker
        worker.lane.steps = worker.lane.begin_steps()
        worker.begin()
        yield
        copying: Iterator[None] | None = None
        for _ in worker.script():
            if copying is None and self.random.random() < 0.05:
                copying = self._copying(worker)
            if copying is not None and self.random.random() < 0.5 and next(copying, self) is self:
                copying = None
            yield
        yield from copying or ()

    def _copying(self, worker: Worker) -> Iterator[None]:
        """A checkpoint of a worker: it pins a version, queues its copies, and unpins it when they are done."""
        arena, pinned = self.memory.arena, []
        for shard in range(self.shards):
            while (found := arena.pin_version(worker.rank, shard)) is None:
                yield
            pinned.append(found)
        snapshots = Snapshots(worker.arena, worker.device)
        self._roles |= {snapshots.stream: "snapshots", snapshots.copied: "snapshot"}
        expected = [[self.contents[shard][found[1]].weights for shard, found in enumerate(pinned)]]
        for plane in range(self.layout.planes):
            expected.append([self.state_of(shard, found[2])[0][plane] for shard, found in enumerate(pinned)])
        snapshot = snapshots.begin([found[1] for found in pinned], [found[2] for found in pinned])
        for _ in range(self.random.randint(0, 9)):
            yield
        snapshot.end()
        for number, values in enumerate(expected):
            for copied, value in zip(snapshots.views(number), values, strict=True):
                if not np.array_equal(copied, value[: len(copied)]):
                    raise ViolationError(f"a checkpoint of worker {worker.rank} is not of the version that was pinned")
        self.publish(worker.process)
        for shard in range(self.shards):
            arena.unpin_version(worker.rank, shard, worker.generation)
        self.faults["copies"] += 1

    def _play(self) -> None:
        """Take turns until every worker that lives has ended. A death is found some turns later."""
        self._everyone: dict[tuple[int, int], Worker] = {}
        self.workers[:] = [None] * len(self._gpus)  # type: ignore[list-item]
        lives: dict[tuple[int, int], Iterator[None]] = {(rank, 0): self._life(rank, 0) for rank in range(len(self._gpus))}
        dead: list[tuple[int, int]] = []
        eager, left = self.random.choice((0.1, 0.5, 0.9)), MOST_TURNS
        while (lives or dead) and left:
            self.turns += 1
            left -= 1
            chosen: Callable[[], object] = self._server.combine
            if self.random.random() >= eager and self.node.step():
                continue
            if dead and self.random.random() < 0.1:
                self._find(dead.pop(), lives)
                continue
            if lives and self.random.random() < 0.7:
                chosen = partial(self._act, lives, self.random.choice(list(lives)), dead)
            chosen()
        if lives or dead:
            raise ViolationError(f"after {MOST_TURNS} turns workers {sorted(lives)} have not ended")
        while self.node.step():
            self.turns += 1
        if any(stream.work for stream in self.node.streams.values()):
            raise ViolationError("a stream waits for an event that is never recorded")

    def _act(self, lives: dict[tuple[int, int], Iterator[None]], owner: tuple[int, int], dead: list[tuple[int, int]]) -> None:
        """One action of a worker."""
        try:
            if next(lives[owner], self) is self:
                del lives[owner]
        except _Dies:
            self.node.kill(self.process_of(*owner))
            self.faults["deaths"] += 1
            del lives[owner]
            dead.append(owner)

    def _find(self, owner: tuple[int, int], lives: dict[tuple[int, int], Iterator[None]]) -> None:
        self._server.lose(*owner)
        if self.random.random() < 0.5 and any(not self._has_left(*other) for other in lives):
            self.faults["rejoins"] += 1
            lives[owner[0], 1] = self._life(owner[0], 1)

    def _has_left(self, rank: int, generation: int) -> bool:
        return (rank, generation) in self._everyone and self._everyone[rank, generation].has_left

    def is_over(self) -> bool:
        """See World: every living worker has left, and every push is decided."""
        arena = self.memory.arena
        if any(not worker.has_left and worker.process not in self.node.dead for worker in self._everyone.values()):
            return False
        return all(
            arena.counters(rank)["done"] >= arena.counters(rank)["posted"] and arena.lane_state(rank) not in _EXPECTED
            for rank in range(len(self._gpus))
        )

    def _check(self) -> None:
        """The survivors read their versions, and every push that was posted was folded once."""
        for (rank, generation), worker in self._everyone.items():
            if worker.process not in self.node.dead:
                worker.check_reads(are_all=True)
            counters = self.memory.arena.counters(rank)
            for shard in range(self.shards):
                for step in range(self.steps):
                    key = shard, worker.process, step
                    count = self.folded[key] + self.rejected[key]
                    is_due = self.folds_all and step < worker.posts and step not in worker.nulls
                    if count > 1 or (is_due and not count) or (count and step >= worker.posts):
                        raise ViolationError(
                            f"push {step} of worker {rank}, owner {generation} of its lane, which has"
                            f" {counters['posted']} posts, was folded {count} times"
                        )
