"""`fastps top`: a live view of a running job's nodes, workers and shards, from the job's own counters."""

import math
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live

from fastps.cli.report import Row
from fastps.cli.tables import Column, Rows, say, show
from fastps.errors import AttachError, Error, UsageError
from fastps.membership import discovery
from fastps.membership.node_board import NodeStatistics
from fastps.store.observer import Look, Observer, ShardStatistics, WorkerStatistics, observe
from fastps.system import proc
from fastps.system.clock import SYSTEM_CLOCK, Clock

_BARS = "▁▂▃▄▅▆▇█"
_BARS_WIDTH = 16
_MOST_SHARD_LINES = 8
_MOST_COMMAND = 80  # characters
_SILENT_NS = 2_000_000_000  # beats come twice a second
_ARENA = re.compile(r"(.+)\.node\d+((?:\.\d+)?)(?:\.home\d+)?")  # of a job of several nodes


class NoJobError(Error):
    """There is no running job to look at."""


def choose_job(job: str | None) -> str:
    """The job of this name, or without one the only job of this user.

    In a job of several nodes this is the arena of the first of its nodes on this machine.
    Raises NoJobError when there is none, UsageError when there are several.
    """
    names = discovery.running_jobs()
    arenas = first_arenas(names)
    running = sorted(arenas.values())
    if job is not None:
        if job in names or job in arenas:
            return job if job in names else arenas[job]
        raise NoJobError(f"expected a running job {job} of this user, found {', '.join(running) or 'none'}")
    if not running:
        raise NoJobError("expected a running job of this user, found none: start one, such as with fastps train")
    if len(running) > 1:
        lines = "".join(f"\n  {name}{_program_of(name)}" for name in running)
        raise UsageError(
            f"expected one running job, found {len(running)}: name one of them, as in fastps top {shlex.quote(running[0])}"
            f"{lines}"
        )
    return running[0]


def _program_of(job: str) -> str:
    """What runs a job, its process and its age. A worker's launcher stands for it, since it has the script's command line."""
    process_id = discovery.process_of(job)
    if process_id is None:
        return ""
    words = proc.command_line(process_id)
    if words[1:2] == ["-c"] and "fastps.processes." in "".join(words[2:3]):
        process_id = proc.parent(process_id)
        words = proc.command_line(process_id)
    age_s = proc.age_s(process_id)
    parts = [f"process {process_id}", *([f"{age_text(age_s)} old"] if age_s is not None else [])]
    return f": {command_text(words)} ({', '.join(parts)})"


def command_text(words: Sequence[str]) -> str:
    """A command line to be read: without the interpreter and its folders, in printable text, and short.

    >>> command_text(["/usr/bin/python3", "/opt/bin/fastps", "run", "-n", "4", "train.py"])
    'fastps run -n 4 train.py'
    """
    kept = words[1:] if len(words) > 1 and re.fullmatch(r"python[0-9.]*", Path(words[0]).name) else words
    kept = kept[1:] if kept[:1] == ["-m"] else kept
    text = shlex.join(Path(word).name if word.startswith("/") else word for word in kept)
    plain = "".join(each if each.isprintable() else "?" for each in text)
    return plain if len(plain) <= _MOST_COMMAND else f"{plain[:_MOST_COMMAND]}..."


def age_text(seconds: float) -> str:
    """An age in its largest unit.

    >>> age_text(59), age_text(150), age_text(9000), age_text(2e5)
    ('59 s', '2 min', '2 h', '2 days')
    """
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= (2 if unit == "days" else 1) * length:
            return f"{int(seconds // length)} {unit}"
    return f"{int(seconds)} s"


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


def look_once(job: str, console: Console, *, interval_s: float = 1.0, wide: bool = False) -> list[Row]:
    """Print the job as it is, with the rates of `interval_s` seconds, and return its rows."""
    with closing(_attach(job, SYSTEM_CLOCK)) as observer:
        before = observer.look()
        SYSTEM_CLOCK.sleep_ns(int(interval_s * 1e9))
        now = observer.look()
    return _shown(job, before, now, console, wide)


def watch(job: str, console: Console, *, interval_s: float = 1.0, wide: bool = False, clock: Clock = SYSTEM_CLOCK) -> list[Row]:
    """Show the job until it ends or Ctrl-C; returns the last rows. Without a terminal only the last look is printed."""
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
        say(console, last_line(job, now))
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
            **_picked(row, "state", "steps", "samples"),
            "steps_per_s": (row.steps - old.steps) / seconds if old and seconds > 0 else None,
            "loss": row.loss if math.isfinite(row.loss) else None,
            **_picked(row, "staleness_mean", "staleness_max", "wait_share", "folded", "dropped"),
            **_picked(row, *(["rows"] if now.tables else [])),
        }
        for old, row in zip(old_workers, now.workers, strict=True)
    ]
    shards = [
        {
            "kind": "shard",
            **_picked(shard, "shard", "version"),
            "folds_per_s": (shard.version - old.version) / seconds if old and seconds > 0 else None,
            **_picked(shard, "sigma_mean", "staleness", *(["rows_written", "updates"] if now.tables else [])),
        }
        for old, shard in zip(old_shards, now.shards, strict=True)
    ]
    old_nodes = {row.node: row for row in before.nodes} if before else {}
    return [*(_node_row(old_nodes.get(row.node), row, now.seen_ns) for row in now.nodes), *workers, *shards]


