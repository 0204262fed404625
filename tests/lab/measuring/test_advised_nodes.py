"""Advice for many nodes from the traces of a few: the times of nodes by hand, the ranking, and the command."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastps.errors import UsageError
from fastps.lab.measuring.advised_nodes import advise_nodes, model_of, node_step_ns, self_test, simulation_of_nodes
from fastps.lab.measuring.simulated_links import MeasuredEdge, MeasuredHome, MeasuredLinks
from fastps.system.json_report import write_json
from fastps.tracing.file import PUSH_DTYPE, STEP_DTYPE, Trace, write
from tests.report.traces import header
from tests.support import commands

MS = 1_000_000
RATE = 100e6


def _links(edges: int = 1, home: MeasuredHome | None = None) -> MeasuredLinks:
    return MeasuredLinks((MeasuredEdge(RATE, RATE, RATE, RATE, 0, round(2e14 / RATE)),) * edges, home)


def _trace(*workers: list[int], parameters: int = 250_000, waits_ms: int = 10) -> Trace:
    """A node whose workers compute for these ms in each step, and then wait for each other and `waits_ms` more."""
    steps, begin = [], 0
    for number, times in enumerate(zip(*workers, strict=True)):
        end = begin + (max(times) + waits_ms) * MS
        for worker, took in enumerate(times):
            step = np.zeros(1, STEP_DTYPE)
            step["begin_ns"], step["computed_ns"], step["end_ns"] = begin, begin + took * MS, end
            step["worker"], step["step"], step["samples"], step["written"] = worker, number, 16, 1
            steps.append(step)
        begin = end
    lines = np.concatenate(steps)
    return Trace(
        header("bsp", len(workers), parameters=parameters),
        lines[np.argsort(lines["worker"], kind="stable")],
        np.zeros(0, PUSH_DTYPE),
    )


def test_a_node_is_as_slow_as_its_slowest_worker() -> None:
    trace = _trace([90, 10, 20, 30, 10], [80, 20, 10, 10, 40])
    assert (node_step_ns(trace) // MS).tolist() == [20, 20, 30, 40], "the first step is left out"
    assert (node_step_ns(trace, sum_bytes_s=1e9) // MS).tolist() == [22, 22, 32, 42], "two sums of 1 MB"
    assert (node_step_ns(_trace([90, 10, 20, 30]), sum_bytes_s=1e9) // MS).tolist() == [10, 20, 30], "one push is no sum"


def test_traces_repeat_from_other_steps_on() -> None:
    times = [100, *range(1, 9)]
    simulation = simulation_of_nodes([_trace(times), _trace([50] * 9)], 4, _links())
    replay = [[each // MS for each in list_] for list_ in simulation.compute.replay]
    assert replay[0] == list(range(1, 9))
    assert sorted(replay[2]) == replay[0] != replay[2]
    assert replay[1] == replay[3] == [50] * 8
    assert simulation.batch == 16


def test_two_equal_nodes_predict_what_one_would_work_out() -> None:
    """bsp: 100 ms of computing, and twice half a model of 10 ms; with 11 nodes twice 10/11. Shards need a home."""
    traces = [_trace([100] * 10), _trace([100] * 10)]
    for sync, nodes, step_s in (("bsp", 2, 0.11), ("bsp", 11, 0.118), ("bsp,shards=2", 11, 0.3)):
        (row,) = advise_nodes(traces, _links(), model_of(traces, nodes), [sync])
        assert nodes / row["steps_per_s"] == pytest.approx(step_s, rel=0.02)


def test_a_slow_node_makes_advice_leave_bsp() -> None:
    traces = [_trace([50] * 20), _trace([200] * 20)]
    rows = advise_nodes(traces, _links(2, MeasuredHome(4e9, 8e9)), model_of(traces, 3))
    found = {row["sync"]: row for row in rows}
    assert found["asp"]["useful_steps_per_s"] > 1.5 * found["bsp"]["useful_steps_per_s"]
    assert [row["rank"] for row in rows] == list(range(1, len(rows) + 1))
    (recommended,) = [row for row in rows if row["recommended"]]
    assert recommended["sync"] != "bsp" and recommended["reason"]


def test_the_recorded_nodes_are_predicted_themselves() -> None:
    """The traces' steps take 100 ms and 10 ms of waiting, which is what two nodes take on this link."""
    traces = [_trace([100] * 40, waits_ms=10), _trace([100] * 40, waits_ms=10)]
    test = self_test(traces, _links(), model_of(traces, 64))
    assert test is not None
    assert test["measured"] == pytest.approx(2 / 0.11)
    assert test["error"] == pytest.approx(0, abs=0.02)
    assert self_test(traces[:1], _links(), model_of(traces[:1], 64)) is None


def test_traces_that_do_not_fit_are_refused() -> None:
    short, other = _trace([10] * 3), _trace([10] * 9, parameters=7)
    with pytest.raises(UsageError, match="at least 4 steps of every worker, found 3"):
        node_step_ns(short)
    with pytest.raises(UsageError, match="expected traces of one model, found 7 and 250000 parameters"):
        model_of([short, other], 2)
    merged = replace(other, header={**other.header, "of_nodes": [{"node": 0}, {"node": 1}]})
    with pytest.raises(UsageError, match="merged from several"):
        model_of([merged], 4)
    with pytest.raises(UsageError, match="--nodes: expected at least 3, one for each trace, found 2"):
        simulation_of_nodes([other] * 3, 2, _links())


@pytest.mark.slow
def test_the_command_ranks_disciplines_on_64_nodes(tmp_path: Path) -> None:
    files = [str(tmp_path / f"{node}.trace") for node in range(2)]
    for node, file in enumerate(files):
        write(_trace([50 + 50 * node] * 20), Path(file))
    edge = _links().edges[0]
    links = tmp_path / "links.json"
    row = {"kind": "link", "node": 1, **vars(edge), "round_trip_ns": 1000}
    write_json("doctor", [row], str(links))
    options = ["--links", str(links), "--nodes", "64", "--sync", "bsp,asp,ssp:3"]
    rows = commands.rows("advise", *files, *options)
    assert [row["rank"] for row in rows if row["kind"] == "prediction"] == [1, 2, 3]
    assert rows[-1]["kind"] == "self-test"
    shown = commands.fastps("advise", *files, *options)
    assert "predicted for 64 nodes on 1 measured links" in shown.stdout + shown.stderr
    assert "recommended: --sync" in shown.stdout
    assert "or --links with one trace for each node" in commands.refused("advise", *files)
