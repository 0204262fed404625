"""A model of the time that one step's pushes, folds and pulls take on several GPUs. It is a model: no two GPUs have run them.

    python -m fastps.lab.worlds.device_schedule

The real scheduler, lanes and arena on devices run a small job under `bsp` on stepped devices, which record all work on streams:
what waits for what, and what each piece reads and writes where. The bytes are then scaled to a large model, and the work is
laid out in time: pieces run as soon as their stream and events allow; those that need the same memory or link share it equally,
and what one of them cannot use, because a link holds it back, say, is shared by the others.

A backward pass of a given length may precede each push; the gradients of the shards appear evenly, from the last to the first.
It takes its time, and no bandwidth. What the model leaves out: forward passes, the copy of gradients into the slot, launches,
latencies, and the bandwidth of the host's own memory.
"""

import math
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from fastps.device.arena import DeviceArena
from fastps.device.interface import DeviceError
from fastps.device.placement import BUCKET_MB
from fastps.device.plan import placed_on, shards_of
from fastps.job.fault_policy import FaultPolicy
from fastps.job.layout import Layout
from fastps.job.specs import parse_policy
from fastps.job.update_rules import SGD, Adam, Update
from fastps.kernels.cuda.launch_args import Span
from fastps.kernels.protocol.lane import BUSY, DONE, Lane
from fastps.lab.gpus.fake_cuda import Work
from fastps.lab.gpus.stepped import SteppedCuda, SteppedDevice, SteppedNode, SteppedStream
from fastps.lab.worlds.device_workers import memory_of, parts_of, rows_of, set_up
from fastps.store.row_slots import presence_of

_FLOATS = 1024  # of a shard of the job that is recorded
_STEPS = 4
_MOST_ROUNDS = 1000
# Of 100 million parameters: 10,000 tokens a GPU and step, at 4 operations a token and parameter and 400 TFLOP/s.
BACKWARD_S = 0.01


@dataclass(frozen=True)
class Speeds:
    """Bandwidths in bytes a second: of a GPU's memory, and of its links to other GPUs, each in one direction.

    The defaults are those of one H100 with NVLink: its memory as published. A direction of its links has 450 GB/s, of which the
    protocol leaves 370 (NVIDIA in nccl-tests issue 212; p2pBandwidthLatencyTest measures 371 to 377 in nccl issue 1264).
    """

    memory: float = 3.3e12
    peers: float = 370e9

    def of(self, resource: str) -> float:
        """The bandwidth of a resource, by the first word of its name."""
        return {"memory": self.memory, "peers": self.peers}[resource.split()[0]]


@dataclass
class Piece:
    """A piece of work on a stream: bytes by resource, or an event that it records or waits for, by the record's number.

    `seconds`: how long it takes in any case.
    """

    kind: str
    traffic: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    event: int = 0
    number: int = 0
    step: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Schedule:
    """The model's answer, for one step in the steady state.

    Attributes:
        step_s: seconds from the end of a step to the end of the next.
        bound_s: seconds that the busiest resource needs for its bytes alone: no order of the work is faster.
        busiest: its name.
        seconds: by kind of work, the seconds in which some of it runs.
    """

    step_s: float
    bound_s: float
    busiest: str
    seconds: dict[str, float]


class _RecordingNode(SteppedNode):
    """A node that keeps all work of each stream."""

    def __init__(self) -> None:
        super().__init__(0)
        self.recorded: dict[int, list[Piece]] = defaultdict(list)
        self.step_number = -1  # before the first step

    def cuda(self, process: int) -> SteppedCuda:
        return _RecordingCuda(self, process)