def _picked(figures: object, *names: str) -> Row:
    return {name: getattr(figures, name) for name in names}


def _node_row(old: NodeStatistics | None, row: NodeStatistics, now_ns: int) -> Row:
    """A node in a job of several. Its rates are of the time between its figures, which come twice a second."""
    seconds = (row.heard_ns - old.heard_ns) / 1e9 if old is not None and old.heard_ns else 0.0

    def rate(count: int, count_before: int) -> float | None:
        return max(0, count - count_before) / seconds if seconds > 0 else None

    before = old or row
    silent_ns = now_ns - row.heard_ns if row.heard_ns else 0
    is_silent = row.state == "live" and silent_ns > _SILENT_NS
    return {
        "kind": "node",
        **_picked(row, "node", "host"),
        "state": "silent" if is_silent else row.state,
        **_picked(row, "workers", "steps"),
        "steps_per_s": rate(row.steps, before.steps),
        "pushes": row.pushes if row.pushes >= 0 else None,
        "lag": row.lag if row.lag >= 0 else None,
        "wait_share": min(1.0, share / 1e9) if (share := rate(row.wait_ns, before.wait_ns)) is not None else None,
        **_picked(row, "sent_bytes", "received_bytes"),
        "sent_bytes_s": rate(row.sent_bytes, before.sent_bytes),
        "received_bytes_s": rate(row.received_bytes, before.received_bytes),
        **_picked(row, "staleness_mean", "staleness_max", "folded", "dropped"),
        "round_trip_ns": row.round_trip_ns if row.round_trip_ns >= 0 else None,
        "clock_offset_ns": row.clock_offset_ns if row.clock_error_ns >= 0 else None,
        "clock_error_ns": row.clock_error_ns if row.clock_error_ns >= 0 else None,
        "heard_ns_ago": max(0, silent_ns) if row.heard_ns else None,
    }


_WORKER = (
    Column("worker"),
    Column("state", left=True),
    Column("steps"),
    Column("steps/s", "steps_per_s", ".1f"),
    Column("loss", form=".3f"),
    Column("staleness", "staleness_mean", ".2f"),
    Column("max", "staleness_max", wide=True),
    Column("waiting", "wait_share", ".0%"),
    Column("folded", wide=True),
    Column("dropped", wide=True),
)
_NODE = (
    Column("node"),
    Column("host", wide=True, left=True),
    Column("state", left=True),
    Column("workers", wide=True),
    Column("steps"),
    Column("steps/s", "steps_per_s", ".1f"),
    Column("lag"),
    Column("waiting", "wait_share", ".0%", wide=True),
    Column("out MB/s", "sent_bytes_s", ".1f", 1e6),
    Column("in MB/s", "received_bytes_s", ".1f", 1e6),
    Column("staleness", "staleness_mean", ".2f", wide=True),
    Column("dropped", wide=True),
    Column("round trip ms", "round_trip_ns", ".2f", 1e6),
    Column("clock ms", lambda row: clock_cell(row["clock_offset_ns"], row["clock_error_ns"])),
)


def tables(job: str, rows: Sequence[Row], look: Look) -> list[Rows]:
    """Make the tables: a row per node, if there are several, per worker and per shard; one for all shards if they are many."""
    mark = "" if look.settled else " (versions were published meanwhile)"
    nodes, workers, shards = ([row for row in rows if row["kind"] == kind] for kind in ("node", "worker", "shard"))
    columns = [*_WORKER, *([Column("rows", form=",")] if look.tables else [])]
    shown = [Rows.of(f"job {job}{mark}", columns, workers), _shard_table(shards)]
    return [*([Rows.of("nodes", _NODE, nodes)] if nodes else []), *shown]


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
    columns = [
        Column("shard"),
        Column("version"),
        Column("folds/s", "folds_per_s", ".1f"),
        *([Column("rows/fold", _rows_per_fold, ",.1f")] if has_rows else []),
        Column("pushes by staleness", lambda row: bars(row["staleness"]), left=True),
    ]
    return Rows.of("shards", columns, shards if len(shards) <= _MOST_SHARD_LINES else [_all_of(shards)])


def _all_of(shards: Sequence[Row]) -> Row:
    versions = [row["version"] for row in shards]
    rates = [row["folds_per_s"] for row in shards if row["folds_per_s"] is not None]
    counts: Counter[int] = Counter()
    for row in shards:
        counts.update(dict(row["staleness"]))
    return {
        "shard": f"all {len(shards)}",
        "version": f"{min(versions)} to {max(versions)}",
        "folds_per_s": statistics.fmean(rates) if rates else None,
        "rows_written": sum(row.get("rows_written", 0) for row in shards),
        "updates": sum(row.get("updates", 0) for row in shards),
        "staleness": sorted(counts.items()),
    }


def _rows_per_fold(row: Row) -> float | None:
    return row["rows_written"] / row["updates"] if row["updates"] else None


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
