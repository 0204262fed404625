"""What anyone may see of a running job: one row of counters a worker. Read-only; never pins, never takes a turn."""

import os
from dataclasses import dataclass

from fastps import arena as memory_of
from fastps import store
from fastps.clock import SYSTEM_CLOCK, Clock
from fastps.errors import ArenaError
from fastps.kernels.arena import LANE_FAILED, LANE_FREE, LANE_LEAVING, LANE_LEFT, LANE_LIVE, Arena

_STATES = {LANE_FREE: "not attached", LANE_LIVE: "live", LANE_LEAVING: "leaving", LANE_LEFT: "left", LANE_FAILED: "failed"}


@dataclass(frozen=True)
class WorkerStatistics:
    """A worker's counters: times in nanoseconds, staleness in versions, counts since it attached."""

    rank: int
    state: str
    steps: int
    samples: int
    wait_ns: int
    compute_ns: int
    folded: int
    dropped: int
    staleness_sum: int
    staleness_max: int
    stale_blocks: int
    loss: float
    version: int

    @property
    def staleness_mean(self) -> float:
        """Mean staleness of the folded pushes; 0 before the first."""
        return self.staleness_sum / self.folded if self.folded else 0.0

    @property
    def wait_share(self) -> float:
        """Fraction of its time that the worker waited, 0 to 1."""
        total_ns = self.wait_ns + self.compute_ns
        return self.wait_ns / total_ns if total_ns else 0.0


def statistics_of(arena: Arena) -> list[WorkerStatistics]:
    """A row for every lane of the arena."""
    rows = []
    for lane in range(arena.lanes):
        counters = arena.counters(lane)
        rows.append(
            WorkerStatistics(
                rank=lane,
                state=_STATES[arena.lane_state(lane)],
                steps=counters["steps"],
                samples=counters["samples"],
                wait_ns=counters["wait_ns"],
                compute_ns=counters["compute_ns"],
                folded=counters["folded"],
                dropped=counters["dropped"],
                staleness_sum=counters["staleness_sum"],
                staleness_max=counters["staleness_max"],
                stale_blocks=counters["stale_blocks"],
                loss=counters["loss"],
                version=arena.version,
            )
        )
    return rows


class Observer:
    """A read-only view of a running job, for progress displays. Raises AttachError while the job has no arena."""

    def __init__(self, job: str, timeout_s: float, clock: Clock) -> None:
        answer = store.find(job, None, timeout_s, clock)
        os.close(answer.pidfd)
        try:
            self._arena = Arena(memory_of.map_shared(answer.memfd, writable=False))
        except ValueError as error:
            raise ArenaError(f"job {job}: {error}") from error
        finally:
            os.close(answer.memfd)

    def statistics(self) -> list[WorkerStatistics]:
        """A row for every worker, as it stands now."""
        return statistics_of(self._arena)

    def close(self) -> None:
        """Let go of the memory."""
        del self._arena


def observe(job: str, timeout_s: float = 0.1, clock: Clock = SYSTEM_CLOCK) -> Observer:
    """Attach read-only to the running job of this name."""
    return Observer(job, timeout_s, clock)
