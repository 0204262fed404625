"""The text output of `fastps bench`: the machine, and a table for each benchmark with the bound of its figures."""

from collections.abc import Sequence

from rich.console import Console

from fastps.bench.measure import Row
from fastps.cli.tables import Column, Rows, say, show
from fastps.system.machine import machine


def _seconds(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def _time(heading: str, key: str, *, wide: bool = False) -> Column:
    return Column(heading, lambda row: None if row[key] is None else _seconds(row[key]), wide=wide)


def _ratio(heading: str, key: str = "ratio", *, wide: bool = False) -> Column:
    return Column(heading, lambda row: row.get(key), ".2f", wide=wide)


def _name(heading: str, key: str = "") -> Column:
    return Column(heading, key, left=True)


_SIDE, _SYNC, _OPTIMIZER = _name("side", "name"), _name("sync"), _name("optimizer")
_WORKERS, _PARAMETERS = Column("workers"), Column("parameters", form=",")
_TIMES = (_time("median", "seconds_median"), _time("least", "seconds_min", wide=True), _time("most", "seconds_max", wide=True))
_RATIO = _ratio("time / fastps")
_RATIO_ENDS = (_ratio("least ratio", "ratio_min", wide=True), _ratio("most ratio", "ratio_max", wide=True))
_SHARE = _ratio("limit share", "limit_share")
BENCHMARKS: dict[str, tuple[str, tuple[Column, ...]]] = {
    "kernels": (
        "kernels on one core or a GPU; bound: the better plain C loop into fresh buffers, on a GPU a copy's bandwidth",
        (
            _name("kernel", "name"),
            Column("parameters", "size", ","),
            _name("backend"),
            *_TIMES,
            Column("GB/s", "bytes_per_s", ".1f", 1e9, wide=True),
            _SHARE,
        ),
    ),
    "lane": (
        "a lane between two cores; bound: one number in one cache line, handed over",
        (_name("figure", "name"), *_TIMES, _SHARE),
    ),
    "scheduler": (
        "one decision of the scheduler; pushes in random order; bound: what was promised",
        (
            _name("sync", "name"),
            _name("fold/grant", "backend"),
            Column("workers", "size", ","),
            *_TIMES,
            Column("bound", lambda row: f"{row['bound_ns']} ns"),
        ),
    ),
    "sim": (
        "one event of the simulator; whole runs from nothing to the end; bound: what was promised",
        (
            _name("sync", "name"),
            _name("surroundings", "backend"),
            Column("workers", "size", ","),
            Column("ns", "ns_per_op", ".0f"),
            Column("bound", "bound_ns", ".0f"),
            Column("million/s", "events_per_s", ".2f", 1e6),
            Column("run", lambda row: _seconds(row["seconds_median"]) if "max_rss_bytes" in row else None, wide=True),
            Column("MiB", lambda row: row.get("max_rss_bytes"), ",.0f", 2**20, wide=True),
        ),
    ),
    "step": (
        "one synchronization step; bound: the limit, one pass over memory without any waiting",
        (_SIDE, _SYNC, _WORKERS, _PARAMETERS, *_TIMES, _RATIO),
    ),
    "rows": (
        "one step of a model with four tables of embeddings, and one push of rows; bound: a plain C loop over the push's rows",
        (_SIDE, _OPTIMIZER, _WORKERS, _PARAMETERS, Column("batch", "batch_size", ","), *_TIMES, _RATIO),
    ),
    "nodes": (
        "one step of two nodes with two workers each; bound: plain sockets that carry the floats both ways at once",
        (
            _SIDE,
            _name("link", "backend"),
            _PARAMETERS,
            Column("backward", lambda row: _seconds(row["backward_s"]) if row["backward_s"] else None),
            *_TIMES,
            _RATIO,
            _ratio("bytes / needed", "bytes_ratio"),
            _ratio("with headers", "packet_bytes_ratio", wide=True),
            _ratio("CPU s/GB", "cpu_s_per_gb", wide=True),
        ),
    ),
    "collectives": (
        "one all-reduce, and one forward and backward under DDP; bound: the limit, one pass over each process's own tensor",
        (_name("operation", "kind"), _SIDE, _WORKERS, _PARAMETERS, *_TIMES, _RATIO, *_RATIO_ENDS),
    ),
    "train": (
        "one step of training; bound: none is known, but single is one process with all cores and the batches of all",
        (
            *(_SIDE, _SYNC, _name("model"), _WORKERS, _PARAMETERS, *_TIMES),
            Column("steps/s", "steps_per_s", ".3g", wide=True),
            _RATIO,
        ),
    ),
    "optimizer": (
        "one step with Muon, an optimizer that runs in Python; bound: none is known",
        (
            *(_SIDE, _WORKERS, _PARAMETERS, *_TIMES, _RATIO),
            _ratio("95 % / median", "tail_ratio"),
            Column("MB", "bytes", ",.0f", 1e6),
            _ratio("memory / fastps", "bytes_ratio"),
        ),
    ),
    "memory": (
        "the memory of a whole job, between two steps; bound: torch in each process, a gradient each, weights and state once",
        (
            *(_SIDE, _SYNC, _OPTIMIZER, _WORKERS, _PARAMETERS),
            Column("MB", "bytes", ",.0f", 1e6),
            Column("bound MB", lambda row: row["floor_bytes"] if row["name"] != "single" else None, ",.0f", 1e6),
            _ratio("memory / bound", "floor_ratio"),
            _ratio("memory / fastps"),
        ),
    ),
    "readers": (
        "one step of training beside readers; bound: only busy, as many processes that read nothing",
        (
            _name("beside", "name"),
            Column("readers"),
            *(_WORKERS, _PARAMETERS, *_TIMES),
            _ratio("time / none"),
            *_RATIO_ENDS,
            _time("CPU", "cpu_seconds_median"),
            _ratio("CPU / none", "cpu_ratio"),
            _time("readers' CPU / version", "readers_cpu_seconds"),
            Column("updates", form=","),
        ),
    ),
    "weight transport": (
        "from gradients in the trainer to new weights in a reader's hands; bound: none is known",
        (
            *(_SIDE, _PARAMETERS, *_TIMES),
            _time("after sight", "seconds_from_sight"),
            _time("after the step", "seconds_from_publish"),
            _RATIO,
            Column("mixed looks", lambda row: f"{row['mixed_looks']} of {row['looks']}"),
        ),
    ),
    "publish": (
        "one publish of six tensors; bound: a copy of as many bytes",
        (_SIDE, _PARAMETERS, *_TIMES, _ratio("time / copy")),
    ),
}


def tables(rows: Sequence[Row]) -> dict[str, Rows]:
    """Make a table for each benchmark that has rows, by its name; sides that are missing have no row."""
    made = {}
    for bench, (title, columns) in BENCHMARKS.items():
        found = [row for row in rows if row["bench"] == bench]
        if found:
            made[bench] = Rows.of(title, columns, [row for row in found if "missing" not in row])
    return made


def show_benchmarks(rows: Sequence[Row], console: Console, *, wide: bool = False) -> None:
    """Print the machine and a table for each benchmark with rows; missing sides are named below their table."""
    where = machine()
    memory = f"{where['memory_bytes'] / 2**30:.0f} GiB"
    told = f"{where['cpu']}, {where['cores']} cores, {memory}, Linux {where['kernel']}; medians, sides take turns"
    say(console, told)
    for bench, table in tables(rows).items():
        show(console, table, wide=wide)
        missing = {row["name"]: row["missing"] for row in rows if row["bench"] == bench and "missing" in row}
        say(console, *(f"missing: {name} ({reason})" for name, reason in missing.items()))
