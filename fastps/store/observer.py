"""A read-only view of a running job: one row of counters per worker, and one per shard.

An observer maps the arena read-only, never pins a buffer and never takes a shard lock.
"""

import os
import struct
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

from fastps.errors import ProtocolError
from fastps.kernels.shm import arena as lanes
from fastps.kernels.shm.arena import Arena
from fastps.kernels.shm.counts import MAX_LANES
from fastps.membership import discovery
from fastps.membership.node_board import BoardView, NodeStatistics
from fastps.membership.rendezvous import Place
from fastps.system.clock import SYSTEM_CLOCK, Clock

_TRIES = 4  # copies of the counters before one is accepted during which a shard published
_STATES = {
    lanes.LANE_FREE: "not attached",
    lanes.LANE_JOINING: "joining",
    lanes.LANE_LIVE: "live",
    lanes.LANE_LEAVING: "leaving",
    lanes.LANE_LEFT: "left",
    lanes.LANE_FAILED: "failed",
    lanes.LANE_DEAD: "died",
    lanes.LANE_EXPELLED: "expelled",
}


@dataclass(frozen=True)
class WorkerStatistics:
    """The counters of a worker's lane: times in nanoseconds, staleness in versions, counts of all workers that had the lane.

    `push_ns` is time in pushes: posting, and the folds that the worker makes right then. Folds that it makes or helps with
    while it waits are in `wait_ns`. `generation` counts the workers that joined in this lane while the job ran.
    """

    rank: int
    state: str
    steps: int
    samples: int
    wait_ns: int
    compute_ns: int
    folded: int
    dropped: int
    rejected: int
    staleness_sum: int
    staleness_max: int
    stale_blocks: int
    loss: float
    version: int
    rows: int = 0  # of tables, in the folded pushes
    push_ns: int = 0
    generation: int = 0

    def pack(self) -> bytes:
        """The row in ROW_BYTES bytes, for another process or another node."""
        state = list(_STATES.values()).index(self.state) if self.state in _STATES.values() else len(_STATES)
        return _ROW.pack(state, self.rank, self.loss, *(getattr(self, name) for name in _NUMBERS))

    @staticmethod
    def unpack(data: bytes, first_rank: int = 0) -> "WorkerStatistics":
        """The row of `pack`, with `first_rank` added to its rank. Raises ProtocolError for what no row is."""
        if len(data) != ROW_BYTES:
            raise ProtocolError(f"expected a row of {ROW_BYTES} bytes, found {len(data)}")
        state, rank, loss, *numbers = _ROW.unpack(data)
        states = [*_STATES.values(), "unknown"]
        if not (0 <= state < len(states) and 0 <= rank <= MAX_LANES):
            raise ProtocolError(f"expected the counters of a worker, found state {state} of worker {rank}")
        return WorkerStatistics(first_rank + rank, states[state], loss=loss, **dict(zip(_NUMBERS, numbers, strict=True)))

    @property
    def staleness_mean(self) -> float:
        """Mean staleness of the folded pushes; 0 before the first."""
        return self.staleness_sum / self.folded if self.folded else 0.0

    @property
    def wait_share(self) -> float:
        """Fraction of its time that the worker waited, 0 to 1."""
        total_ns = self.wait_ns + self.compute_ns
        return self.wait_ns / total_ns if total_ns else 0.0


_NUMBERS = [each.name for each in fields(WorkerStatistics) if each.name not in ("rank", "state", "loss")]
_ROW = struct.Struct(f"<iid{len(_NUMBERS)}q")
ROW_BYTES = _ROW.size


@dataclass(frozen=True)
class ShardStatistics:
    """A shard's counters since the job began: its version, and the staleness of the pushes that it folded, in versions.

    `staleness` has a pair (versions, pushes) for each staleness that occurred; 255 versions mean 255 or more. `sigma_mean` is
    the mean over all updates of their mean staleness (Rudra, equation 2). `rows_written` counts the rows of tables that its
    updates wrote: a row that several pushes of one update have counts once.
    """

    shard: int
    version: int
    updates: int
    sigma_mean: float
    staleness: list[tuple[int, int]]
    rows_written: int = 0


@dataclass(frozen=True)
class Look:
    """The state of a job at one moment.

    Attributes:
        seen_ns: the time on the machine's monotonic clock, in ns.
        settled: whether no shard published a version while the counters were copied.
        failures: rank to the reported failure, for each worker that failed.
        over: whether the job has ended: every worker has left, failed or died, or no process answers for the job any more.
        nodes: in a job of several nodes the figures of all nodes, on node 0; elsewhere those of this node.
        tables: how many tables the job has, of which pushes carry rows.
    """

    seen_ns: int
    workers: list[WorkerStatistics]
    shards: list[ShardStatistics]
    settled: bool
    failures: dict[int, str]
    over: bool
    nodes: list[NodeStatistics] = field(default_factory=list)
    tables: int = 0


