"""The page of a simulation: a line and a bar for each discipline, in words and numbers, too."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fastps.job.specs import parse_policy
from fastps.lab.virtual.side_by_side import page_of
from fastps.simulation.simulate import Simulation, simulate
from tests.report.traces import assert_plotly_takes
from tests.support import commands


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Two disciplines, of which the second reported losses."""
    found = [simulate(parse_policy(sync), Simulation(workers=4, steps=50)).row for sync in ("bsp", "asp")]
    for row, losses in zip(found, ([], [(0.5, 2.0), (1.5, 0.25)]), strict=True):
        row |= {"loss_over_time": losses, "train_loss": losses[-1][1] if losses else None}
    return found


def test_each_discipline_has_its_colour_in_all_plots_and_its_numbers_in_the_tables(rows: list[dict[str, Any]]) -> None:
    page = page_of(rows, "4 workers")
    figures = {figure.name: figure for figure in page.figures}
    assert list(figures) == ["learning", "speed", "staleness"]
    [losses] = figures["learning"].spec["data"]
    assert (losses["name"], losses["x"], losses["y"]) == ("asp", [0.5, 1.5], [2.0, 0.25])
    stale = {line["name"]: line for line in figures["staleness"].spec["data"]}
    assert stale["asp"]["line"] == losses["line"] and sum(stale["asp"]["y"]) == pytest.approx(100, abs=0.1)
    assert (stale["bsp"]["x"], stale["bsp"]["y"]) == ([0.0], [100.0])
    [bars] = figures["speed"].spec["data"]
    assert bars["y"] == ["bsp", "asp"] and bars["marker"]["color"][1] == losses["line"]["color"]
    assert figures["speed"].table.rows[1][0] == "asp"  # type: ignore[union-attr]
    assert "asp ends best: 0.25" in figures["learning"].sentence


def test_accuracy_takes_the_place_of_losses_and_the_best_is_the_greatest(rows: list[dict[str, Any]]) -> None:
    trained = [
        row | {"accuracy_over_time": [(1.0, share)], "test_accuracy": share}
        for row, share in zip(rows, (0.9, 0.5), strict=True)
    ]
    learning = page_of(trained, "4 workers").figures[0]
    assert learning.title == "Accuracy over virtual time" and learning.sentence.startswith("bsp ends best: 90 %")
    assert [line["y"] for line in learning.spec["data"]] == [[90.0], [50.0]]


def test_a_loss_that_is_not_finite_is_a_gap_and_never_the_best(rows: list[dict[str, Any]]) -> None:
    diverged = rows[0] | {"loss_over_time": [(0.5, 2.0), (1.0, math.inf), (1.5, math.nan)], "train_loss": math.nan}
    learning = page_of([diverged, rows[1]], "4 workers").figures[0]
    assert learning.spec["data"][0]["y"] == [2.0, None, None] and learning.sentence.startswith("asp ends best: 0.25")
    assert page_of([diverged], "4 workers").figures[0].sentence == "No discipline ends with a finite loss."
    json.dumps(learning.spec, allow_nan=False)


def test_thousands_of_versions_become_a_line_of_few_points_that_goes_one_way(rows: list[dict[str, Any]]) -> None:
    many = rows[0] | {"staleness": [(100_000 + version, 1 + version % 2) for version in range(30_001)]}
    [line] = page_of([many], "4 workers").figures[-1].spec["data"]
    assert len(line["x"]) <= 400 and line["x"] == sorted(set(line["x"])) and line["x"][0] == 100_000
    assert line["y"][0] == pytest.approx(100 / 30_001, rel=0.02)


def test_without_losses_there_is_no_plot_of_them(rows: list[dict[str, Any]]) -> None:
    assert [figure.name for figure in page_of(rows[:1], "4 workers").figures] == ["speed", "staleness"]


def test_every_figure_is_one_that_plotly_takes(rows: list[dict[str, Any]]) -> None:
    assert_plotly_takes(page_of(rows, "4 workers").figures)


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    file = tmp_path / "page.html"
    commands.done("simulate", "--steps", "20", "--sync", "bsp,ssp:3", "--report", str(file))
    assert "x 20 steps in virtual time, seed 0: fastps</title>" in file.read_text()
