"""`fastps top`: a live view of a running job's workers and shards, from the job's own counters.

A read-only observer provides the counters; ending the view does not affect the job.
"""

import math
from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress

from rich.console import Console, Group
from rich.live import Live

from fastps.cli.report import Row
from fastps.cli.tables import Column, Rows, show
from fastps.errors import AttachError, Error, UsageError
from fastps.membership import discovery
from fastps.store.observer import Look, Observer, ShardStatistics, WorkerStatistics, observe
from fastps.system.clock import SYSTEM_CLOCK, Clock

_BARS = "▁▂▃▄▅▆▇█"
_BARS_WIDTH = 16
_MOST_SHARD_LINES = 8


class NoJobError(Error):
    """There is no running job to look at."""


def choose_job(job: str | None, clock: Clock = SYSTEM_CLOCK) -> str:
    """The job of this name, or without one the only job of this user.

    Raises NoJobError when there is none, UsageError when there are several.
    """
    running = discovery.running_jobs(clock)
    if job is None:
        if not running:
            raise NoJobError("expected a running job of this user, found none: start one, such as with fastps train")
        if len(running) > 1:
            raise UsageError(
                f"expected one running job, found {', '.join(running)}: name one of them, as in fastps top {running[0]}"
            )
        return running[0]
    if job not in running:
        others = f"found {', '.join(running)}" if running else "found none"
        raise NoJobError(f"expected a running job {job} of this user, {others}")
    return job


def look_once(
    job: str, console: Console, *, interval_s: float = 1.0, wide: bool = False, clock: Clock = SYSTEM_CLOCK
) -> list[Row]:
    """Print the job as it is, with the rates of `interval_s` seconds, and return its rows."""
    with closing(_attach(job, clock)) as observer:
        before = observer.look()
        clock.sleep_ns(int(interval_s * 1e9))
        now = observer.look()
    return _shown(job, before, now, console, wide)


def watch(job: str, console: Console, *, interval_s: float = 1.0, wide: bool = False, clock: Clock = SYSTEM_CLOCK) -> list[Row]:
    """Show the job until it ends, which a last line says, or until Ctrl-C; returns the last rows.

    Without a terminal only the last look is printed.
    """
    with closing(_attach(job, clock)) as observer:
        before, now = None, observer.look()
        live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        with suppress(KeyboardInterrupt), live or nullcontext():
            while not now.over:
                if live is not None:
                    drawn = (table.at(console.width, wide) for table in tables(job, rows_of(before, now), now))
                    live.update(Group(*drawn), refresh=True)
                clock.sleep_ns(int(interval_s * 1e9))
                before, now = now, observer.look()
    return _shown(job, before, now, console, wide)


def _shown(job: str, before: Look | None, now: Look, console: Console, wide: bool) -> list[Row]:
    rows = rows_of(before, now)
    for table in tables(job, rows, now):
        show(console, table, wide=wide)
    if now.over:
        console.print(last_line(job, now), highlight=False, markup=False)
    return rows


def rows_of(before: Look | None, now: Look) -> list[Row]:
    """One row a worker and one a shard, told apart by "kind"; rates are None where there is no look before."""
    seconds = (now.seen_ns - before.seen_ns) / 1e9 if before else 0.0
    old_workers: Sequence[WorkerStatistics | None] = before.workers if before else [None] * len(now.workers)
    old_shards: Sequence[ShardStatistics | None] = before.shards if before else [None] * len(now.shards)
    workers = [
        {
            "kind": "worker",
            "worker": row.rank,
            "state": row.state,
            "steps": row.steps,
            "samples": row.samples,
            "steps_per_s": (row.steps - old.steps) / seconds if old and seconds > 0 else None,
            "loss": row.loss if math.isfinite(row.loss) else None,
            "staleness_mean": row.staleness_mean,
            "staleness_max": row.staleness_max,
            "wait_share": row.wait_share,
            "folded": row.folded,
            "dropped": row.dropped,
        }
        for old, row in zip(old_workers, now.workers, strict=True)
    ]
    shards = [
        {
            "kind": "shard",
            "shard": shard.shard,
            "version": shard.version,
            "folds_per_s": (shard.version - old.version) / seconds if old and seconds > 0 else None,
            "sigma_mean": shard.sigma_mean,
            "staleness": shard.staleness,
        }
        for old, shard in zip(old_shards, now.shards, strict=True)
    ]
    return [*workers, *shards]