class _RecordingCuda(SteppedCuda):
    """A CUDA that notes what it is asked for, and what each piece of work touches."""

    node: _RecordingNode

    def _note(self, stream: int, piece: Piece) -> None:
        piece.step = self.node.step_number
        self.node.recorded[stream].append(piece)

    def eventRecord(self, event: int, stream: int) -> None:
        super().eventRecord(event, stream)
        self._note(stream, Piece("record", event=event, number=self.node.events[event].made))

    def streamWaitEvent(self, stream: int, event: int) -> None:
        super().streamWaitEvent(stream, event)
        self._note(stream, Piece("wait", event=event, number=self.node.events[event].made))

    def queue(self, stream: int, text: str, work: Work) -> None:
        super().queue(stream, text, work)
        self._note(stream, Piece(text.split()[0]))

    def compute(self, stream: int, seconds: float) -> None:
        """Queue work that takes its time and touches nothing."""
        super().queue(stream, "backward", lambda on: None)
        self._note(stream, Piece("backward", seconds=seconds))

    def touch(self, on: SteppedStream, text: str, reads: Iterable[Span], writes: Iterable[Span]) -> None:
        super().touch(on, text, reads, writes)
        made = self.node.recorded[on.number][on.clock[on.number] - 1]
        for is_write, spans in ((False, reads), (True, writes)):
            for address, size in spans:
                # Tables do not grow with the model, and the setup is over before the first step.
                if size >= 4 * _FLOATS and made.step >= 0:
                    there = self.node.find(address, size, self.process, on.gpu, text).identity
                    assert there is not None, "nothing of the model's size lies in host memory"
                    _add(made.traffic, on.gpu, there, size, is_write)


def _add(traffic: dict[str, float], here: str, there: str, size: int, writes: bool) -> None:
    """Add the bytes that an access moves. `there`: the GPU whose memory it is."""
    traffic[f"memory of {there}"] += size
    if there != here:
        begin, end = (here, there) if writes else (there, here)
        traffic[f"peers from {begin}"] += size
        traffic[f"peers to {end}"] += size


class Job:
    """A job of one worker a device under bsp. Each shard has one parameter.

    `backward_s`: the length of a backward pass; `marks`: whether its hooks mark the shards whose gradients have appeared;
    `checks`: whether pushes are checked for non-finite values, for which each host waits before it posts.
    """

    def __init__(
        self, update: Update, gpus: int, shards: int, *, backward_s: float = 0.0, marks: bool = False, checks: bool = False
    ) -> None:
        self._backward_s, self._marks = backward_s, marks
        names = [f"gpu {number}" for number in range(gpus)]
        self.node = _RecordingNode()
        self.hyper = update.hyper
        self.layout = _layout_of(update, gpus, shards, FaultPolicy(nonfinite="reject" if checks else "allow"))
        self.memory = memory_of(self.layout, self.hyper)
        self._now_ns = 0
        self.lanes: list[Lane] = []
        self.arenas: list[DeviceArena] = []
        self.devices = [self.node.device(rank, name) for rank, name in enumerate(names)]
        for rank, device in enumerate(self.devices):
            self.memory.arena.claim(rank, os.getpid(), False)
            self.lanes.append(Lane(self.memory.arena, rank))
            self.arenas.append(DeviceArena(self.memory, rank, device))
        self.buffers = [[0] * len(self.layout.shards) for _ in names]

    def run(self, note: Callable[[int], None] = lambda step: None) -> dict[int, list[Piece]]:
        """Set the job up, take _STEPS steps, call `note` after each, and return all work by stream."""
        try:
            self._begin()
            for step in range(_STEPS):
                self.node.step_number = step
                self._step()
                note(step)
                while self.node.step():
                    pass
            return dict(self.node.recorded)
        finally:
            self.arenas.clear()
            self.lanes.clear()
            self.memory.close()

    def _begin(self) -> None:
        parts = list(zip(self.lanes, self.arenas, strict=True))
        set_up(self.layout, self.node, parts)
        for rank, (lane, arena) in enumerate(parts):
            lane.fold_with(arena.fold, arena.own_shards())
            self._pull(rank)

    def _step(self) -> None:
        shards = len(self.layout.shards)
        for lane, arena, device in zip(self.lanes, self.arenas, self.devices, strict=True):
            slot = int(lane.slot)
            if self._backward_s:
                self._backward(arena, device, slot)
            lane.set_hyper(slot, 0, *self.hyper)
            lane.set_presence(slot, presence_of(range(shards), shards))
            arena.begin_finish(slot)
            while not arena.is_finished() and self.node.step():
                pass
        if self.arenas[0].waits:
            self._await_hosts()
        for lane, arena in zip(self.lanes, self.arenas, strict=True):
            arena.mark_pushed(int(lane.slot))
            self._finish_combine(lane.push(self._now(), 1.0, 1, False), lane)
        waiting = dict(enumerate(self.lanes))
        for _ in range(_MOST_ROUNDS):
            for rank, lane in list(waiting.items()):
                if lane.advance(self._now(), False):
                    del waiting[rank]
            if not waiting:
                break
            for lane in self.lanes:
                self._finish_combine(lane.try_combine(self._now()), lane)
        if waiting:
            raise DeviceError(f"expected a grant for workers {sorted(waiting)}, found none")
        for rank in range(len(self.arenas)):
            self._pull(rank)

    def _await_hosts(self) -> None:
        """What is queued from now on follows the work that each host has waited for."""
        finished = [parts_of(arena)["finished"] for arena in self.arenas]
        for arena, device in zip(self.arenas, self.devices, strict=True):
            api = device.api
            assert isinstance(api, _RecordingCuda)
            for stream in (part for name, part in parts_of(arena).items() if name.startswith("fold ")):
                for event in finished:
                    api.streamWaitEvent(stream, event)

    def _backward(self, arena: DeviceArena, device: SteppedDevice, slot: int) -> None:
        api, shards = device.api, len(self.layout.shards)
        assert isinstance(api, _RecordingCuda)
        for shard in reversed(range(shards)):
            api.compute(device.compute_stream(), self._backward_s / shards)
            if self._marks:
                arena.mark_computed(shard)

    def _pull(self, rank: int) -> None:
        self.lanes[rank].pull_all(self.buffers[rank])
        self.arenas[rank].show_pulled(self.buffers[rank])

    def _finish_combine(self, outcome: int, lane: Lane) -> None:
        if outcome not in (DONE, BUSY):
            raise lane.fold_failure or DeviceError(f"expected a fold, found outcome {outcome}")

    def _now(self) -> int:
        self._now_ns += 1000
        return self._now_ns