def statistics_of(arena: Arena) -> list[WorkerStatistics]:
    """One row for each worker's lane of the arena."""
    names = {each.name for each in fields(WorkerStatistics)}
    rows = []
    for lane in range(arena.lanes):
        state, version, generation = _STATES.get(arena.lane_state(lane), "unknown"), arena.version, arena.generation(lane)
        counters = {name: count for name, count in cast(dict[str, Any], arena.counters(lane)).items() if name in names}
        rows.append(WorkerStatistics(lane, state, version=version, generation=generation, **counters))
    return rows


def shard_statistics_of(arena: Arena) -> list[ShardStatistics]:
    """One row for each shard of the arena."""
    rows = []
    for shard in range(arena.shards):
        version, found = arena.shard_version(shard), arena.histograms(shard)
        counted = found["updates"], found["average_staleness"], found["staleness"], found["rows_written"]
        rows.append(ShardStatistics(shard, version, *counted))
    return rows


class Observer:
    """A read-only view of a running job, for progress displays. Raises AttachError if the job is not running.

    >>> import numpy as np
    >>> import fastps
    >>> with fastps.Store.create({"w": np.ones(3, np.float32)}, fastps.SGD(lr=0.5)) as job, job.attach(0) as worker:
    ...     worker.step({"w": np.ones(3)})
    ...     observer = fastps.observe(job.job)
    ...     look = observer.look()
    ...     observer.close()
    >>> look.workers[0].steps, look.shards[0].version, look.shards[0].staleness, look.settled, look.over
    (1, 1, [(0, 1)], True, False)
    """

    def __init__(self, job: str, timeout_s: float, clock: Clock) -> None:
        self._job = job
        self._clock = clock
        with discovery.find(job, None, timeout_s, clock) as offer:
            self._arena, self._memory = discovery.mapped(job, offer), os.fstat(offer.memfd)
        self._board = BoardView.of(job, clock)

    def statistics(self) -> list[WorkerStatistics]:
        """The current counters, one row for each worker's lane."""
        return statistics_of(self._arena)

    def nodes(self) -> list[NodeStatistics]:
        """The current figures of the nodes, as in a look; none in a job of one node."""
        if self._board is None and ".node" in self._job:  # the node's agent makes its board after the arena is there
            self._board = BoardView.of(self._job, self._clock)
        return self._board.rows() if self._board is not None else []

    def members(self) -> list[tuple[int, int]]:
        """The current (generation, LANE_ state) of every worker's lane."""
        return self._arena.members()[: self._arena.lanes]

    @property
    def version(self) -> int:
        """The number of updates so far."""
        return self._arena.version

    def look(self) -> Look:
        """Copy all counters at once. If a shard publishes a version during the copy, copy again, a few times at most.

        Even a settled copy may include part of the next update's counts, because the combiner counts before it publishes.
        """
        for _ in range(_TRIES):
            before = self._versions()
            workers, shards = statistics_of(self._arena), shard_statistics_of(self._arena)
            if settled := before == self._versions():
                break
        places = discovery.places_with(self._job, self._memory)
        workers = [self._with_death(row, places) for row in workers]
        return Look(
            seen_ns=self._clock.now_ns(),
            workers=workers,
            shards=shards,
            settled=settled,
            failures={row.rank: self._arena.failure(row.rank) for row in workers if row.state == "failed"},
            over=not places or all(row.state in ("left", "failed", "died") for row in workers),
            nodes=self.nodes(),
            tables=self._arena.n_tables,
        )

    def is_of_arena_of(self, other: "Observer") -> bool:
        """Whether both look at one arena, and not at two of one name."""
        return os.path.samestat(self._memory, other._memory)

    def close(self) -> None:
        """Release the memory."""
        del self._arena
        self._board = None

    def _versions(self) -> list[int]:
        return [self._arena.shard_version(shard) for shard in range(self._arena.shards)]

    def _with_death(self, row: WorkerStatistics, places: set[Place]) -> WorkerStatistics:
        """The row with the current state, or "died" if its worker ended without leaving.

        The worker has died if the lane was and is present, but no process listens at its name: a worker starts its listener
        before the lane is live, and closes it after the lane has left.
        """
        now = _STATES.get(self._arena.lane_state(row.rank), "unknown")
        gone = {row.state, now} <= {"live", "leaving"} and row.rank not in places
        return replace(row, state="died" if gone else now)


def observe(job: str, timeout_s: float = 0.1, clock: Clock = SYSTEM_CLOCK) -> Observer:
    """Attach read-only to the running job `job`. Raises AttachError if no process answers for it within the timeout."""
    return Observer(job, timeout_s, clock)
