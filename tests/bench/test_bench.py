"""Every benchmark runs, checks its own result and writes the promised keys. Nothing is timed here."""

import importlib.util
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import fastps
from fastps.bench import mpi, readers
from fastps.bench.crew import CrewError, ForkedCrew
from fastps.bench.measure import BenchOptions, Spread, WrongResultError, check, interleaved
from fastps.bench.peers import Job
from fastps.bench.scheduler import SPECS
from fastps.errors import UsageError
from tests.support import commands, processes
from tests.support.scripts import output

SECONDS = {"seconds_median", "seconds_min", "seconds_max", "repeats"}
KEYS = {
    "kernels": {"name", "size", "backend", "bytes_per_s", "limit_share"} | SECONDS,
    "lane": {"name", "size", "backend", "ns_per_op", "limit_share"} | SECONDS,
    "scheduler": {"name", "size", "backend", "ns_per_op", "bound_ns"} | SECONDS,
    "sim": {"name", "size", "backend", "ns_per_op", "events_per_s", "bound_ns"} | SECONDS,
    "step": {"name", "sync", "workers", "parameters", "ratio"} | SECONDS,
    "rows": {"name", "sync", "optimizer", "workers", "parameters", "batch_size", "ratio"} | SECONDS,
    "readers": {"name", "readers", "workers", "parameters", "updates", "ratio", "ratio_min", "ratio_max", "cpu_ratio"}
    | {"readers_cpu_seconds"}
    | SECONDS,
    "weight transport": {"name", "parameters", "seconds_from_sight", "seconds_from_publish", "ratio", "mixed_looks", "looks"}
    | SECONDS,
    "publish": {"name", "parameters", "ratio"} | SECONDS,
    "collectives": {"name", "kind", "workers", "parameters", "ratio", "ratio_min", "ratio_max"} | SECONDS,
    "train": {"name", "sync", "model", "workers", "parameters", "steps_per_s", "ratio", "loss_first", "loss_last"} | SECONDS,
    "optimizer": {"name", "sync", "workers", "parameters", "ratio", "tail_ratio", "bytes", "bytes_ratio"} | SECONDS,
    "memory": {"name", "sync", "optimizer", "workers", "parameters", "bytes", "floor_bytes", "ratio", "floor_ratio"},
}


def _checked_document(command: str, *arguments: str, target: Path) -> tuple[dict[str, Any], str]:
    """The JSON and the text of a smoke run, after a look at the keys and values of each measured row."""
    outcome = commands.done("bench", command, "--smoke", "--json", str(target), *arguments)
    document = json.loads(target.read_text())
    assert (document["command"], set(document)) == (f"bench {command}", {"command", "version", "machine", "rows"})
    for row in document["rows"]:
        if "missing" not in row:
            assert KEYS[row["bench"]] <= set(row), row
            assert row["checked"] is True
            if not KEYS[row["bench"]] >= SECONDS:
                continue
            assert 0 < row["seconds_min"] <= row["seconds_median"] <= row["seconds_max"]
    return document, outcome.stdout


@pytest.mark.slow
def test_the_benchmarks_of_single_kernels_run() -> None:
    """pytest-benchmark's, each once: timing is switched off."""
    folder = Path(__file__).parents[1]
    options = ["-p", "pytest_benchmark.plugin", "--benchmark-disable", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, str(folder / "kernels/update/benchmark_kernels.py")]
    assert "45 passed" in output(command, cwd=folder.parent)


@pytest.mark.slow
def test_every_benchmark_runs_and_its_results_were_checked(tmp_path: Path) -> None:
    document, text = _checked_document("all", target=tmp_path / "rows.json")
    rows = document["rows"]
    names = {bench: {row["name"] for row in rows if row["bench"] == bench} for bench in KEYS}
    assert names["kernels"] == {"sgd-momentum", "adam", "sum-4-sgd-momentum"}
    assert names["scheduler"] == set(SPECS)
    assert names["sim"] > set(SPECS)
    assert names["step"] == {"fastps", "limit", "gloo", "ddp", "hogwild", "handmade", "handmade-parts"}
    assert names["train"] == {"fastps", "ddp", "hogwild", "single"}
    assert {(row["name"], row["optimizer"]) for row in rows if row["bench"] == "rows"} == {
        *((name, optimizer) for name in ("fastps", "hogwild") for optimizer in ("sgd", "sparse-adam")),
        ("fastps", "push"),
        ("loop", "push"),
    }
    assert names["optimizer"] == {"fastps", "ddp"}
    assert names["memory"] == {"fastps", "ddp", "hogwild", "single"}
    assert all(row["bytes"] > row["workers"] * 10_000_000 for row in rows if row["bench"] == "memory")
    assert names["readers"] == {"none", "wait", "no pause", "only busy", "no pause, idle", "stopped", *readers._EVALUATORS}
    assert names["collectives"] == {"fastps", "limit", "gloo"}
    assert names["weight transport"] == {"fastps", "fastps, wait()", "publisher", "lock, two copies", "in place"}
    assert names["publish"] == {"publish", "copy"}
    trained = [row for row in rows if row["bench"] == "train"]
    assert {row["model"] for row in trained} == {"cnn", "mlp"}
    assert all(row["loss_last"] < row["loss_first"] for row in trained)
    assert {row["sync"] for row in trained if row["name"] == "fastps"} == {"bsp", "dssp:3,15"}
    assert document["machine"]["cpu"] in text