def _layout_of(update: Update, gpus: int, shards: int, faults: FaultPolicy) -> Layout:
    layout = Layout(rows_of(shards, _FLOATS), 1, update.rule, parse_policy("bsp"), gpus, faults=faults)
    return placed_on(layout.with_shards(shards), [f"gpu {number}" for number in range(gpus)])


# -- time ------------------------------------------------------------------------------------------------------------------


@dataclass
class _Running:
    piece: Piece
    left: float = 1.0


def lay_out(streams: dict[int, list[Piece]], speeds: Speeds, scale: float = 1.0) -> Iterator[tuple[float, float, list[Piece]]]:
    """Yield (begin, end, the pieces that run) of each stretch of time in which the same work runs.

    Raises DeviceError for work that waits for what never happens.
    """
    places, done = dict.fromkeys(streams, 0), defaultdict[int, int](int)
    running: dict[int, _Running] = {}
    now = 0.0
    while True:
        _start(streams, places, done, running)
        if not running:
            break
        rates = dict(zip(running, _rates([each.piece for each in running.values()], speeds, scale), strict=True))
        lasts = min(each.left / rates[stream] for stream, each in running.items())
        yield now, now + lasts, [each.piece for each in running.values()]
        now += lasts
        for stream, each in list(running.items()):
            each.left -= lasts * rates[stream]
            if each.left <= 1e-9:
                del running[stream]
                places[stream] += 1
    if any(places[stream] < len(pieces) for stream, pieces in streams.items()):
        raise DeviceError("expected all work to come to its end, found some that waits for what never happens")


def _rates(pieces: list[Piece], speeds: Speeds, scale: float) -> list[float]:
    """How much of each piece, 1 for all of it, is done in a second while all of them run.

    Each gets an equal share of every resource that it needs, and uses it as far as its scarcest one allows. What is left over
    is shared in the same way again, until some resource of each piece is used up.
    """
    users = Counter(resource for piece in pieces for resource in piece.traffic)
    unused = {resource: speeds.of(resource) for resource in users}
    rates = [0.0] * len(pieces)
    gains = [math.inf]
    while max(gains) > 1e-9 * max(rates):
        gains = []
        for piece, rate in zip(pieces, rates, strict=True):
            limits = [unused[resource] / users[resource] / (size * scale) for resource, size in piece.traffic.items()]
            gains.append(min([*limits, 1 / piece.seconds - rate] if piece.seconds else limits))
        for number, (piece, gain) in enumerate(zip(pieces, gains, strict=True)):
            rates[number] += gain
            for resource, size in piece.traffic.items():
                unused[resource] -= size * scale * gain
    return rates


