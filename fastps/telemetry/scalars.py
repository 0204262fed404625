"""The figures of a running job as one table: whose figure it is, its name with the unit, its kind, a help text, and its value.

TensorBoard and Prometheus both read this table, so that a figure has one name and one value in both. A value comes from one
look of an observer. TensorBoard's tag is `worker/wait_seconds`; Prometheus' metric is `fastps_worker_wait_seconds_total`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastps.membership.node_board import NodeStatistics
from fastps.store.observer import Look, ShardStatistics, WorkerStatistics

COUNTER, GAUGE = "counter", "gauge"
JOB, WORKER, SHARD, NODE = "job", "worker", "shard", "node"
OWNERS = (JOB, WORKER, SHARD, NODE)


@dataclass(frozen=True)
class Scalar:
    """One figure."""

    owner: str  # whose figure it is: "job", "worker", "shard" or "node"
    name: str  # its name, with the unit at the end
    kind: str  # "counter", which only grows, or "gauge"
    help: str  # a sentence for the reader
    # The value of an owner's row of a look, or of the look itself for the job; None while it is not known.
    value: Callable[[Any], float | None]
    # The name of a counter's growth per second, which TensorBoard shows and Prometheus computes itself; "": none.
    rate: str = ""

    @property
    def tag(self) -> str:
        """TensorBoard's tag."""
        return f"{self.owner}/{self.name}"

    @property
    def metric(self) -> str:
        """Prometheus' name, without the suffix `_total` of a counter."""
        return f"fastps_{self.owner}_{self.name}"


def _sum(name: str) -> Callable[[Look], float]:
    return lambda look: sum(getattr(row, name) for row in look.workers)


def _workers_in(*states: str) -> Callable[[Look], float]:
    return lambda look: sum(row.state in states for row in look.workers)


def updates_of(look: Look) -> int:
    """The updates of the shard that has the fewest: the step of a point in TensorBoard."""
    return min((shard.version for shard in look.shards), default=0)


def _mean_loss(look: Look) -> float | None:
    losses = [loss for row in look.workers if (loss := _loss(row)) is not None]
    return sum(losses) / len(losses) if losses else None


def _loss(row: WorkerStatistics) -> float | None:
    return row.loss if row.steps and math.isfinite(row.loss) else None  # before its first step a lane has zeros


def _mean_staleness(look: Look) -> float:
    return _sum("staleness_sum")(look) / max(1, _sum("folded")(look))


def _wait_ratio(look: Look) -> float:
    wait_ns = _sum("wait_ns")(look)
    return wait_ns / max(1, wait_ns + _sum("compute_ns")(look))


def _known(value: int, scale: float = 1.0) -> float | None:
    return value * scale if value >= 0 else None


