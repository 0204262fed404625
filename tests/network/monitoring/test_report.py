"""The report of an agent: node 0 shows what every node of a real job does, and the other nodes show themselves."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fastps
from fastps.cli import top
from tests.support import nodes, processes

FLOATS = 40_000


def _train(rank: int, folder: Path, sync: str, instance: str) -> None:
    """Train until a file appears; node 2 makes each step late."""
    weight = torch.nn.Parameter(torch.zeros(FLOATS))
    with fastps.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), sync=sync, timeout_s=60) as optimizer:
        (folder / f"job-{rank}").write_text(optimizer.worker.store.job)
        steps = 0
        while not (folder / "end").exists():
            weight.grad = torch.ones(FLOATS)
            optimizer.step()
            steps += 1
            if steps == 5:
                (folder / "ready" / str(rank)).touch()
            time.sleep(0.05 if instance == "slow" and rank == 3 else 0.01)
        optimizer.wait_for_others()


def _look(folder: Path, rank: int, interval_s: float) -> tuple[fastps.Look, list[dict[str, Any]]]:
    observer = fastps.observe((folder / f"job-{rank}").read_text())
    before = observer.look()
    time.sleep(interval_s)
    now = observer.look()
    observer.close()
    return now, [row for row in top.rows_of(before, now) if row["kind"] == "node"]


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["asp", "bsp"])
def test_node_0_shows_every_node(sync: str, tmp_path: Path) -> None:
    (tmp_path / "ready").mkdir()
    with nodes.rendezvous() as port:
        children = nodes.start((2, 1, 1), port, lambda rank: _train(rank, tmp_path, sync, "slow"))
        try:
            nodes.await_files(tmp_path / "ready", 4)
            time.sleep(1.5)  # three beats
            look, rows = _look(tmp_path, 0, 2.0)
            other, _ = _look(tmp_path, 2, 0.0)
        finally:
            (tmp_path / "end").touch()
            processes.results(children, 60)
    assert [(row.node, row.state, row.workers) for row in look.nodes] == [(0, "live", 2), (1, "live", 1), (2, "live", 1)]
    assert [row.host for row in look.nodes] == [os.uname().nodename] * 3
    assert all(row.pushes >= 5 and row.steps >= 5 and row.folded >= 5 for row in look.nodes)
    _check_clocks(look.nodes)
    _check_rates(rows, sync)
    assert [(row.node, row.pushes, row.lag) for row in other.nodes] == [(1, -1, -1)]
    _check_clocks([look.nodes[0], *other.nodes])


def _check_clocks(rows: list[fastps.NodeStatistics]) -> None:
    """All nodes are on this machine, so the true offset is 0."""
    assert (rows[0].clock_offset_ns, rows[0].clock_error_ns, rows[0].round_trip_ns) == (0, 0, -1)
    for row in rows[1:]:
        assert abs(row.clock_offset_ns) <= row.clock_error_ns < 1e9
        assert 0 <= row.round_trip_ns < 1e9


def _check_rates(rows: list[dict[str, Any]], sync: str) -> None:
    first, second, third = rows
    assert all(row["kind"] == "node" and row["steps_per_s"] > 1 for row in rows)
    assert all(0 <= row["wait_share"] <= 1 for row in rows)
    if sync == "asp":
        assert second["steps_per_s"] > 1.5 * third["steps_per_s"], "node 2 is slow"
        assert third["lag"] > second["lag"] >= 0
        assert min(first["lag"], second["lag"]) == 0
    model = 4 * FLOATS
    for row in rows[1:]:
        a_step = model if sync == "asp" else model * 4 / 3  # a sum over three nodes, and back
        expected = row["steps_per_s"] * a_step
        assert 0.6 * expected < row["sent_bytes_s"] < 1.6 * expected + 20_000
        assert 0.6 * expected < row["received_bytes_s"] < 1.6 * expected + 20_000
    sent = sum(row["sent_bytes"] for row in rows)
    assert sum(row["received_bytes"] for row in rows) == pytest.approx(sent, rel=0.2)