def _start(streams: dict[int, list[Piece]], places: dict[int, int], done: dict[int, int], running: dict[int, _Running]) -> None:
    """Let every stream go on to its next piece that takes time, past events and pieces without traffic."""
    moves = True
    while moves:
        moves = False
        for stream, pieces in streams.items():
            if stream in running or places[stream] == len(pieces):
                continue
            piece = pieces[places[stream]]
            if piece.traffic or piece.seconds:
                running[stream] = _Running(piece)
                continue
            if piece.kind == "wait" and done[piece.event] < piece.number:
                continue
            if piece.kind == "record":
                done[piece.event] = piece.number
            places[stream] += 1
            moves = True


def model(
    update: Update,
    gpus: int,
    parameters: float = 1e8,
    speeds: Speeds | None = None,
    *,
    backward_s: float = 0.0,
    overlaps: bool = False,
    checks: bool = False,
) -> Schedule:
    """The schedule of a step: `gpus` GPUs with a worker each, `parameters` float32 parameters in equal shards, under `bsp`.

    A step begins with a backward pass of `backward_s` seconds. There is a shard for each GPU; with `overlaps` the shards are
    those of FASTPS_BUCKET_MB's default, and each is folded while backward goes on. With `checks` pushes are checked, which
    is the default.

    >>> found = model(SGD(lr=0.1), gpus=1)
    >>> found.busiest, round(found.bound_s / found.step_s, 2)
    ('memory of gpu 0', 1.0)
    """
    speeds = speeds or Speeds()
    shards = shards_of(int(4 * parameters), gpus, BUCKET_MB << 20 if overlaps else None)
    job = Job(update, gpus, shards, backward_s=backward_s, marks=overlaps, checks=checks)
    streams, scale = job.run(), parameters / (_FLOATS * shards)
    bytes_of, steps = defaultdict[str, float](float), range(1, _STEPS)  # the first step is left out
    for piece in (each for pieces in streams.values() for each in pieces if each.step in steps):
        for resource, size in piece.traffic.items():
            bytes_of[resource] += size * scale / len(steps)
    busiest = max(sorted(bytes_of), key=lambda name: bytes_of[name] / speeds.of(name))
    seconds, ends = defaultdict[str, float](float), dict.fromkeys(range(-1, _STEPS), 0.0)
    for begin, end, pieces in lay_out(streams, speeds, scale):
        for step in {piece.step for piece in pieces}:
            ends[step] = max(ends[step], end)
        for kind in {piece.kind for piece in pieces if piece.step in steps}:
            seconds[kind] += (end - begin) / len(steps)
    step_s = (ends[_STEPS - 1] - ends[0]) / len(steps)
    return Schedule(step_s, bytes_of[busiest] / speeds.of(busiest), busiest, dict(seconds))


_GPUS = (1, 2, 4, 8)
_RULES: tuple[tuple[str, Update], ...] = (("SGD with momentum", SGD(lr=0.1, momentum=0.9)), ("Adam", Adam(lr=0.1)))


def overlap_table(backward_s: float = BACKWARD_S) -> str:
    """What a step adds to a backward pass, without and with overlap, for 100 million parameters, as a table in Markdown."""
    lines = ["| rule | GPUs | backward | added without overlap | added with overlap | behind backward |", "|" + "---|" * 6]
    for name, update in _RULES:
        for gpus in _GPUS:
            steps = [model(update, gpus, backward_s=backward_s, overlaps=overlaps).step_s for overlaps in (False, True)]
            shown = " | ".join(f"{1e3 * (step_s - backward_s):.2f} ms" for step_s in steps)
            hidden = 1 - (steps[1] - backward_s) / (steps[0] - backward_s)
            lines.append(f"| {name} | {gpus} | {1e3 * backward_s:.0f} ms | {shown} | {hidden:.0%} |")
    return "\n".join(lines)


def table() -> str:
    """The default's figures for 100 million parameters without a backward pass, as a table in Markdown."""
    lines = ["| rule | GPUs | step | checks | folds | copies | bound | of the bound |", "|" + "---|" * 8]
    for name, update in _RULES:
        for gpus in _GPUS:
            found = model(update, gpus, checks=True)
            times = [found.step_s, *(found.seconds.get(kind, 0.0) for kind in ("check", "fold", "copy"))]
            shown = " | ".join(f"{1e3 * each:.2f} ms" for each in times)
            bound = f"{1e3 * found.bound_s:.2f} ms ({found.busiest.split()[0]})"
            lines.append(f"| {name} | {gpus} | {shown} | {bound} | {found.bound_s / found.step_s:.0%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(f"{table()}\n\n{overlap_table()}\n")
