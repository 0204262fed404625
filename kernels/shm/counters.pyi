from typing import TypedDict

from fastps.kernels.shm.view import ArenaView

PushOutcome = tuple[int, int, int, int]

class Counters(TypedDict):
    posted: int
    done: int
    steps: int
    wait_ns: int
    compute_ns: int
    push_ns: int
    samples: int
    stale_blocks: int
    folded: int
    dropped: int
    rejected: int
    staleness_sum: int
    staleness_max: int
    rows: int
    loss: float

class Histograms(TypedDict):
    updates: int
    rows_written: int
    average_staleness: float
    gaps_ns: list[tuple[int, int]]
    staleness: list[tuple[int, int]]
    arrivals_ns: list[list[tuple[int, int]]]

class ArenaCounters(ArenaView):
    @property
    def rejections(self) -> int: ...
    def rejected(self, lane: int) -> tuple[int, tuple[int, int] | None]: ...
    def record(self) -> None: ...
    def push_outcomes(self, lane: int, shard: int, first: int, last: int) -> list[PushOutcome | None]: ...
    def counters(self, lane: int) -> Counters: ...
    def histograms(self, shard: int = 0) -> Histograms: ...
