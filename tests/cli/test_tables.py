"""Tables at 60, 80 and 110 columns: no header and no value is cut; without a terminal rows are tab-separated."""

import io

import pytest
from rich.console import Console

from fastps.cli.report import training_table
from fastps.cli.simulation_report import simulation_table
from fastps.cli.tables import Column, Rows, show
from fastps.cli.trace_report import advice_table, worker_table

TIMES = ("compute_ms_mean", "compute_ms_median", "compute_ms_p95", "cpu_ms_mean", "queue_ms_mean", "blocked_ms_mean")
ANY = {
    **dict.fromkeys((*TIMES, "store_cpu_ms_mean", "transfer_ms_mean"), 132.456),
    **dict.fromkeys(("steps_per_s", "samples_per_s", "useful_steps_per_s", "updates_per_s"), 123456.7),
    **dict.fromkeys(("wait_share", "grant_wait_share", "zero_gap_share", "link_share_max", "server_share_max"), 0.777),
    **{"worker": 12, "workers": 128, "steps": 100000, "seconds": 1234.5, "staleness_mean": 12.34, "staleness_max": 1234},
    **{"sync": "dssp:3,15,release=printed", "dropped": 98765, "test_accuracy": 0.987, "speed": 1.0, "dropped_share": 0.5},
    "recommended": True,
}
TABLES = {
    "train": training_table([ANY], "mnist5k", ANY),
    "simulate": simulation_table([ANY], "virtual"),
    "trace": worker_table([ANY], "mean ms of a step"),
    "advise": advice_table([ANY], "predicted"),
}


def _shown(rows: Rows, width: int, wide: bool = False, terminal: bool = True) -> str:
    file = io.StringIO()
    show(Console(file=file, width=width, force_terminal=terminal, color_system=None, legacy_windows=False), rows, wide=wide)
    return file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 110])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", list(TABLES))
def test_nothing_is_cut(name: str, wide: bool, width: int) -> None:
    rows = TABLES[name]
    shown = _shown(rows, width, wide)
    assert "…" not in shown
    assert all(len(line) <= width for line in shown.splitlines())
    for column, cell in zip(rows.columns, rows.cells[0], strict=True):
        if wide or not column.wide:
            assert column.heading in shown and cell in shown


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
    assert [line.split("\t") for line in lines] == [list(row) for row in rows.cells]