@pytest.mark.slow
def test_peers_are_measured_or_missing_with_a_reason(tmp_path: Path) -> None:
    document, text = _checked_document("step", "--against", "mpi,rpc,ray", target=tmp_path / "rows.json")
    assert {row["name"] for row in document["rows"]} == {"fastps", "mpi", "rpc", "ray"}
    missing = {row["name"]: row["missing"] for row in document["rows"] if "missing" in row}
    assert set(missing) == {"ray"} | ({"mpi"} if mpi.missing_reason() else set())
    for name in missing:
        assert f"missing: {name} (" in text


@pytest.mark.slow
def test_a_step_of_one_discipline_is_measured_alone(tmp_path: Path) -> None:
    document, _ = _checked_document("step", "--sync", "asp", "--against", "limit", target=tmp_path / "rows.json")
    assert {(row["name"], row["sync"]) for row in document["rows"]} == {("fastps", "asp"), ("limit", "bsp")}


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["rpc", "ray"])
def test_a_training_beside_a_parameter_server_gives_the_same_weights_or_a_reason(tmp_path: Path, peer: str) -> None:
    document, text = _checked_document("train", "--against", peer, target=tmp_path / "rows.json")
    assert {row["name"] for row in document["rows"]} == {"fastps", "single", peer}
    if all("missing" in row for row in document["rows"] if row["name"] == peer):
        assert peer == "ray" and importlib.util.find_spec("ray") is None and "missing: ray (ray is not installed" in text


def test_sides_combine() -> None:
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

    with ForkedCrew(2, begin) as crew:
        assert crew.call(1) == [10, 11]
    with pytest.raises(CrewError, match=r"member 1 .* three is too many"), ForkedCrew(2, begin) as crew:
        crew.call(3)


def test_a_paused_crew_uses_no_processor_between_orders() -> None:
    def begin(rank: int) -> Callable[[str], float]:
        threading.Thread(target=_spin, daemon=True).start()
        return lambda order: time.process_time()

    others = psutil.Process().children()  # multiprocessing's resource tracker, if an earlier test has begun it
    with ForkedCrew(2, begin, paused=True) as crew:
        assert len(crew.call("look")) == 2
        children = [child for child in psutil.Process().children() if child not in others]
        for child in children:
            processes.await_stop(child.pid)
        before = [sum(child.cpu_times()[:2]) for child in children]
        time.sleep(0.3)
        assert [sum(child.cpu_times()[:2]) for child in children] == before
        assert len(crew.call("look")) == 2


def _spin() -> None:
    while True:
        pass


needs_mpi = pytest.mark.skipif(mpi.missing_reason() is not None, reason=str(mpi.missing_reason()))


@pytest.mark.slow
@needs_mpi
def test_members_that_mpiexec_starts_obey_and_end_with_the_crew(tmp_path: Path) -> None:
    with pytest.raises(CrewError, match=r"member . .* failed: TypeError"):
        with mpi.LaunchedCrew(Job("mpi", 2, 100, str(tmp_path)), 100) as crew:
            for began_ns, ended_ns in crew.call(2):
                assert began_ns < ended_ns
            lowest, highest = crew.call(0)[1]
            assert lowest == highest == pytest.approx(1 - 0.01 * 1.5 * (1 + 1.9 + 2.71))
            crew.call("two steps")
    names = [process.name() for process in psutil.Process().children(recursive=True)]
    assert not [name for name in names if "mpi" in name or "hydra" in name]


@needs_mpi
def test_an_mpi_job_that_cannot_start_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(CrewError, match="of 2 members that mpiexec starts 0 connected"):
        mpi.LaunchedCrew(Job("mpi", 2, 100, str(tmp_path)), 100)


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
