"""One synchronization step of N workers, without compute: from gradients to new weights in every worker.

Each side has its own crew; crews alternate, and a waiting crew sleeps. A repeat is a run of steps, from the first worker's
begin to the last one's end. Rows have each side's ratio to fastps in the same run.
"""

import contextlib
import importlib.util
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastps.bench import mpi, peers, rpc
from fastps.bench.crew import Crew, ForkedCrew
from fastps.bench.measure import BenchOptions, Row, Spread, check, interleaved
from fastps.bench.member import Member, load_torch
from fastps.bench.peers import LEARNING_RATE, MOMENTUM, ForkedJob, Job

CHECKED_STEPS = 8
# Asynchronous workers do not end together, and the last one folds alone: a long repeat makes that as negligible as in training.
ASYNCHRONOUS_STEPS = 24


@dataclass(frozen=True)
class Kind:
    """One side: the factory of a worker's peer (None: MPI's launcher starts the workers), and its shared memory.

    It has `rows` rows of the model's size, and with `row_a_worker` one more for each worker. `paused` as in ForkedCrew.
    `members`: its processes, if not a worker each, or for the roofline one a core.
    """

    make: Callable[[ForkedJob, int], Any] | None
    rows: int = 0
    row_a_worker: bool = False
    paused: bool = False
    members: int = 0


OURS = {
    "fastps": Kind(lambda job, rank: peers.Fastps(job, rank, "bsp")),
    "fastps-asp": Kind(lambda job, rank: peers.Fastps(job, rank, "asp")),
}
PEERS: dict[str, dict[str, Kind]] = {  # the sides of each name of --against; "limit" is the roofline
    "limit": {
        "limit": Kind(lambda job, rank: peers.Roofline(job, rank, streaming=False), 4, row_a_worker=True),
        "limit-streaming": Kind(lambda job, rank: peers.Roofline(job, rank, streaming=True), 4, row_a_worker=True),
    },
    "gloo": {"gloo": Kind(peers.Gloo)},
    "ddp": {"ddp": Kind(peers.Ddp)},
    "hogwild": {"hogwild": Kind(peers.Hogwild, 1)},
    "handmade": {
        "handmade": Kind(peers.Handmade, 1, row_a_worker=True),
        "handmade-parts": Kind(peers.HandmadeParts, 2, row_a_worker=True),
    },
    "mpi": {"mpi": Kind(None)},
    "rpc": {"rpc": Kind(rpc.Rpc, paused=True)},
    # Ablations: fastps with one design choice changed.
    "alone": {"fastps-alone": Kind(lambda job, rank: peers.Fastps(job, rank, "bsp", peers.fold_alone))},
    "plain": {"fastps-plain": Kind(lambda job, rank: peers.Fastps(job, rank, "bsp", peers.store_plainly))},
    "streaming": {"fastps-streaming": Kind(lambda job, rank: peers.Fastps(job, rank, "bsp", peers.store_past_caches))},
    "attributes": {"fastps-attributes": Kind(lambda job, rank: peers.Fastps(job, rank, "bsp", tensor_loops="attributes"))},
    "server": {
        "fastps-server": Kind(lambda job, rank: peers.Fastps(job, rank, "bsp", server="process")),
        "fastps-server-asp": Kind(lambda job, rank: peers.Fastps(job, rank, "asp", server="process")),
    },
}


def missing_reason(name: str) -> str | None:
    """Return why a peer cannot be measured here, or None."""
    if name == "mpi":
        return mpi.missing_reason()
    if name == "rpc":
        return rpc.missing_reason()
    if name in PEERS:
        return None
    found = importlib.util.find_spec(name) is not None
    return f"{name} is {'installed' if found else 'not installed'}, and this benchmark does not drive it"


