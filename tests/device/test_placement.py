"""GPUs at the command line, on machines with and without one: who gets which, and what is said where there is none."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fastps.bench.gpu import step_cuda
from fastps.cli.main import app
from fastps.device import placement
from fastps.errors import Error, UnsupportedError, UsageError
from fastps.kernels.cuda import runtime as cuda
from fastps.processes.worker_environment import environment_of
from fastps.torch.placements.placed import placed


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of /dev; no GPU yet, and no variable that names one."""
    monkeypatch.setattr(placement, "_DEVICES", tmp_path)
    monkeypatch.setattr(step_cuda, "_DEVICES", tmp_path)
    for name in ("CUDA_VISIBLE_DEVICES", "FASTPS_GPUS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_gpus_that_the_machine_has_not_are_refused_in_one_sentence(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="expected at least 1 GPUs on this machine, found none"):
        placement.parse_gpus("0")
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (machine / name).touch()
    assert placement.parse_gpus("0, 1") == "0,1"
    with pytest.raises(UsageError, match="expected at least 4 GPUs on this machine, found 2"):
        placement.parse_gpus("0,3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(UsageError, match="found 1"):
        placement.parse_gpus("0,1")


def test_workers_take_the_gpus_in_turn_and_see_their_own_first() -> None:
    base = {"FASTPS_GPUS": "0,1,2"}
    seen = [environment_of(rank, 4, 1, "job", None, base)["CUDA_VISIBLE_DEVICES"] for rank in range(4)]
    assert seen == ["0,1,2", "1,0,2", "2,0,1", "0,1,2"]
    assert "CUDA_VISIBLE_DEVICES" not in environment_of(0, 4, 1, "job", None, {})


@pytest.mark.parametrize("gpus", ["0,1,2,3", "0", "3,1"])
def test_scripts_for_torchrun_find_a_workers_own_gpu_at_its_local_rank(gpus: str) -> None:
    base, named = {"FASTPS_GPUS": gpus}, gpus.split(",")
    for rank in range(4):
        variables = environment_of(rank, 4, 1, "job", None, base, style="torchrun")
        seen = variables["CUDA_VISIBLE_DEVICES"].split(",")
        assert seen == named  # in every worker, as under torchrun
        assert seen[int(variables["LOCAL_RANK"])] == named[rank % len(named)]
        assert (variables["RANK"], variables["LOCAL_WORLD_SIZE"]) == (str(rank), "4")


def test_a_model_on_another_gpu_than_the_workers_own_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def place(index: int) -> str:
        model: Any = [SimpleNamespace(device=torch.device("cuda", index), dtype=torch.float32)]
        return placed(model, torch.float32, is_told=True).name

    for name, value in environment_of(1, 2, 1, "job", None, {"FASTPS_GPUS": "0,1"}, style="torchrun").items():
        monkeypatch.setenv(name, value)
    assert place(1) == "staged"
    with pytest.raises(UnsupportedError, match=r"expected the model of worker 1 on cuda:1, .* found it on cuda:0"):
        place(0)
    monkeypatch.delenv("LOCAL_RANK")
    assert place(0) == "staged"
    monkeypatch.delenv("FASTPS_GPUS")
    assert place(1) == "staged"


@pytest.mark.slow
def test_auto_falls_back_with_the_reason_where_processes_cannot_share_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A CuPy that is installed, and that no GPU goes with."""
    (tmp_path / "cupy.py").write_text("raise ImportError('libcuda.so.1 is missing')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("FASTPS_GPUS", "0")
    monkeypatch.delenv("FASTPS_PLACEMENT", raising=False)
    found = placement.place_by_trial(4)
    assert "shards lie in host memory: expected processes that share" in found and "libcuda.so.1 is missing" in found
    assert os.environ["FASTPS_PLACEMENT"] == "host" and placement.placement(4) == "host"
    assert placement.place_by_trial(4) == "", "the user's own choice is not tried"
    monkeypatch.delenv("FASTPS_PLACEMENT")
    monkeypatch.setattr(placement, "PROBE", [sys.executable, "-c", ""])
    assert placement.place_by_trial(4) == "" and placement.placement(4) == "device"


def test_the_command_line_without_a_gpu_says_so(machine: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    for arguments, said in (
        (["run", "--gpus", "0", str(script)], "expected at least 1 GPUs"),
        (["bench", "step", "--device", "cuda"], "expected a GPU for --device cuda, found none"),
        (["bench", "kernels", "--backend", "tpu"], "--backend: expected cpu or cuda, found 'tpu'"),
    ):
        result = CliRunner().invoke(app, arguments)
        assert isinstance(result.exception, Error), result
        assert said in str(result.exception) and "\n" not in str(result.exception)


def test_kernels_on_a_gpu_are_refused_where_there_is_none() -> None:
    try:
        cuda.load_cupy()
    except cuda.CudaUnavailableError:
        result = CliRunner().invoke(app, ["bench", "kernels", "--backend", "cuda", "--smoke"])
        assert isinstance(result.exception, Error) and "found" in str(result.exception)
    else:
        pytest.skip("there is a GPU here")
