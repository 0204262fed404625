"""Ranges of a step in torch.profiler: its export has them in their order, and without a profiler nothing of them is left."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

import fastps
from fastps.torch import profiling
from tests.support.torch_optimizers import one_worker, steps_on

_STEPS = 4


def _step(model: torch.nn.Module, optimizer: Any, steps: int = 1) -> None:
    steps_on(model, optimizer, torch.ones(2, 8), steps)


def _profiled(folder: Path, model: torch.nn.Module, optimizer: Any) -> list[dict[str, Any]]:
    """The complete events of an export of some steps, each in a range of its own."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for step in range(_STEPS):
            with record_function(f"step {step}"):
                _step(model, optimizer)
    file = folder / "torch.json"
    found.export_chrome_trace(str(file))
    return [event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"]


def _within(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    return bool(outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sync", ["bsp", "asp", "ssp:3", "dssp:3,15"])
def test_every_step_has_its_ranges_in_their_order(tmp_path: Path, sync: str) -> None:
    with one_worker(torch.nn.Linear(8, 1), sync=sync) as (model, optimizer):
        _step(model, optimizer)
        events = _profiled(tmp_path, model, optimizer)
    for step in range(_STEPS):
        [whole] = [event for event in events if event["name"] == f"step {step}"]
        own = sorted((each for each in events if _within(each, whole)), key=lambda each: float(each["ts"]))
        names = [each["name"] for each in own if each["name"].startswith("fastps::")]
        assert names == ["fastps::push", "fastps::fold", "fastps::wait", "fastps::pull"]
        push, fold, *_ = [each for each in own if each["name"].startswith("fastps::")]
        assert _within(fold, push), "the worker folds its own push"
        [torchs] = [each for each in own if each["name"].startswith("Optimizer.step#")]
        assert _within(push, torchs)


def test_a_profiled_step_has_the_result_of_any_other(tmp_path: Path) -> None:
    found = []
    for is_profiled in (False, True):
        torch.manual_seed(0)
        with one_worker(torch.nn.Linear(8, 1)) as (model, optimizer):
            _profiled(tmp_path, model, optimizer) if is_profiled else _step(model, optimizer, _STEPS)
            assert optimizer.version == _STEPS
            found.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_nothing_is_left_behind_without_a_profiler(tmp_path: Path) -> None:
    with one_worker(torch.nn.Linear(8, 1)) as (model, optimizer):
        _profiled(tmp_path, model, optimizer)
        replaced = {*profiling.OF_WORKER, *profiling.OF_JOB}
        assert not replaced & {*vars(optimizer._job), *vars(optimizer.worker)}
        assert optimizer.worker._is_direct
        version = optimizer.version
        with pytest.raises(RuntimeError, match="from the loop"):
            with profile(activities=[ProfilerActivity.CPU]):
                _step(model, optimizer)
                raise RuntimeError("from the loop")
        with pytest.raises(fastps.UsageError, match="no_sync"):
            with profile(activities=[ProfilerActivity.CPU]), optimizer.no_sync():
                _step(model, optimizer)
        assert not replaced & {*vars(optimizer._job), *vars(optimizer.worker)}
        _step(model, optimizer)
        assert optimizer.version == version + 2


@pytest.mark.slow
def test_a_server_folds_in_its_own_process(tmp_path: Path) -> None:
    """The worker's ranges are there; what is named a fold wakes the server."""
    with one_worker(torch.nn.Linear(8, 1), sync="asp", workers=1, server="process") as (model, optimizer):
        _step(model, optimizer)
        events = _profiled(tmp_path, model, optimizer)
        assert optimizer.worker._is_direct, "posting and calling the server is one call again"
    assert sum(event["name"] == "fastps::push" for event in events) == _STEPS
