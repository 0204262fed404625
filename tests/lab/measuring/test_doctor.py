"""fastps doctor: its figures are those of real arenas, its checks fail where the machine does, and its rows are stable."""

import json
import os
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from fastps import SGD, Adam, Store
from fastps.device.cuda import CudaDevice
from fastps.device.interface import DeviceError
from fastps.errors import PolicyError, UsageError
from fastps.lab.gpus.cuda_on_host import HostCuda
from fastps.lab.measuring import doctor
from fastps.lab.measuring.doctor import OPTIMIZERS, Need, examine, gpu_findings, need_findings, need_of, peer_access
from tests.device.test_sharing import read_in_fork
from tests.support import commands

PARAMETERS = 100_000


@pytest.mark.sampled(4)
@pytest.mark.parametrize("sync", ["bsp", "dssp:3,15", "psp:2,0.5", "adv*:1", "ssp:3,ema=0.9"])
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_parts_add_up_to_the_whole(optimizer: str, sync: str) -> None:
    need = need_of(PARAMETERS, 3, optimizer, sync)
    parts = (need.gradient_slots_bytes, need.weights_bytes, need.rule_state_bytes, need.control_bytes)
    assert sum(parts) == need.total_bytes
    assert need.weights_bytes >= 4 * PARAMETERS * need.weights_buffers
    assert need.gradient_slots_bytes >= 4 * PARAMETERS * need.slots_per_worker * 3
    planes = len(OPTIMIZERS[optimizer].planes) + ("ema" in sync)
    assert need.rule_state_bytes >= 2 * planes * 4 * PARAMETERS
    assert need.total_bytes < 1.15 * sum(parts[:3])


@pytest.mark.parametrize(("optimizer", "update"), [("momentum", SGD(0.1, momentum=0.9)), ("adam", Adam()), ("sgd", SGD(0.1))])
def test_the_figures_are_those_of_a_real_arena(optimizer: str, update: "object") -> None:
    need = need_of(PARAMETERS, 2, optimizer)
    with Store.create({"w": np.zeros(PARAMETERS, np.float32)}, update, workers=2) as store:  # type: ignore[arg-type]
        assert (need.total_bytes, need.weights_buffers, need.slots_per_worker) == (
            store.arena.reader_weights_range(0)[0],
            store.arena.buffers,
            store.arena.slots,
        )
        assert 512 * os.fstat(store.descriptor).st_blocks == need.total_bytes


def test_a_model_larger_than_memory_is_measured_without_taking_memory() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    need = need_of(10**11, 4, "adam")
    assert need.total_bytes > psutil.virtual_memory().total
    assert process.memory_info().rss - before < 50_000_000
    assert not need_findings(need)[-1].ok


def test_this_machine_passes_every_check() -> None:
    findings = {finding.name: finding for finding in examine()}
    assert all(finding.ok for finding in findings.values()), findings
    assert findings["cores"].value == len(os.sched_getaffinity(0))
    assert "compiled loops over its tensors" in findings["torch"].shown
    assert "." in findings["GPUs"].shown or findings["GPUs"].value == 0


@pytest.mark.slow
def test_rows_and_table_of_a_model() -> None:
    outcome = commands.done("doctor", "--model-size", "1e5", "--workers", "2", "--optimizer", "adam", "--json", "-")
    document = json.loads(outcome.stdout)
    assert document["command"] == "doctor"
    *machine, need = document["rows"]
    assert {row["kind"] for row in machine} == {"machine"}
    assert {row["name"] for row in machine} >= {"cores", "memory", "memfd", "futex", "torch", "GPUs", "arena and workers"}
    assert need["kind"] == "need" and need["ok"] is True
    expected = need_of(100_000, 2, "adam")
    assert (need["total_bytes"], need["per_worker_bytes"]) == (expected.total_bytes, expected.per_worker_bytes)
    assert "100,000 parameters of float32, 2 workers, adam" in outcome.stderr


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_doubles_need_twice_the_memory_and_halves_are_pushed_in_half_of_it(optimizer: str) -> None:
    single, double, half = (need_of(1_000_000, 4, optimizer, "bsp", dtype) for dtype in ("float32", "float64", "bfloat16"))
    assert single.parameters == double.parameters == half.parameters == 1_000_000
    for part in ("gradient_slots_bytes", "weights_bytes", "rule_state_bytes"):
        assert getattr(double, part) == pytest.approx(2 * getattr(single, part), rel=0.01), part
    assert half.gradient_slots_bytes == pytest.approx(single.gradient_slots_bytes / 2, rel=0.01)
    assert half.weights_bytes == pytest.approx(1.5 * single.weights_bytes, rel=0.01)  # the masters, and the model's own
    assert half.rule_state_bytes == single.rule_state_bytes