class Side:
    """One side: its crew, and the number of steps that each of its workers has taken."""

    def __init__(self, name: str, kind: Kind, workers: int, parameters: int, folder: str) -> None:
        self.steps = 0
        self.steps_a_repeat = 1
        if kind.make is None:
            self.job = Job(name, workers, parameters, folder)
            self.crew: Crew = mpi.LaunchedCrew(self.job, parameters)
            return
        job = ForkedJob(name, workers, parameters, folder, kind.rows + workers * kind.row_a_worker)
        self.job, make = job, kind.make
        size = kind.members or (min(workers, len(os.sched_getaffinity(0))) if name.startswith("limit") else workers)
        self.crew = ForkedCrew(size, lambda rank: Member(job, lambda: make(job, rank)), paused=kind.paused)

    def run(self, steps: int) -> float:
        """Take steps and return the seconds of one."""
        spans = self.crew.call(steps)
        self.steps += steps + 1
        return float(max(end for _, end in spans) - min(begin for begin, _ in spans)) / 1e9 / steps

    def prepare(self, repeat_s: float) -> None:
        """Check the first steps, and choose the number of steps of a repeat."""
        self.run(CHECKED_STEPS - 1)
        self.check(tolerance=1e-4)
        seconds = self.run(2)
        for _ in range(3):
            self.steps_a_repeat = max(1 if self.job.is_level else ASYNCHRONOUS_STEPS, round(repeat_s / seconds))
            seconds = self.run(self.steps_a_repeat)

    def check(self, tolerance: float) -> None:
        """Compare every weight of every worker with its expected value after the steps."""
        if self.job.is_level:
            lowest, highest = _weight_after(self.steps, _mean(self.job)), _weight_after(self.steps, _mean(self.job))
        else:
            # Racing updates may be lost, or not yet visible (under asp a worker continues while its last two pushes wait): at
            # least one worker's other updates happened, at most all. An update with the momentum of all exceeds one with its
            # own.
            lowest, highest = _weight_after(self.steps * self.job.workers, 1.0), _weight_after(self.steps - 2, 1.0)
            lowest = min(lowest, 1.0 - self.job.workers * (1.0 - highest))
        slack = tolerance * max(1.0, abs(lowest))
        for least, most in self.crew.call(0):
            is_right = lowest - slack <= least <= most <= highest + slack
            check(is_right, f"{self.job.name}: weights of {lowest:g} to {highest:g} after {self.steps} steps", (least, most))


def _mean(job: Job) -> float:
    return sum(job.gradient(rank) for rank in range(job.workers)) / job.workers


def _weight_after(steps: int, gradient: float) -> float:
    """Return a weight that began as 1, after steps of SGD with momentum."""
    weight, momentum = 1.0, 0.0
    for _ in range(steps):
        momentum = MOMENTUM * momentum + gradient
        weight -= LEARNING_RATE * momentum
    return weight


def measure(options: BenchOptions) -> list[Row]:
    """Return a row for each side, number of workers and number of parameters, also for missing peers."""
    load_torch()
    pairs = [(workers, size) for size in options.parameters for workers in options.workers]
    return [row for workers, size in pairs for row in rows_of(workers, size, options, OURS, PEERS, missing_reason)]


def rows_of(
    workers: int,
    size: int,
    options: BenchOptions,
    ours: dict[str, Kind],
    against: dict[str, dict[str, Kind]],
    reason_of: Callable[[str], str | None],
) -> list[Row]:
    """Return the rows of one number of workers and parameters: fastps' own sides, and the peers that the options name."""
    ours = {name: kind for name, kind in ours.items() if ("asp" if name in peers.ASYNCHRONOUS else "bsp") in options.sync}
    missing = {name: reason for name in options.against if (reason := reason_of(name)) is not None}
    kinds = ours | {name: kind for peer in options.against if peer not in missing for name, kind in against[peer].items()}
    with tempfile.TemporaryDirectory(prefix="fastps-bench-") as folder, contextlib.ExitStack() as stack:
        sides: dict[str, Side] = {}
        for name, kind in kinds.items():
            sides[name] = Side(name, kind, workers, size, folder)
            stack.enter_context(sides[name].crew)
        for side in sides.values():
            side.prepare(options.repeat_s)
        turns: dict[str, Callable[[], float]] = {name: _turn(side) for name, side in sides.items()}
        spreads = interleaved(turns, options.repeats)
        for name, side in sides.items():
            if not name.startswith("limit"):  # a million short passes accumulate rounding; the first are checked
                side.check(tolerance=0.05)
    rows_of_sides = [_row(name, workers, size, spread, spreads) for name, spread in _with_better_roofline(spreads).items()]
    return rows_of_sides + [_missing_row(name, workers, size, reason) for name, reason in missing.items()]


def _turn(side: Side) -> Callable[[], float]:
    return lambda: side.run(side.steps_a_repeat)


def _with_better_roofline(spreads: dict[str, Spread]) -> dict[str, Spread]:
    """Keep the better of the two kinds of stores as the roofline."""
    found = dict(spreads)
    streaming = found.pop("limit-streaming", None)
    if streaming is not None and streaming.median < found["limit"].median:
        found["limit"] = streaming
    return found


def _row(name: str, workers: int, size: int, spread: Spread, spreads: dict[str, Spread]) -> Row:
    is_asynchronous = name in peers.ASYNCHRONOUS
    ours = spreads.get("fastps-asp" if is_asynchronous else "fastps") or next(iter(spreads.values()))  # of the only --sync
    return {
        "bench": "step",
        "name": name.removesuffix("-asp"),
        "sync": "asp" if is_asynchronous else "bsp",
        "workers": workers,
        "parameters": size,
        **spread.row(),
        "ratio": spread.median / ours.median,
        "checked": True,
    }


def _missing_row(name: str, workers: int, size: int, reason: str) -> Row:
    keys: Row = {"bench": "step", "name": name, "sync": "bsp", "workers": workers, "parameters": size}
    return {**keys, "missing": reason, "checked": False}
