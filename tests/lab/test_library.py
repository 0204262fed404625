"""The library: simulations, comparisons, recorded runs and reports for programs, with the rows of the commands."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps
from fastps.tracing.file import write
from tests.report.traces import asp
from tests.support import commands, example_programs


def test_a_simulation_is_that_of_the_command() -> None:
    rows = fastps.simulate("bsp,ssp:3", workers=8, steps=50, seed=3, straggler=["0:3"], compute="normal:20ms,2ms", batch=8)
    arguments = ("--sync", "bsp,ssp:3", "-n", "8", "--steps", "50", "--seed", "3", "--straggler", "0:3")
    shown = commands.rows("simulate", *arguments, "--compute", "normal:20ms,2ms", "--batch-size", "8")
    measured = {"wall_seconds": 0, "events_per_s": 0}
    for row, other in zip(rows, shown, strict=True):
        assert {**json.loads(json.dumps(row)), **measured} == {**other, **measured}


@pytest.mark.parametrize(("call", "said"), [
    (lambda: fastps.simulate("bsp", stragler=["0:3"]), "simulate: expected options of fastps simulate, found 'stragler'"),
    (lambda: fastps.simulate("bsp", compute="10"), "compute"),
    (lambda: fastps.compare("bsp", epoch=3), "compare: expected options of fastps train, found 'epoch'"),
    (lambda: fastps.compare("bsp", runs=0), "expected 1 run or more and a seed or more, found 0 and 1"),
    (lambda: fastps.compare("bsp", script="x.py", seeds=[1]), "found seeds beside it"),
    (lambda: fastps.compare("bsp", script="no.py"), "expected a script, found no file 'no.py'"),
    (lambda: fastps.read_trace(), "expected a file that --trace wrote, or one of each node, found none"),
    (lambda: fastps.write_report([{}], "x.html"), "what read_trace, compare or simulate returns, found something else"),
])  # fmt: skip
def test_wrong_arguments_are_usage_errors(call: Any, said: str) -> None:
    with pytest.raises(fastps.UsageError, match=said):
        call()


def test_a_recorded_run_is_columns_and_the_rows_of_the_command(tmp_path: Path) -> None:
    trace, file = asp([5, 5, 15], 60), tmp_path / "run.trace"
    write(trace, file)
    found = fastps.read_trace(file)
    assert found.header["sync"] == "asp" and len(found.steps["worker"]) == 180
    assert (found.steps["computed_ns"] > found.steps["begin_ns"]).all() and "written" not in found.steps
    assert set(found.pushes["outcome"]) == {"folded"} and found.pushes["staleness"].dtype == np.int32
    shown = commands.rows("trace", str(file))
    assert {**shown[0], **found.summary} == shown[0]
    assert [{**row, **own} == row for row, own in zip(shown[1:4], found.workers, strict=True)] == [True] * 3
    with pytest.raises(fastps.Error, match="expected a trace that --trace wrote, found another file"):
        (tmp_path / "other").write_text("nothing" * 10)
        fastps.read_trace(tmp_path / "other")


def test_reports_are_pages_about_any_of_these(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    write(asp([5, 15], 60), tmp_path / "run.trace")
    for number, found in enumerate([fastps.read_trace(tmp_path / "run.trace"), fastps.simulate("bsp,asp", steps=20)]):
        fastps.write_report(found, tmp_path / f"{number}.html", "a title")
        assert "a title" in (tmp_path / f"{number}.html").read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)  # five launches, each of which imports torch
def test_disciplines_are_compared_on_a_network_and_on_a_script() -> None:
    rows = fastps.compare("bsp,asp", workers=2, runs=2, data="digits", epochs=1)
    assert [(row["sync"], row["runs"]) for row in rows] == [("bsp", 2), ("asp", 2)]
    (row,) = fastps.compare("asp", workers=2, script=[str(example_programs.EXAMPLES / "train.py")])
    assert row["sync"] == "asp" and row["steps"] == 200


@pytest.mark.slow
def test_dir_shows_what_a_script_needs() -> None:
    code = "import fastps; print(*dir(fastps)); print(fastps.simulate.__module__, fastps.SGD(lr=1.0).rule.name)"
    names, used = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    shown = set(names.split())
    assert {"DistributedOptimizer", "shard", "rank", "compare", "read_trace", "SSP", "UsageError"} <= shown
    assert not shown & {"Any", "importlib", "errors", "get_data", "SGD", "kernels"} and used == "fastps.lab.library sgd"
    assert shown - {"__doc__"} <= set(fastps.__all__)
