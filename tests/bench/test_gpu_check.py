"""The GPU check without a GPU: its answer then, and its own parts on the host's memory, so that they run when there is one."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastps.bench import exact, gpu_check, kernels_cuda
from fastps.bench.gpu_worker import GpuJob
from fastps.bench.measure import SMOKE
from fastps.device.cuda import CudaDevice
from fastps.errors import Error
from fastps.kernels.cuda.runtime import CudaUnavailableError, load_cupy
from fastps.kernels.update import fold, reference
from fastps.lab.gpus.cuda_on_host import Faults, HostCuda, HostDevice


@pytest.fixture
def device() -> Any:
    made = HostDevice("host")
    yield made
    made.shut()


def test_without_a_gpu_it_says_so_and_exits_with_its_own_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        load_cupy()
    except CudaUnavailableError:
        assert gpu_check.main(["--out", str(tmp_path)]) == gpu_check.EXIT_NO_DEVICE == 3
        said = capsys.readouterr().err
        assert said.startswith("gpu_check: no device: expected ") and said.count("\n") == 1, said
        assert not list(tmp_path.iterdir())
    else:
        pytest.skip("there is a GPU here")


def test_kernels_pass_against_double_precision_and_a_wrong_one_does_not(
    device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "SIZES", (1, 17, 4097))
    rows = gpu_check.check_kernels(device) + gpu_check.check_nonfinite(device)
    assert len(rows) == 6 * len(gpu_check.UPDATES) + 1
    assert [row["name"] for row in rows if not row["ok"]] == []
    monkeypatch.setattr(gpu_check, "UPDATES", {"adam": gpu_check.UPDATES["adam"]})
    step = exact.step
    monkeypatch.setattr(exact, "step", lambda *of: step(*of[:5], of[5] + 1))  # a correction too late
    assert not any(row["ok"] for row in gpu_check.check_kernels(device))


def test_the_formulas_in_double_precision_agree_with_the_folds_oracle() -> None:
    """Two independent writings of the same optimizers."""
    random = np.random.default_rng(0)
    for update in gpu_check.UPDATES.values():
        rule, planes, hyper = update.rule.number, len(update.rule.planes), update.hyper
        weights = random.standard_normal(50, np.float32)
        state = np.abs(random.standard_normal((planes, 50), np.float32))
        state[:2] += 16 if planes else 0  # squares are greater than the square of a mean
        gradient = random.standard_normal(50, np.float32)
        expected = exact.fold_of(rule, fold.FOLD_SUM, [(gradient, hyper, 0.5)], weights, state, 5, 1.0, 0.0)
        found = reference.fold(
            rule, fold.FOLD_SUM, [(0, 50, 0)], [(gradient, [hyper], [True], 0.5)], weights, state, np.full(1, 5, np.int64)
        )
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-5)


def test_the_benchmark_of_kernels_runs_and_checks_itself(device: HostDevice) -> None:
    rows = kernels_cuda.rows_on(device, SMOKE)
    assert {row["name"] for row in rows} >= {"sgd-momentum", "adam", "sum-4-sgd-momentum", "adam-bfloat16"}
    assert all(row["checked"] and row["limit_share"] > 0 for row in rows)


def simulated(count: int) -> list[CudaDevice]:
    """GPUs of the simulated runtime, as one process sees them: the third is out of reach."""
    api = HostCuda([f"gpu {number}" for number in range(count)], Faults(unreachable=frozenset({"gpu 2"})))
    return [CudaDevice(index, api) for index in range(count)]


def test_pairs_of_gpus_and_folds_over_peers_are_checked_on_the_simulated_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = gpu_check.between_gpus(3, 5003 * 8, simulated, 0.001)
    pairs = {row["name"]: row for row in rows if row["check"] == "peers"}
    assert len(pairs) == 6 and all(row["ok"] and row["bytes_per_s"] > 0 for row in pairs.values())
    assert pairs["GPU 0 reads GPU 1"]["access"] and not pairs["GPU 2 reads GPU 0"]["access"]
    folds = {row["name"]: row for row in rows if row["check"] == "fold over peers"}
    assert folds["GPU 0"]["ok"] and folds["GPU 1"]["gpus"] == 2 and folds["GPU 0"]["bytes_per_s"] > 0
    assert folds["GPU 2"]["ok"] is None and "no other GPU has peer access" in folds["GPU 2"]["missing"]
    copy = HostCuda.memcpyAsync
    monkeypatch.setattr(HostCuda, "memcpyAsync", lambda self, to, source, size, *rest: copy(self, to, source, size // 2, *rest))
    devices = simulated(2)
    assert not any(row["ok"] for row in gpu_check.check_pairs(devices, 64, 0.001)), "copies that move half are found"
    for device in devices:
        device.shut()


def test_what_needs_more_gpus_is_named_as_not_run_and_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [*gpu_check.between_gpus(1, 64), *gpu_check.on_several_gpus("cuda", 1)]
    assert [row["ok"] for row in rows] == [None, None, None]
    gpu_check.show([*rows, {"check": "kernel", "name": "x", "ok": False, "difference": 1.0}])
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "not run peers all pairs missing=needs 2 GPUs, found 1" and said[-1] == "FAIL kernel x difference=1"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_death_in_a_job_with_a_server_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU path takes the GPU's place; a job that lost a push would be told."""
    rows = list(gpu_check.check_going_on("cpu", "host"))
    assert [row["ok"] for row in rows] == [True, True], rows
    monkeypatch.setattr(gpu_check, "GRADIENT", 1 / 512)
    assert not any(row["ok"] for row in gpu_check.check_going_on("cpu", "host"))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_jobs_of_processes_are_run_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU path takes the GPU's place; a job that is another one is told apart."""
    monkeypatch.setattr(gpu_check, "CASES", (("bsp", "momentum"), ("dssp:1,4", "sgd")))
    rows = list(gpu_check.check_processes("cpu", "host"))
    assert [row["name"] for row in rows if not row["ok"]] == []
    other = gpu_check.run_job(GpuJob("cpu", "bsp", "momentum", steps=3), 2, "host")
    same = gpu_check.run_job(GpuJob("cpu", "bsp", "momentum", steps=4), 2, "host")
    assert gpu_check._difference(other[0]["weights"], same[0]["weights"]) > gpu_check.EQUAL


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_training_is_run_and_judged() -> None:
    rows = list(gpu_check.check_training("cpu", "host", "digits", epochs=6))
    assert [row["ok"] for row in rows] == [True, True], rows


@pytest.mark.slow
def test_a_job_that_fails_is_a_row_with_its_reason() -> None:
    with pytest.raises(Error, match="worker 0"):
        gpu_check.run_job(GpuJob("no-such-device", "bsp"), 1, "host")


def test_figures_are_written_with_the_machine_and_the_date(tmp_path: Path) -> None:
    path = gpu_check.write([{"check": "kernel", "name": "x", "ok": True}], tmp_path, {"name": "Some GPU 1"})
    found = json.loads(path.read_text())
    assert path.name.startswith("gpu-some-gpu-1-20")
    assert found["rows"] and found["machine"]["cpu"] and found["gpu"]["name"] == "Some GPU 1" and found["date"]