def tables(job: str, rows: Sequence[Row], look: Look) -> list[Rows]:
    """Make the tables: one row per worker, and one per shard, or one for all shards if they are many."""
    mark = "" if look.settled else " (versions were published meanwhile)"
    headings = ("worker", "state", "steps", "steps/s", "loss", "staleness", "max", "waiting", "folded", "dropped")
    columns = [Column(name, wide=name in ("max", "folded", "dropped"), left=name == "state") for name in headings]
    cells = [
        [
            str(row["worker"]),
            row["state"],
            str(row["steps"]),
            _rate(row["steps_per_s"]),
            "-" if row["loss"] is None else f"{row['loss']:.3f}",
            f"{row['staleness_mean']:.2f}",
            str(row["staleness_max"]),
            f"{row['wait_share']:.0%}",
            str(row["folded"]),
            str(row["dropped"]),
        ]
        for row in rows
        if row["kind"] == "worker"
    ]
    return [Rows(f"job {job}{mark}", columns, cells), _shard_table([row for row in rows if row["kind"] == "shard"])]


def _shard_table(shards: Sequence[Row]) -> Rows:
    columns = [*(Column(heading) for heading in ("shard", "version", "folds/s")), Column("pushes by staleness", left=True)]
    if len(shards) <= _MOST_SHARD_LINES:
        cells = [[str(row["shard"]), str(row["version"]), _rate(row["folds_per_s"]), bars(row["staleness"])] for row in shards]
        return Rows("shards", columns, cells)
    versions = [row["version"] for row in shards]
    rates = [row["folds_per_s"] for row in shards if row["folds_per_s"] is not None]
    counts: dict[int, int] = {}
    for row in shards:
        for staleness, count in row["staleness"]:
            counts[staleness] = counts.get(staleness, 0) + count
    mean = sum(rates) / len(rates) if rates else None
    cells = [[f"all {len(shards)}", f"{min(versions)} to {max(versions)}", _rate(mean), bars(sorted(counts.items()))]]
    return Rows("shards", columns, cells)


def bars(histogram: Sequence[tuple[int, int]], width: int = _BARS_WIDTH) -> str:
    """A small picture of (versions, count): a bar for equally many versions each, between the least and the greatest.

    Whatever occurred has a bar, however rare it is.

    >>> bars([(0, 80), (1, 41), (3, 1)])
    '0 █▅ ▁ 3'
    >>> bars([(0, 10), (31, 5)], width=4)
    '0 █  ▅ 31'
    >>> bars([])
    ''
    """
    if not histogram:
        return ""
    greatest = max(versions for versions, _ in histogram)
    each = greatest // width + 1
    sums = [0] * (greatest // each + 1)
    for versions, count in histogram:
        sums[versions // each] += count
    most = max(sums)
    drawn = "".join(_BARS[min(len(_BARS) - 1, len(_BARS) * count // most)] if count else " " for count in sums)
    return f"0 {drawn} {greatest}"


def last_line(job: str, look: Look) -> str:
    """How the job ended, in a sentence.

    >>> last_line("mnist", Look(0, [], [], True, {}, True))
    'job mnist has ended'
    """
    states = [row.state for row in look.workers]
    counts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    versions = [shard.version for shard in look.shards]
    after = f" after version {min(versions)}" if versions else ""
    workers = f"; its workers: {', '.join(counts)}" if counts else ""
    said = "".join(f"; worker {rank} failed: {text}" for rank, text in sorted(look.failures.items()))
    return f"job {job} has ended{after}{workers}{said}"


def _attach(job: str, clock: Clock) -> Observer:
    try:
        return observe(job, timeout_s=0.0, clock=clock)
    except AttachError:
        if job not in discovery.listening():
            raise NoJobError(f"job {job} ended before it could be looked at") from None
        raise


def _rate(per_s: float | None) -> str:
    return "-" if per_s is None else f"{per_s:.1f}"
