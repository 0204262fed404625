"""Tables at 60, 80 and 110 columns: no header and no value is cut; without a terminal rows are tab-separated."""

import io
import itertools
from dataclasses import replace

import pytest
from rich.console import Console

from fastps.cli import bench_report, top
from fastps.cli.report import arrivals_table, list_table, splits_table, training_table, verdict_table
from fastps.cli.simulation_report import simulation_table
from fastps.cli.tables import Column, Rows, show
from fastps.cli.trace_report import advice_table, worker_table
from fastps.lab.papers import Effort, choose
from fastps.lab.papers.row import Verdict
from fastps.lab.stragglers import Arrival, Split
from fastps.store.observer import Look, ShardStatistics, WorkerStatistics

TIMES = ("compute_ms_mean", "compute_ms_median", "compute_ms_p95", "cpu_ms_mean", "queue_ms_mean", "blocked_ms_mean")
ANY = {
    **dict.fromkeys((*TIMES, "store_cpu_ms_mean", "transfer_ms_mean"), 132.456),
    **dict.fromkeys(("steps_per_s", "samples_per_s", "useful_steps_per_s", "updates_per_s"), 123456.7),
    **dict.fromkeys(("wait_share", "grant_wait_share", "zero_gap_share", "link_share_max", "server_share_max"), 0.777),
    **{"worker": 12, "workers": 128, "steps": 100000, "seconds": 1234.5, "staleness_mean": 12.34, "staleness_max": 1234},
    **{
        "sync": "dssp:3,15,release=printed",
        "dropped": 98765,
        "test_accuracy": 0.987,
        "speed": 1.0,
        "expected": 0.9,
        "dropped_share": 0.5,
    },
    "recommended": True,
}
BENCH = {
    **{"name": "sum-4-sgd-momentum", "backend": "count-sum/round-robin", "model": "transformer", "sync": "dssp:3,15"},
    **{"size": 25_000_000, "parameters": 25_000_000, "workers": 100_000, "bound_ns": 1000, "limit_share": 0.987},
    **dict.fromkeys(("seconds_median", "seconds_min", "seconds_max"), 0.0123456),
    **{"bytes_per_s": 123.4e9, "ns_per_op": 123.4, "events_per_s": 12.34e6, "max_rss_bytes": 2**31},
    **{"steps_per_s": 1234.5, "ratio": 12.34, "backward_s": 0.5, "optimizer": "sparse-adam", "batch_size": 50_000},
    **{"bytes": 1_234_567_890, "floor_bytes": 1_000_000_000, "floor_ratio": 1.23},
    **{"readers": 8, "updates": 12_345, "cpu_seconds_median": 0.0123456, "looks": 300},
    **dict.fromkeys(("seconds_from_sight", "seconds_from_publish"), 0.0123456),
    **dict.fromkeys(("ratio_min", "ratio_max", "cpu_ratio"), 12.34),
    **{"mixed_looks": 134, "kind": "all_reduce", "readers_cpu_seconds": 0.0123456},
    **{"bytes_ratio": 1.023, "tail_ratio": 1.234, "packet_bytes_ratio": 1.047, "cpu_s_per_gb": 1.234},
}
LOOK = Look(
    0,
    [WorkerStatistics(1023, "failed", 10**7, 10**9, 1, 1, 10**7, 12345, 0, 10**9, 255, 0, 123.456, 10**9)],
    [ShardStatistics(shard, 10**9, 10**9, 1.5, [(0, 80), (7, 41), (255, 1)]) for shard in range(2)],
    False,
    {},
    False,
)
MANY = replace(LOOK, shards=[ShardStatistics(shard, 10**9, 10**9, 1.5, [(0, 80), (255, 1)]) for shard in range(64)])
ARRIVALS = [Arrival(k, 100_000, *(k * 1.23456,) * 5, []) for k in (1, 1024)]
SPLITS = [Split(1024 - backups, backups, 1.2345, 123_456.0, 9.9 + backups) for backups in (0, 1023)]
VERDICTS = [
    Verdict(row, {"bsp:128 long name": 1.23456, "asp": float("nan")}, ok, "", 1.0) for row in choose([]) for ok in (True, False)
]
WORKERS, SHARDS = top.tables("a-job", top.rows_of(None, LOOK), LOOK)
TABLES = {
    "train": training_table([ANY], "mnist5k", ANY),
    "simulate": simulation_table([ANY], "virtual"),
    "trace": worker_table([ANY], "mean ms of a step"),
    "advise": advice_table([ANY], "predicted"),
    "top, workers": WORKERS,
    "top, shards": SHARDS,
    "top, many shards": top.tables("a-job", top.rows_of(None, MANY), MANY)[1],
    "stragglers, arrivals": arrivals_table(ARRIVALS),
    "stragglers, splits": splits_table(SPLITS, "iterations in proportion to N^-0.85"),
    "reproduce": verdict_table(VERDICTS, Effort(quick=True)),
    "reproduce --list": list_table(choose([])),
    **{f"bench {name}": bench_report.tables([{**BENCH, "bench": name}])[name] for name in bench_report.BENCHMARKS},
}


