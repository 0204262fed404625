"""`fastps top`: a live view of a running job's nodes, workers and shards, from the job's own counters.

A read-only observer provides the counters; ending the view does not affect the job.
"""

import math
import re
from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress

from rich.console import Console, Group
from rich.live import Live

from fastps.cli.report import Row
from fastps.cli.tables import Column, Rows, show
from fastps.errors import AttachError, Error, UsageError
from fastps.membership import discovery
from fastps.membership.node_board import NodeStatistics
from fastps.store.observer import Look, Observer, ShardStatistics, WorkerStatistics, observe
from fastps.system.clock import SYSTEM_CLOCK, Clock

_BARS = "▁▂▃▄▅▆▇█"
_BARS_WIDTH = 16
_MOST_SHARD_LINES = 8
_SILENT_NS = 2_000_000_000  # beats come twice a second
_ARENA = re.compile(r"(.+)\.node\d+((?:\.\d+)?)(?:\.home\d+)?")  # of a job of several nodes


class NoJobError(Error):
    """There is no running job to look at."""


def choose_job(job: str | None, clock: Clock = SYSTEM_CLOCK) -> str:
    """The job of this name, or without one the only job of this user.

    In a job of several nodes this is the arena of the first of its nodes on this machine.
    Raises NoJobError when there is none, UsageError when there are several.
    """
    found = discovery.running_jobs(clock)
    if job is not None and job in found:
        return job
    arenas = first_arenas(found)
    if job is not None and job in arenas:
        return arenas[job]
    running = sorted(arenas.values())
    if job is None:
        if not running:
            raise NoJobError("expected a running job of this user, found none: start one, such as with fastps train")
        if len(running) > 1:
            raise UsageError(
                f"expected one running job, found {', '.join(running)}: name one of them, as in fastps top {running[0]}"
            )
        return running[0]
    others = f"found {', '.join(running)}" if running else "found none"
    raise NoJobError(f"expected a running job {job} of this user, {others}")


def first_arenas(names: Sequence[str]) -> dict[str, str]:
    """The arena to look at for each job: not those of homes, and of the nodes on this machine the first.

    >>> first_arenas(["a", "b.node0", "b.node0.home0", "b.node1", "c.node1.2"])
    {'a': 'a', 'b': 'b.node0', 'c.2': 'c.node1.2'}
    """
    found: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (len(name), name)):
        arena = _ARENA.fullmatch(name)
        found.setdefault(arena[1] + arena[2] if arena is not None else name, name)
    return dict(sorted(found.items()))


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
    """One row a node, a worker and a shard, told apart by "kind"; rates are None where there is no look before."""
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
            **({"rows": row.rows} if now.tables else {}),
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
            **({"rows_written": shard.rows_written, "updates": shard.updates} if now.tables else {}),
        }
        for old, shard in zip(old_shards, now.shards, strict=True)
    ]
    return [*node_rows(before, now), *workers, *shards]


def node_rows(before: Look | None, now: Look) -> list[Row]:
    """One row a node, in a job of several. Its rates are of the time between its figures, which come twice a second."""
    old = {row.node: row for row in before.nodes} if before else {}
    return [_node_row(old.get(row.node), row, now.seen_ns) for row in now.nodes]


def _node_row(old: NodeStatistics | None, row: NodeStatistics, now_ns: int) -> Row:
    seconds = (row.heard_ns - old.heard_ns) / 1e9 if old is not None and old.heard_ns else 0.0

    def rate(count: int, count_before: int) -> float | None:
        return max(0, count - count_before) / seconds if seconds > 0 else None

    before = old or row
    silent_ns = now_ns - row.heard_ns if row.heard_ns else 0
    is_silent = row.state == "live" and silent_ns > _SILENT_NS
    return {
        "kind": "node",
        "node": row.node,
        "host": row.host,
        "state": "silent" if is_silent else row.state,
        "workers": row.workers,
        "steps": row.steps,
        "steps_per_s": rate(row.steps, before.steps),
        "pushes": row.pushes if row.pushes >= 0 else None,
        "lag": row.lag if row.lag >= 0 else None,
        "wait_share": min(1.0, share / 1e9) if (share := rate(row.wait_ns, before.wait_ns)) is not None else None,
        "sent_bytes": row.sent_bytes,
        "received_bytes": row.received_bytes,
        "sent_bytes_s": rate(row.sent_bytes, before.sent_bytes),
        "received_bytes_s": rate(row.received_bytes, before.received_bytes),
        "staleness_mean": row.staleness_mean,
        "staleness_max": row.staleness_max,
        "folded": row.folded,
        "dropped": row.dropped,
        "round_trip_ns": row.round_trip_ns if row.round_trip_ns >= 0 else None,
        "clock_offset_ns": row.clock_offset_ns if row.clock_error_ns >= 0 else None,
        "clock_error_ns": row.clock_error_ns if row.clock_error_ns >= 0 else None,
        "heard_ns_ago": max(0, silent_ns) if row.heard_ns else None,
    }


