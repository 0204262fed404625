"""The text output of `fastps bench`: the machine, and a table for each benchmark with the bound of its figures."""

from collections.abc import Callable, Sequence

from rich.console import Console

from fastps.bench.measure import Row
from fastps.cli.tables import Column, Rows, show
from fastps.system.machine import machine

Columns = dict[str, Callable[[Row], str]]


def _seconds(seconds: float) -> str:
    """Format a time with three digits and a fitting unit."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def _ratio(key: str) -> Callable[[Row], str]:
    """A column of a key that some rows lack."""
    return lambda row: "-" if row.get(key) is None else f"{row[key]:.2f}"


_TIMES: Columns = {
    "median": lambda row: _seconds(row["seconds_median"]),
    "least": lambda row: _seconds(row["seconds_min"]),
    "most": lambda row: _seconds(row["seconds_max"]),
}
_SIZES: Columns = {"workers": lambda row: str(row["workers"]), "parameters": lambda row: f"{row['parameters']:,}"}
_RATIO: Columns = {"time / fastps": lambda row: f"{row['ratio']:.2f}"}
_SHARE: Columns = {"limit share": _ratio("limit_share")}
BENCHMARKS: dict[str, tuple[str, Columns]] = {
    "kernels": (
        "kernels on one core or a GPU; bound: the better plain C loop into fresh buffers, on a GPU a copy's bandwidth",
        {
            "kernel": lambda row: row["name"],
            "parameters": lambda row: f"{row['size']:,}",
            "backend": lambda row: row["backend"],
            **_TIMES,
            "GB/s": lambda row: f"{row['bytes_per_s'] / 1e9:.1f}",
            **_SHARE,
        },
    ),
    "lane": (
        "a lane between two cores; bound: one number in one cache line, handed over",
        {"figure": lambda row: row["name"], **_TIMES, **_SHARE},
    ),
    "scheduler": (
        "one decision of the scheduler; pushes in random order; bound: what was promised",
        {
            "sync": lambda row: row["name"],
            "fold/grant": lambda row: row["backend"],
            "workers": lambda row: f"{row['size']:,}",
            **_TIMES,
            "bound": lambda row: f"{row['bound_ns']} ns",
        },
    ),
    "sim": (
        "one event of the simulator; whole runs from nothing to the end; bound: what was promised",
        {
            "sync": lambda row: row["name"],
            "surroundings": lambda row: row["backend"],
            "workers": lambda row: f"{row['size']:,}",
            "ns": lambda row: f"{row['ns_per_op']:.0f}",
            "bound": lambda row: f"{row['bound_ns']:.0f}",
            "million/s": lambda row: f"{row['events_per_s'] / 1e6:.2f}",
            "run": lambda row: _seconds(row["seconds_median"]) if "max_rss_bytes" in row else "-",
            "MiB": lambda row: f"{row['max_rss_bytes'] / 2**20:,.0f}" if "max_rss_bytes" in row else "-",
        },
    ),
    "step": (
        "one synchronization step; bound: the limit, one pass over memory without any waiting",
        {
            "side": lambda row: row["name"],
            "sync": lambda row: row["sync"],
            **_SIZES,
            **_TIMES,
            **_RATIO,
        },
    ),
    "rows": (
        "one step of a model with four tables of embeddings, and one push of rows; bound: a plain C loop over the push's rows",
        {
            "side": lambda row: row["name"],
            "optimizer": lambda row: row["optimizer"],
            **_SIZES,
            "batch": lambda row: f"{row['batch_size']:,}",
            **_TIMES,
            **_RATIO,
        },
    ),
    "nodes": (
        "one step of two nodes with two workers each; bound: plain sockets that carry the floats both ways at once",
        {
            "side": lambda row: row["name"],
            "link": lambda row: row["backend"],
            "parameters": lambda row: f"{row['parameters']:,}",
            "backward": lambda row: _seconds(row["backward_s"]) if row["backward_s"] else "-",
            **_TIMES,
            **_RATIO,
            "bytes / needed": _ratio("bytes_ratio"),
            "with headers": _ratio("packet_bytes_ratio"),
            "CPU s/GB": _ratio("cpu_s_per_gb"),
        },
    ),
    "collectives": (
        "one all-reduce, and one forward and backward under DDP; bound: the limit, one pass over each process's own tensor",
        {
            "operation": lambda row: row["kind"],
            "side": lambda row: row["name"],
            **_SIZES,
            **_TIMES,
            **_RATIO,
            "least ratio": _ratio("ratio_min"),
            "most ratio": _ratio("ratio_max"),
        },
    ),
    "train": (
        "one step of training; bound: none is known, but single is one process with all cores and the batches of all",
        {
            "side": lambda row: row["name"],
            "sync": lambda row: row["sync"],
            "model": lambda row: row["model"],
            **_SIZES,
            **_TIMES,
            "steps/s": lambda row: f"{row['steps_per_s']:.3g}",
            **_RATIO,
        },
    ),
    "readers": (
        "one step of training beside readers; bound: only busy, as many processes that read nothing",
        {
            "beside": lambda row: row["name"],
            "readers": lambda row: str(row["readers"]),
            **_SIZES,
            **_TIMES,
            "time / none": _ratio("ratio"),
            "least ratio": _ratio("ratio_min"),
            "most ratio": _ratio("ratio_max"),
            "CPU": lambda row: _seconds(row["cpu_seconds_median"]),
            "CPU / none": _ratio("cpu_ratio"),
            "readers' CPU / version": lambda row: (
                "-" if row["readers_cpu_seconds"] is None else _seconds(row["readers_cpu_seconds"])
            ),
            "updates": lambda row: f"{row['updates']:,}",
        },
    ),
    "weight transport": (
        "from gradients in the trainer to new weights in a reader's hands; bound: none is known",
        {
            "side": lambda row: row["name"],
            "parameters": lambda row: f"{row['parameters']:,}",
            **_TIMES,
            "after sight": lambda row: _seconds(row["seconds_from_sight"]),
            **_RATIO,
            "mixed looks": lambda row: f"{row['mixed_looks']} of {row['looks']}",
        },
    ),
}


_WIDE = (
    "least",
    "most",
    "GB/s",
    "run",
    "MiB",
    "steps/s",
    "with headers",
    "CPU s/GB",
    "least ratio",
    "most ratio",
)  # columns that a narrow terminal does without
_TEXTS = (
    "optimizer",
    "kernel",
    "beside",
    "figure",
    "sync",
    "fold/grant",
    "surroundings",
    "side",
    "link",
    "model",
    "backend",
    "operation",
)


def tables(rows: Sequence[Row]) -> dict[str, Rows]:
    """Make a table for each benchmark that has rows, by its name; sides that are missing have no row."""
    made = {}
    for bench, (title, columns) in BENCHMARKS.items():
        found = [row for row in rows if row["bench"] == bench]
        if found:
            headings = [Column(heading, wide=heading in _WIDE, left=heading in _TEXTS) for heading in columns]
            cells = [[cell(row) for cell in columns.values()] for row in found if "missing" not in row]
            made[bench] = Rows(title, headings, cells)
    return made


def show_benchmarks(rows: Sequence[Row], console: Console, *, wide: bool = False) -> None:
    """Print the machine and a table for each benchmark with rows; missing sides are named below their table."""
    where = machine()
    memory = f"{where['memory_bytes'] / 2**30:.0f} GiB"
    told = f"{where['cpu']}, {where['cores']} cores, {memory}, Linux {where['kernel']}; medians, sides take turns"
    console.print(told, markup=False, highlight=False)
    for bench, table in tables(rows).items():
        show(console, table, wide=wide)
        missing = {row["name"]: row["missing"] for row in rows if row["bench"] == bench and "missing" in row}
        for name, reason in missing.items():
            console.print(f"missing: {name} ({reason})", markup=False, highlight=False)
