"""Every benchmark runs, checks its own result and writes the promised keys. Nothing is timed here."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import fastps
from fastps.bench.crew import Crew, CrewError
from fastps.bench.measure import BenchOptions, Spread, WrongResultError, check, interleaved
from fastps.bench.scheduler import SPECS
from fastps.errors import UsageError

SECONDS = {"seconds_median", "seconds_min", "seconds_max", "repeats"}
KEYS = {
    "kernels": {"name", "size", "backend", "bytes_per_s", "limit_share"} | SECONDS,
    "lane": {"name", "size", "backend", "ns_per_op", "limit_share"} | SECONDS,
    "scheduler": {"name", "size", "backend", "ns_per_op", "bound_ns"} | SECONDS,
    "step": {"name", "sync", "workers", "parameters", "ratio"} | SECONDS,
}


def _bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "fastps.cli", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_every_benchmark_runs_and_its_results_were_checked(tmp_path: Path) -> None:
    target = tmp_path / "rows.json"
    outcome = _bench("all", "--smoke", "--json", str(target), "--against", "limit,gloo,ddp,hogwild,handmade,mpi,ray")
    assert outcome.returncode == 0, outcome.stderr
    document = json.loads(target.read_text())
    assert (document["command"], set(document)) == ("bench all", {"command", "version", "machine", "rows"})
    rows = document["rows"]
    assert {row["bench"] for row in rows} == set(KEYS)
    for row in rows:
        if "missing" not in row:
            assert KEYS[row["bench"]] <= set(row), row
            assert row["checked"] is True
            assert 0 < row["seconds_min"] <= row["seconds_median"] <= row["seconds_max"]
    names = {bench: {row["name"] for row in rows if row["bench"] == bench} for bench in KEYS}
    assert names["kernels"] == {"sgd-momentum", "adam", "sum-4-sgd-momentum"}
    assert names["scheduler"] == set(SPECS)
    assert names["step"] == {"fastps", "limit", "gloo", "ddp", "hogwild", "handmade", "mpi", "ray"}
    assert {row["name"] for row in rows if "missing" in row} >= {"mpi", "ray"}
    assert "missing: ray" in outcome.stdout
    assert document["machine"]["cpu"] in outcome.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "expected one of kernels, lane, scheduler, step, all; found 'nothing'"),
        (["step", "--against", "gloo,spark"], "--against: expected some of"),
        (["step", "--workers", "two"], "--workers: expected whole numbers"),
        (["kernels", "--repeats", "0"], "--repeats: expected at least 1"),
    ],
)
def test_wrong_usage_is_one_sentence(arguments: list[str], message: str) -> None:
    outcome = _bench(*arguments)
    assert outcome.returncode == 2
    assert message in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_sides_take_turns() -> None:
    order: list[str] = []

    def side(name: str, seconds: float) -> float:
        order.append(name)
        return seconds

    spreads = interleaved({"a": lambda: side("a", 1.0), "b": lambda: side("b", len(order))}, 3)
    assert order == ["a", "b"] * 3
    assert spreads["b"].row() == {"seconds_median": 3, "seconds_min": 1, "seconds_max": 5, "repeats": 3}
    assert Spread((3.0, 1.0, 2.0)).median == 2.0


def test_a_wrong_result_is_no_figure() -> None:
    with pytest.raises(WrongResultError, match="expected weights of 1, found 2"):
        check(False, "weights of 1", 2)
    with pytest.raises(UsageError, match="--against"):
        BenchOptions(against=("spark",))


def test_a_crew_answers_and_names_the_member_that_fails() -> None:
    def begin(rank: int) -> Callable[[int], int]:
        def answer(order: int) -> int:
            if order == 3 and rank == 1:
                raise ValueError("three is too many")
            return order * 10 + rank

        return answer

    with Crew(2, begin) as crew:
        assert crew.call(1) == [10, 11]
    with pytest.raises(CrewError, match=r"member 1 .* three is too many"), Crew(2, begin) as crew:
        crew.call(3)


def test_exposed_gradients_are_the_slot_and_are_pushed() -> None:
    weights = torch.zeros(5, requires_grad=True)
    with fastps.DistributedOptimizer(torch.optim.SGD([weights], lr=0.5)) as optimizer:
        for value in (1.0, 2.0, 3.0):
            optimizer.zero_grad()
            optimizer.expose_gradients()
            assert weights.grad is not None
            weights.grad.fill_(value)
            optimizer.step()
        np.testing.assert_array_equal(weights.detach().numpy(), np.full(5, -3.0, np.float32))
