"""The parts of the GPU check on the host's memory, so that they run when there is a GPU."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastps.bench.gpu import check as gpu_check
from fastps.bench.gpu import exact, kernels_cuda, run
from fastps.bench.gpu.report import Report
from fastps.bench.gpu.worker import GRADIENT, LEARNING_RATE, GpuJob, first_weights
from fastps.bench.measure import SMOKE
from fastps.device.cuda import CudaDevice
from fastps.errors import Error
from fastps.job.specs import parse_policy
from fastps.kernels.update import fold
from fastps.lab.gpus.cuda_on_host import Faults, HostCuda, HostDevice
from fastps.lab.measuring import doctor
from fastps.lab.measuring.doctor import Finding
from tests.support.folds import fold_reference as reference


@pytest.fixture
def device() -> Any:
    made = HostDevice("host")
    yield made
    made.shut()


@pytest.mark.slow
def test_kernels_pass_against_double_precision_and_a_wrong_one_does_not(
    device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = 1, 17, 4097  # planes of such sizes must not follow one another without a gap
    rows = [*gpu_check.check_kernels(device, sizes), *gpu_check.check_nonfinite(device)]
    assert len(rows) == 6 * len(gpu_check.UPDATES) + 1
    assert [row["name"] for row in rows if not row["ok"]] == []
    monkeypatch.setattr(gpu_check, "UPDATES", {"adam": gpu_check.UPDATES["adam"]})
    step = exact.step
    monkeypatch.setattr(exact, "step", lambda *of: step(*of[:5], of[5] + 1))  # a correction too late
    assert not any(row["ok"] for row in gpu_check.check_kernels(device, sizes))


@pytest.mark.slow
def test_every_size_has_a_finite_reference_and_one_that_is_not_is_the_checks_own_failure(
    device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "UPDATES", {"rmsprop-centered": gpu_check.UPDATES["rmsprop-centered"]})
    assert [row["ok"] for row in gpu_check.check_kernels(device)] == [True] * 6
    monkeypatch.setattr(exact, "fold_of", lambda *of: (np.full(1, np.nan), np.zeros(1)))
    rows = list(gpu_check.check_kernels(device))
    assert not any(row["ok"] for row in rows) and rows[0]["missing"] == "the check's own reference of 1 is not finite"


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
    rows = list(gpu_check.between_gpus(3, 5003 * 8, simulated, 0.001))
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


def test_a_job_with_other_results_than_the_cpus_fails_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs end at once here; the whole check runs them."""
    weights = np.ones(4, np.float32)

    def checked(**changes: Any) -> list[bool]:
        def run_jobs(jobs: list[GpuJob], workers: int, *more: Any, **options: Any) -> list[list[dict[str, Any]]]:
            assert all(parse_policy(job.sync) for job in jobs)
            ended = {"weights": weights, "version": 20, "kind": "x"}
            return [[{**ended, **(changes if job.device == "cuda" else {})}] * workers for job in jobs]

        monkeypatch.setattr(gpu_check, "run_jobs", run_jobs)
        monkeypatch.setattr(
            gpu_check, "_on_cpu", lambda cases, workers: run_jobs([GpuJob("cpu", sync) for sync, _ in cases], workers)
        )
        return [row["ok"] for row in gpu_check.check_processes("cuda", "device", check="two processes")]

    assert checked() == [True] * len(gpu_check.CASES)
    assert not any(checked(weights=weights + np.float32(1e-4)) + checked(version=21))


def test_a_job_that_lost_a_push_with_its_dead_worker_fails_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def checked(lost: int) -> list[bool]:
        def run_jobs(jobs: list[GpuJob], workers: int, *more: Any, **options: Any) -> list[list[dict[str, Any]]]:
            [job] = jobs
            version = job.steps if job.sync == "bsp" else 2 * job.steps + job.dies_at
            first = np.concatenate([values.flatten().numpy() for values in first_weights()])
            ended = {"weights": first - LEARNING_RATE * GRADIENT * (version - lost), "version": version, "kind": "x"}
            return [[ended] * (workers - 1)]

        monkeypatch.setattr(gpu_check, "run_jobs", run_jobs)
        return [row["ok"] for row in gpu_check.check_going_on("cuda", "device")]

    assert (checked(0), checked(1)) == ([True, True], [False, False])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_training_is_run_and_judged() -> None:
    rows = list(gpu_check.check_training("cpu", "host", "digits", epochs=6))
    assert [row["ok"] for row in rows] == [True, True], rows


@pytest.mark.slow
def test_a_job_that_fails_is_a_row_with_its_reason() -> None:
    with pytest.raises(Error, match="worker 0"):
        gpu_check.run_jobs([GpuJob("no-such-device", "bsp")], 1, "host")


def test_a_machine_without_the_daemon_of_mps_does_not_fail_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Finding("GPUs", 1, "1 (a GPU)"), Finding("MPS", "no", "does not run"), Finding("CUDA IPC", "works", "works")]
    monkeypatch.setattr(doctor, "gpu_findings", lambda: found)
    assert [row["ok"] for row in gpu_check.check_ipc()] == [True, None, True]
    found[2] = Finding("CUDA IPC", "no", "does not work")
    assert [row["ok"] for row in gpu_check.check_ipc()] == [True, None, False]


def test_each_part_has_its_check() -> None:
    assert list(gpu_check.CHECKS) == list(run.PARTS)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # ten parts and some twenty jobs of processes, each of which imports torch
def test_the_whole_check_passes_on_two_simulated_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "COMMAND", (sys.executable, "-m", "tests.support.gpu_on_host", "part"))
    monkeypatch.setenv("PYTHONPATH", ".", prepend=os.pathsep)
    report = Report({"name": "Host", "count": 2}, tmp_path / "report.json", quick=True)
    assert run.check(report, run.Settings(2, quick=True), sys.stdout.write) == 0, report.rows
    found = json.loads(report.file.read_text())
    assert found["says"][:4] == [
        f"Works: {', '.join(name for name, part in run.PARTS.items() if part.in_quick)}.",
        "Not run: training, compute-sanitizer.",
        "Use on one GPU: the default, shards on the GPU.",
        "Use on several GPUs: FASTPS_PLACEMENT=device.",
    ]
    assert {place for row in found["rows"] for place in row.get("placements", ())} == {"device", "staged"}