SCALARS: tuple[Scalar, ...] = (
    Scalar(JOB, "updates", COUNTER, "Updates of the weights, of the shard with the fewest.", updates_of, "updates_per_second"),
    Scalar(JOB, "steps", COUNTER, "Steps of all workers.", _sum("steps"), "steps_per_second"),
    Scalar(
        JOB, "samples", COUNTER, "Samples of all workers, where the script tells them.",
        _sum("samples"), "samples_per_second",
    ),
    Scalar(JOB, "loss", GAUGE, "Mean of the losses that the workers reported last (report_loss).", _mean_loss),
    Scalar(JOB, "wait_ratio", GAUGE, "Share of the workers' time that they waited, since the job began.", _wait_ratio),
    Scalar(JOB, "staleness_mean_versions", GAUGE, "Mean staleness of the folded pushes since the job began.", _mean_staleness),
    Scalar(JOB, "folded_pushes", COUNTER, "Pushes that were folded, summed over shards.", _sum("folded")),
    Scalar(JOB, "dropped_pushes", COUNTER, "Pushes that the discipline dropped, summed over shards.", _sum("dropped")),
    Scalar(JOB, "rejected_pushes", COUNTER, "Pushes that were rejected because they were not finite.", _sum("rejected")),
    Scalar(JOB, "live_workers", GAUGE, "Workers that train.", _workers_in("live")),
    Scalar(
        JOB, "lost_workers", GAUGE, "Workers that died or failed, and were not replaced.",
        _workers_in("died", "failed", "expelled"),
    ),
    Scalar(
        JOB, "late_workers", COUNTER, "Workers that joined the running job: replacements of lost ones, and additional ones.",
        _sum("generation"),
    ),
    Scalar(WORKER, "steps", COUNTER, "Steps of the worker.", lambda row: row.steps, "steps_per_second"),
    Scalar(WORKER, "samples", COUNTER, "Samples of the worker, where the script tells them.", lambda row: row.samples),
    Scalar(WORKER, "loss", GAUGE, "The loss that the worker reported last (report_loss).", _loss),
    Scalar(
        WORKER, "wait_seconds", COUNTER, "Time that the worker waited for its grants, with the folds that it made meanwhile.",
        lambda row: row.wait_ns / 1e9, "wait_ratio",
    ),
    Scalar(
        WORKER, "compute_seconds", COUNTER, "Time from each grant to the next push.",
        lambda row: row.compute_ns / 1e9, "compute_ratio",
    ),
    Scalar(
        WORKER, "push_seconds", COUNTER, "Time in pushes: posting, and the folds that the worker made right then.",
        lambda row: row.push_ns / 1e9, "push_ratio",
    ),
    Scalar(WORKER, "folded_pushes", COUNTER, "Pushes of the worker that were folded, over shards.", lambda row: row.folded),
    Scalar(WORKER, "dropped_pushes", COUNTER, "Pushes of the worker that the discipline dropped.", lambda row: row.dropped),
    Scalar(WORKER, "rejected_pushes", COUNTER, "Pushes of the worker that were not finite.", lambda row: row.rejected),
    Scalar(
        WORKER, "folded_rows", COUNTER, "Rows of tables in the worker's folded pushes.",
        lambda row: row.rows or None, "folded_rows_per_second",
    ),
    Scalar(
        WORKER, "staleness_mean_versions", GAUGE, "Mean staleness of the worker's folded pushes since the job began.",
        lambda row: row.staleness_mean,
    ),
    Scalar(
        WORKER, "staleness_max_versions", GAUGE, "Greatest staleness of the worker's folded pushes.",
        lambda row: row.staleness_max,
    ),
    Scalar(
        WORKER, "stale_shards", COUNTER, "Shards that were not fresh when a step began, summed over steps.",
        lambda row: row.stale_blocks,
    ),
    Scalar(WORKER, "live", GAUGE, "1 while a worker trains in this lane, else 0.", lambda row: row.state == "live"),
    Scalar(SHARD, "updates", COUNTER, "Updates of the shard.", lambda row: row.version, "updates_per_second"),
    Scalar(
        SHARD, "staleness_mean_versions", GAUGE, "Mean over the shard's updates of the mean staleness of their pushes.",
        lambda row: row.sigma_mean,
    ),
    Scalar(SHARD, "written_rows", COUNTER, "Rows of tables that the updates wrote.", lambda row: row.rows_written or None),
    Scalar(NODE, "workers", GAUGE, "Workers of the node.", lambda row: row.workers),
    Scalar(NODE, "live", GAUGE, "1 while the node trains, else 0.", lambda row: row.state == "live"),
    Scalar(NODE, "updates", COUNTER, "Versions that the node has made.", lambda row: row.steps, "updates_per_second"),
    Scalar(NODE, "pushes", COUNTER, "Pushes of the node that the home has.", lambda row: _known(row.pushes)),
    Scalar(NODE, "lag_pushes", GAUGE, "Pushes that the node is behind the foremost node.", lambda row: _known(row.lag)),
    Scalar(
        NODE, "wait_seconds", COUNTER, "Time of the node's agent in exchanges with other nodes.",
        lambda row: row.wait_ns / 1e9, "wait_ratio",
    ),
    Scalar(
        NODE, "sent_bytes", COUNTER, "Bytes that the node sent over all its links.",
        lambda row: row.sent_bytes, "sent_bytes_per_second",
    ),
    Scalar(
        NODE, "received_bytes", COUNTER, "Bytes that the node received over all its links.",
        lambda row: row.received_bytes, "received_bytes_per_second",
    ),
    Scalar(NODE, "folded_pushes", COUNTER, "Pushes of the node that the home folded.", lambda row: row.folded),
    Scalar(NODE, "dropped_pushes", COUNTER, "Pushes of the node that came too late.", lambda row: row.dropped),
    Scalar(
        NODE, "staleness_mean_versions", GAUGE, "Mean staleness of the node's folded pushes, in versions of the home.",
        lambda row: row.staleness_mean,
    ),
    Scalar(
        NODE, "round_trip_seconds", GAUGE, "Least round trip to node 0 of the last beats.",
        lambda row: _known(row.round_trip_ns, 1e-9),
    ),
    Scalar(
        NODE, "clock_offset_seconds", GAUGE, "The node's monotonic clock less node 0's.",
        lambda row: row.clock_offset_ns / 1e9 if row.clock_error_ns >= 0 else None,
    ),
)  # fmt: skip

STALENESS = Scalar(SHARD, "staleness_versions", COUNTER, "Pushes by their staleness when they were folded.", lambda row: None)
STALENESS_LIMITS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 254)  # the last counted exactly is 254

Owner = Look | WorkerStatistics | ShardStatistics | NodeStatistics


def owners_of(look: Look, kind: str) -> Sequence[tuple[int, Owner]]:
    """The number and the row of each owner of a kind; the job is number 0, and its row is the look.

    >>> owners_of(Look(0, [], [], True, {}, False), "job")[0][0]
    0
    """
    if kind == JOB:
        return [(0, look)]
    if kind == WORKER:
        return [(row.rank, row) for row in look.workers]
    if kind == SHARD:
        return [(row.shard, row) for row in look.shards]
    return [(row.node, row) for row in look.nodes]


def values_of(look: Look) -> Iterator[tuple[Scalar, int, float]]:
    """Every figure that is known: the row of the table, its owner's number, and the value."""
    for scalar in SCALARS:
        for number, row in owners_of(look, scalar.owner):
            value = scalar.value(row)
            if value is not None:
                yield scalar, number, float(value)
