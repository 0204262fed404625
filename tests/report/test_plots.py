"""The plots: what each says of traces with known facts, and that plotly takes every one of them."""

import json
import re
import signal
from typing import Any

import numpy as np
import pytest

from fastps.advice.advise import advise
from fastps.report import plots
from fastps.report.figure import Figure, paired
from fastps.report.findings import Facts, facts_of, findings_of
from fastps.report.timeline import timeline
from fastps.tracing.file import Trace
from tests.report.traces import BEGIN, MS, asp, assert_plotly_takes, bsp, with_end


def _facts(trace: Trace) -> Facts:
    return facts_of(trace, advise(trace) if trace.workers > 1 else ())


def _all(facts: Facts) -> list[Figure]:
    made = [plots.time_of_workers(facts), plots.waits(facts), plots.steps(facts), plots.store(facts)]
    made += [plots.staleness(facts), plots.staleness_by_worker(facts), plots.gaps(facts), plots.disciplines(facts)]
    return [timeline(facts, findings_of(facts)), *(each for each in made if each is not None)]


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    killed = with_end(bsp([10, 30, 10], 60, {2: 20}), 2, -signal.SIGKILL, BEGIN + 700 * MS)
    return {"killed": killed, "asp": asp([10, 10, 30], 60), "one": asp([10], 60), "many": bsp([5.0] * 40, 8)}


@pytest.mark.parametrize("name", ["killed", "asp", "one", "many"])
def test_every_figure_is_one_that_plotly_takes_and_json_holds(name: str, traces: dict[str, Trace]) -> None:
    figures = _all(_facts(traces[name]))
    assert_plotly_takes(figures)
    for figure in figures:
        assert figure.description and figure.title and figure.sentence and figure.height >= 150, figure.name


def test_colours_are_names_that_the_style_defines(traces: dict[str, Trace]) -> None:
    from importlib.resources import files

    style = (files("fastps.report") / "page.css").read_text()
    defined = set(re.findall(r"(--[\w-]+):", style))
    used = {name for trace in traces.values() for each in _all(_facts(trace)) for name in _names(each)}
    used |= set(re.findall(r"var\((--[\w-]+)\)", style + (files("fastps.report") / "page.js").read_text()))
    assert "--compute" in used
    assert used - defined == set()


def _names(figure: Figure) -> set[str]:
    return set(re.findall(r"var\((--[\w-]+)\)", json.dumps(figure.spec)))


def test_the_matrix_names_the_worker_that_others_wait_for(traces: dict[str, Trace]) -> None:
    figure = plots.waits(_facts(traces["killed"]))
    assert figure is not None and figure.table is not None
    assert re.fullmatch(r"Of [\d.]+ s of waiting, [\d.]+ s was for worker 1\.", figure.sentence)
    (spec,) = figure.spec["data"]
    assert np.array(spec["z"]).argmax() % 4 == 1
    assert [row[0] for row in figure.table.rows] == ["worker 0", "worker 1", "worker 2"]


def test_one_worker_has_no_matrix_no_staleness_and_no_other_discipline(traces: dict[str, Trace]) -> None:
    names = {figure.name for figure in _all(_facts(traces["one"]))}
    assert names == {"timeline", "time", "steps", "store", "gaps"}


def test_staleness_is_drawn_where_there_is_some(traces: dict[str, Trace]) -> None:
    assert plots.staleness(_facts(traces["killed"])) is None, "bsp"
    figure = plots.staleness(_facts(traces["asp"]))
    assert figure is not None and len(figure.spec["data"]) == 2
    by_worker = plots.staleness_by_worker(_facts(traces["asp"]))
    assert by_worker is not None and by_worker.sentence.startswith("Worker 2's pushes are the stalest")


def test_the_slowest_box_stands_out(traces: dict[str, Trace]) -> None:
    figure = plots.steps(_facts(traces["killed"]))
    assert [box["marker"]["color"] for box in figure.spec["data"]] == ["var(--compute)", "var(--wait)", "var(--compute)"]
    assert figure.sentence.endswith("the slowest worker takes 3.0 times the fastest.")


def test_the_run_and_the_recommendation_are_among_the_disciplines(traces: dict[str, Trace]) -> None:
    figure = plots.disciplines(_facts(traces["killed"]))
    assert figure is not None and figure.table is not None
    labels: list[Any] = figure.spec["data"][0]["y"]
    assert "<b>bsp</b> (this run)" in labels and any(label.endswith("✓") for label in labels)
    assert [row[0] for row in figure.table.rows if row[0].endswith("(this run)")] == ["bsp (this run)"]
    assert "Limit of the cores: " in figure.description


def test_figures_of_a_row_are_of_one_height_and_the_last_may_be_alone() -> None:
    def figure(height: int, is_wide: bool = False) -> Figure:
        return Figure("name", "title", "sentence", "description", {}, height, is_wide=is_wide)

    found = paired([figure(300, True), figure(200), figure(400, True), figure(250), figure(180)])
    expected = [(300, True), (250, False), (400, True), (250, False), (180, True)]
    assert [(each.height, each.is_wide) for each in found] == expected
