"""The benchmark of a step on GPUs, without one: who is measured, why not, and the limit on the simulated runtime."""

import os
from pathlib import Path

import numpy as np
import pytest

from fastps.bench import step
from fastps.bench.gpu import step_cuda
from fastps.bench.peers import Job
from fastps.lab.gpus.cuda_on_host import HostCuda


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FASTPS_GPUS", "FASTPS_PLACEMENT", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # so that what `settle` sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setattr(step_cuda, "gpus", lambda: 2)
    monkeypatch.setattr("fastps.device.cuda.CupyCuda", lambda: HostCuda(["gpu 0", "gpu 1"]))


@pytest.mark.parametrize("name", ["nccl", "ddp"])
def test_nccl_needs_a_gpu_a_worker_and_others_do_not(name: str, two_gpus: None) -> None:
    assert step_cuda.missing_reason(2)(name) is None
    assert step_cuda.missing_reason(3)(name) == "NCCL needs a GPU a worker, and there are 2 for 3"
    assert step_cuda.missing_reason(3)("limit") is None
    assert step_cuda.missing_reason(2)("hogwild") == "it is no peer on a GPU"


def test_workers_take_the_gpus_in_turn_and_shards_stay_there(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job("fastps", 4, 64, "folder")
    seen = []
    for rank in range(4):
        step_cuda.settle(job, rank)
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert seen == ["0,1", "1,0", "0,1", "1,0"]
    assert os.environ["FASTPS_PLACEMENT"] == "device"


def test_the_limit_is_one_gpus_share_of_the_model(two_gpus: None, tmp_path: Path) -> None:
    job = Job("limit", 4, 4001, str(tmp_path))
    side = step_cuda.RooflineCuda(job, 0)
    side.run(3)
    assert len(side.weights) == job.size // 2
    assert np.allclose(side.weights, step._weight_after(3, step._mean(job)))
    side.close()


def test_the_limits_steps_are_those_of_the_benchmark(two_gpus: None, tmp_path: Path) -> None:
    """Its weights are compared with those of SGD with momentum, as of every side."""
    side = step.Side("limit", step_cuda.PEERS["limit"]["limit"], 4, 4001, str(tmp_path))
    with side.crew:
        side.prepare(0.001)
        assert side.run(1) > 0
