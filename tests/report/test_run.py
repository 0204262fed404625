"""The page about a run: its parts, and its answers to traces that say little or nothing."""

import time
from pathlib import Path
from typing import Any

import pytest

from fastps.errors import UsageError
from fastps.report.page import write as write_page
from fastps.report.run import page_of, result_of
from fastps.tracing.file import TraceError, read, write
from fastps.tracing.merging import merge_nodes
from tests.report.traces import asp, assert_plotly_takes, bsp
from tests.support import commands
from tests.tracing.test_merging import Clocks, _pair
from tests.tracing.test_trace import SPECS, recorded


def test_a_page_says_what_ran_and_shows_the_plots_of_it() -> None:
    page = page_of(asp([5, 5, 15], 60), "run.trace", {"test_accuracy": 0.954})
    assert page.heading.startswith("asp, 3 workers, ") and "run.trace · job job · fastps 0 · Python 3.11" in page.what
    facts = {fact.name: fact.value for fact in page.facts}
    assert facts["steps"] == "180" and facts["test accuracy"] == "95.4%" and facts["dropped"] == "0"
    assert page.figures[0].name == "timeline" and page.figures[-1].name == "disciplines"
    assert [part.name for part in page.tables] == ["workers", "log"]
    assert page.findings[0].kind == "straggler" and page.notes, "notes are apart from what a reader should see first"


def test_a_run_without_trouble_shows_what_would_speed_it_up_at_the_top() -> None:
    page = page_of(bsp([5, 5], 60), "run.trace")
    assert page.findings[0].kind == "nothing"
    assert {each.kind for each in page.findings[1:]} & {"advice", "limit"}


def test_nodes_have_their_clocks_and_their_messages() -> None:
    page = page_of(merge_nodes(_pair(Clocks(10**9, 0))), "run.node0.trace")
    parts = {part.name: part for part in page.tables}
    assert parts["nodes"].table is not None and parts["nodes"].table.rows[1][3] == "-999.900"
    assert parts["messages"].table is not None
    assert {row[1] for row in parts["messages"].table.rows} == {"send push", "post push", "send weights", "take weights"}
    assert any("No other discipline was replayed: a trace of several nodes" in each for each in parts["log"].sentences)


def test_a_short_trace_has_a_page_without_a_replay() -> None:
    page = page_of(bsp([5, 5], 3), "run.trace")
    assert "disciplines" not in {figure.name for figure in page.figures}
    assert any("record longer" in sentence for part in page.tables for sentence in part.sentences)


def test_a_trace_of_one_step_has_a_page() -> None:
    assert page_of(asp([5], 1), "run.trace").figures


def test_a_trace_without_steps_is_one_sentence() -> None:
    trace = bsp([5], 3)
    with pytest.raises(TraceError, match=r"expected a trace with steps, found none in run\.trace: record until"):
        page_of(type(trace)(trace.header, trace.steps[:0], trace.pushes[:0]), "run.trace")


def test_the_row_of_a_run_is_found_by_its_discipline() -> None:
    rows: list[Any] = [{"sync": "bsp", "test_accuracy": 0.5}, {"sync": "asp", "test_accuracy": 0.9}]
    assert result_of(rows, "asp")["test_accuracy"] == 0.9
    with pytest.raises(UsageError, match="expected the row of ssp:3"):
        result_of(rows, "ssp:3")


@pytest.mark.slow
def test_the_command_refuses_what_is_no_trace_and_other_suffixes_in_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    empty, whole = tmp_path / "empty.trace", tmp_path / "whole.trace"
    empty.write_bytes(b"")
    write(bsp([5, 5], 30), whole)
    cut = tmp_path / "cut.trace"
    cut.write_bytes(whole.read_bytes()[:3000])
    for arguments, words in (
        ((str(empty),), "expected a trace that --trace wrote"),
        ((str(cut),), "is damaged or from another version of fastps"),
        ((str(whole), "-o", str(tmp_path / "page.md")), "expected a file whose name ends with .html"),
        ((str(whole), "--result", str(cut)), "expected what fastps train --json wrote"),
    ):
        assert words in commands.refused("report", *arguments)
    assert "nothing" in [row.get("kind") for row in commands.rows("report", str(whole))]
    assert whole.with_suffix(".html").stat().st_size > 4_000_000 and read(whole)


@pytest.mark.slow
@pytest.mark.parametrize("sync", [*SPECS, "bsp,shards=2"])
def test_a_recorded_run_of_every_discipline_has_a_page_whose_figures_plotly_takes(sync: str, tmp_path: Path) -> None:
    trace = recorded(tmp_path / "run.trace", sync, delay_s=0.02)  # a busy machine makes every sleep longer by less than that
    page = page_of(trace, "run.trace")
    assert_plotly_takes(page.figures)
    found = {each.kind: each for each in (*page.findings, *page.notes)}
    assert found["straggler"].worker == 0, "it takes three times as long"
    assert "push-log" not in found and "killed" not in found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("workers", [4, 64])
def test_a_million_steps_make_a_page_of_bounded_size(workers: int, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    from plotly.offline import get_plotlyjs

    trace = asp([5.0] * (workers - 1) + [15.0], 1_000_000 // workers)
    began_s = time.process_time()
    made = page_of(trace, "run.trace")
    write_page(made, tmp_path / "run.html")
    spent_s, size = time.process_time() - began_s, (tmp_path / "run.html").stat().st_size
    print(f"{workers} workers, {len(trace.steps):,} steps: {spent_s:.1f} s of processor time, {size / 1e6:.1f} MB")
    assert size - len(get_plotlyjs().encode()) < 1_000_000
    assert "too many to draw each" in made.figures[0].sentence
    assert made.findings[0].worker == workers - 1