def tables(job: str, rows: Sequence[Row], look: Look) -> list[Rows]:
    """Make the tables: a row per node, if there are several, per worker and per shard; one for all shards if they are many."""
    mark = "" if look.settled else " (versions were published meanwhile)"
    headings = ["worker", "state", "steps", "steps/s", "loss", "staleness", "max", "waiting", "folded", "dropped"]
    headings += ["rows"] if look.tables else []
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
            *([f"{row['rows']:,}"] if look.tables else []),
        ]
        for row in rows
        if row["kind"] == "worker"
    ]
    nodes = [row for row in rows if row["kind"] == "node"]
    workers = Rows(f"job {job}{mark}", columns, cells)
    shards = _shard_table([row for row in rows if row["kind"] == "shard"])
    return [*([_node_table(nodes)] if nodes else []), workers, shards]


def _node_table(nodes: Sequence[Row]) -> Rows:
    wide = ("host", "workers", "waiting", "staleness", "dropped")
    headings = (
        "node", "host", "state", "workers", "steps", "steps/s", "lag", "waiting", "out MB/s", "in MB/s", "staleness", "dropped",
        "round trip ms", "clock ms",
    )  # fmt: skip
    columns = [Column(name, wide=name in wide, left=name in ("host", "state")) for name in headings]
    cells = [
        [
            str(row["node"]),
            row["host"],
            row["state"],
            str(row["workers"]),
            str(row["steps"]),
            _rate(row["steps_per_s"]),
            "-" if row["lag"] is None else str(row["lag"]),
            "-" if row["wait_share"] is None else f"{row['wait_share']:.0%}",
            _rate(row["sent_bytes_s"], 1e6),
            _rate(row["received_bytes_s"], 1e6),
            f"{row['staleness_mean']:.2f}",
            str(row["dropped"]),
            "-" if row["round_trip_ns"] is None else f"{row['round_trip_ns'] / 1e6:.2f}",
            clock_cell(row["clock_offset_ns"], row["clock_error_ns"]),
        ]
        for row in nodes
    ]
    return Rows("nodes", columns, cells)


def clock_cell(offset_ns: int | None, error_ns: int | None) -> str:
    """A clock's offset to node 0's, and the bound of its error, in ms.

    >>> clock_cell(1_250_000, 30_000)
    '+1.25 ± 0.03'
    >>> clock_cell(None, None)
    '-'
    """
    if offset_ns is None or error_ns is None:
        return "-"
    return f"{offset_ns / 1e6:+.2f} ± {math.ceil(error_ns / 1e4) / 100:.2f}"


def _shard_table(shards: Sequence[Row]) -> Rows:
    has_rows = any("rows_written" in row for row in shards)
    headings = ("shard", "version", "folds/s", *(["rows/fold"] if has_rows else []))
    columns = [*(Column(heading) for heading in headings), Column("pushes by staleness", left=True)]
    if len(shards) <= _MOST_SHARD_LINES:
        cells = [
            [
                str(row["shard"]),
                str(row["version"]),
                _rate(row["folds_per_s"]),
                *([_rows_per_fold([row])] if has_rows else []),
                bars(row["staleness"]),
            ]
            for row in shards
        ]
        return Rows("shards", columns, cells)
    versions = [row["version"] for row in shards]
    rates = [row["folds_per_s"] for row in shards if row["folds_per_s"] is not None]
    counts: dict[int, int] = {}
    for row in shards:
        for staleness, count in row["staleness"]:
            counts[staleness] = counts.get(staleness, 0) + count
    mean = sum(rates) / len(rates) if rates else None
    rows_cells = [_rows_per_fold(shards)] if has_rows else []
    span = f"{min(versions)} to {max(versions)}"
    cells = [[f"all {len(shards)}", span, _rate(mean), *rows_cells, bars(sorted(counts.items()))]]
    return Rows("shards", columns, cells)


def _rows_per_fold(shards: Sequence[Row]) -> str:
    """Rows of tables that an update of these shards has written, in the mean."""
    updates = sum(row["updates"] for row in shards)
    return f"{sum(row['rows_written'] for row in shards) / updates:,.1f}" if updates else "-"


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


def _rate(per_s: float | None, unit: float = 1.0) -> str:
    return "-" if per_s is None else f"{per_s / unit:.1f}"