@pytest.mark.slow
def test_where_no_arena_can_be_made_the_exit_code_says_so() -> None:
    code = "import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); "
    code += "runpy.run_module('fastps.cli', run_name='__main__', alter_sys=True)"
    outcome = commands.fastps("doctor", code=code)
    assert outcome.returncode == 1
    failing = [line.split("\t")[1] for line in outcome.stdout.splitlines() if "!!" in line]
    assert failing == ["memfd", "arena and workers"]
    assert "does not work: the arena needs" in outcome.stdout


def test_a_model_that_does_not_fit_is_exit_code_1() -> None:
    outcome = commands.fastps("doctor", "--model-size", "1e11")
    assert outcome.returncode == 1
    assert "no: use fewer workers or a smaller model" in outcome.stdout


@pytest.mark.parametrize(("arguments", "message"), [
    ((0, 4, "sgd"), "--model-size: expected at least 1, found 0"),
    ((9, 0, "sgd"), "--workers: expected at least 1, found 0"),
    ((9, 4, "lion"), "--optimizer: expected one of sgd, momentum, nesterov, adam"),
    ((9, 4, "sgd", "bsp", "int8"), "--dtype: expected one of float32, float16, bfloat16, float64, found 'int8'"),
    ((9, 4, "sgd", "foo"), "unknown synchronization 'foo'"),
    ((9, 100_000, "sgd"), "in this job, found 100000"),
    ((10**15, 1, "sgd"), "whose arena can be addressed"),
    ((10**13, 60, "sgd"), "whose arena can be addressed"),
    ((10**30, 1, "sgd"), "whose arena can be addressed"),
])  # fmt: skip
def test_what_cannot_be_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises((UsageError, PolicyError), match=message):
        need_of(*arguments)


def test_a_share_is_rounded_up() -> None:
    need = Need(1, 3, "sgd", "bsp", 2, 1, 5, 1, 1, 1, 10, 4)
    assert need.per_worker_bytes == 4


def test_the_doctor_has_a_line_on_gpus() -> None:
    findings = gpu_findings()
    assert findings[0].name == "GPUs" and all(finding.ok for finding in findings)


def test_kernels_that_do_not_compile_are_said_to_where_torch_finds_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutCompiler(HostCuda):
        def prepare(self, device: int, kernels: Any, users: str) -> None:
            raise DeviceError("NVRTC is not installed")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H100")
    apis = [WithoutCompiler(["gpu 0"]), HostCuda(["gpu 0"])]
    monkeypatch.setattr(doctor, "CudaDevice", lambda index: CudaDevice(index, api))
    monkeypatch.setattr(doctor, "read_in_child", read_in_fork)
    shown = []
    for api in apis:
        shown.append({finding.name: finding.shown for finding in gpu_findings()})
        api.end()
    assert shown[0]["shards on GPUs"] == "no, the fold runs on the CPU: NVRTC is not installed" and "CUDA IPC" not in shown[0]
    assert shown[1]["shards on GPUs"] == "a kernel was compiled and loaded" and "read them" in shown[1]["CUDA IPC"]
    assert all("nvidia-cuda-mps-control" in each["MPS"] or "runs:" in each["MPS"] for each in shown)


def test_peer_access_in_one_direction_is_said_to_be_refused() -> None:
    assert peer_access(2, lambda one, other: True).shown == "all reach each other"
    found = peer_access(3, lambda one, other: (one, other) in {(0, 1), (1, 0), (2, 0)})
    assert found.value == 3 and "3 of 6 pairs" in found.shown and "[(2, 0)] in one direction only" in found.shown
    none = peer_access(2, lambda one, other: False)
    assert "need FASTPS_PLACEMENT=host" in none.shown