def _shown(rows: Rows, width: int, wide: bool = False, terminal: bool = True) -> str:
    file = io.StringIO()
    show(Console(file=file, width=width, force_terminal=terminal, color_system=None, legacy_windows=False), rows, wide=wide)
    return file.getvalue()


@pytest.mark.parametrize("name", list(TABLES))
def test_nothing_is_cut(name: str) -> None:
    rows = TABLES[name]
    for width, wide in itertools.product((60, 80, 110), (False, True)):
        shown = _shown(rows, width, wide)
        assert "…" not in shown
        assert all(len(line) <= width for line in shown.splitlines())
        text = _squeezed(shown)
        for row in rows.cells:
            for column, cell in zip(rows.columns, row, strict=True):
                if wide or not column.wide:
                    assert _squeezed(column.heading) in text and _squeezed(cell) in text


def _squeezed(text: str) -> str:
    """The text without white space, so that a value that goes on in the next line is whole."""
    return "".join(text.split())


def test_a_table_that_does_not_fit_says_that_it_has_more_columns() -> None:
    rows = Rows("runs", [Column("sync"), Column("steps/s"), Column("samples/s", wide=True)], [["bsp", "12.3", "123456"]])
    assert "samples/s" in _shown(rows, 60)
    narrow = _shown(rows, 24)
    assert "samples/s" not in narrow and "1 more with --wide" in narrow


def test_markup_in_a_value_is_shown_as_it_is() -> None:
    assert "r2sp[:r][,tune=true]" in _shown(Rows("specs", [Column("spec")], [["r2sp[:r][,tune=true]"]]), 60)


@pytest.mark.parametrize("name", list(TABLES))
def test_without_a_terminal_rows_are_tab_separated(name: str) -> None:
    rows = TABLES[name]
    title, headings, *lines = _shown(rows, 60, terminal=False).splitlines()
    assert title == f"# {rows.title}"
    assert headings.split("\t") == [column.heading for column in rows.columns]
    assert [line.split("\t") for line in lines] == [[" ".join(cell.split("\n")) for cell in row] for row in rows.cells]


def test_blocks_say_that_there_are_more_columns() -> None:
    rows = Rows("runs", [Column("sync"), Column("staleness"), Column("samples/s", wide=True)], [["dssp:3,15", "2.00", "7"]])
    assert _shown(rows, 18).splitlines() == ["runs", "sync: dssp:3,15", "  staleness: 2.00", "1 more with --wide"]


def test_lines_of_a_cell_stand_below_its_heading_in_a_block() -> None:
    rows = Rows("rows", [Column("row"), Column("expected")], [["dssp/table-1", "bsp: 1\nasp: 2"]])
    assert _shown(rows, 20).splitlines() == ["rows", "row: dssp/table-1", "  expected: ", "    bsp: 1", "    asp: 2"]
