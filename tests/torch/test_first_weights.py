"""What a script writes to the weights between wrapping and its first step: each worker its own, of which worker 0's count."""

import copy
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastps
from fastps.kernels.protocol.lane import Lane
from tests.support.said import listen
from tests.support.torch_optimizers import with_and_without
from tests.torch.test_foreign import _in_processes, _model, _train, _wrap


def _write(model: torch.nn.Linear) -> None:
    """Write the weights in terms of what they are: in place, uncounted, elsewhere, by a load; and look at others."""
    with torch.no_grad():
        model.weight.mul_(0.5)
        model.weight.data.mul_(0.5)
        model.weight.data = model.weight.data + 1.0
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
        kept = model.weight.clone()
        model.weight.fill_(7.0)
        time.sleep(0.05)
        model.weight.copy_(kept)


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("workers", [1, 2])
def test_weights_written_before_the_first_gradient_are_written_once_whatever_they_were(workers: int) -> None:
    def train_twice(wrap: Callable[[Any], Any], rank: int = 0) -> list[float]:
        model = _model()
        for _ in range(2):
            optimizer = wrap(model)
            time.sleep(0.1 * rank)
            _write(model)
            _train(model, optimizer, 2)
            getattr(optimizer, "unwrap", lambda: None)()
        return [*model.weight.flatten().tolist(), *model.bias.tolist()]

    expected = train_twice(lambda model: torch.optim.SGD(model.parameters(), lr=0.01))
    for found in _in_processes(lambda rank: train_twice(lambda model: _wrap(model, model=model), rank), workers):
        assert np.allclose(found, expected, rtol=1e-6)


def _load_state(model: torch.nn.Linear, optimizer: Any) -> None:
    state = optimizer.state_dict()
    state["state"] = {index: {"momentum_buffer": torch.ones_like(each)} for index, each in enumerate(model.parameters())}
    optimizer.load_state_dict(state)


def _load_both(model: torch.nn.Linear, optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())
    model.load_state_dict({name: value * 0 + 3.0 for name, value in model.state_dict().items()})
    _load_state(model, optimizer)


def _draw_again(model: torch.nn.Linear) -> None:
    torch.manual_seed(7)
    torch.nn.init.normal_(model.weight)


def _load_model(model: torch.nn.Linear) -> None:
    model.load_state_dict({name: value + 1.0 for name, value in model.state_dict().items()})


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("written", [_load_model, _draw_again])
@pytest.mark.parametrize("loaded", [_load_state, _load_both])
@pytest.mark.parametrize("workers", [1, 2])
def test_weights_written_behind_a_load_of_the_optimizers_state_are_those_of_the_first_step(
    workers: int, loaded: Callable[..., None], written: Callable[..., None], is_frozen: bool
) -> None:
    """The state becomes the job's in other memory, from which the first step began."""

    def train(wrap: Callable[[torch.nn.Module], Any]) -> tuple[list[float], list[str]]:
        said, model = listen(), _model()
        optimizer = wrap(model)
        loaded(model, optimizer)
        model.weight.requires_grad_(not is_frozen)
        written(model)
        _train(model, optimizer, 2)
        model.weight.requires_grad_(True)
        _train(model, optimizer, 2)
        getattr(optimizer, "unwrap", lambda: None)()
        return [*model.weight.flatten().tolist(), *model.bias.tolist()], said

    def plain(model: torch.nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    expected, _ = train(plain)
    for found, said in _in_processes(lambda _: train(lambda model: fastps.DistributedOptimizer(plain(model))), workers):
        assert np.allclose(found, expected, rtol=1e-6) and not [each for each in said if "not used" in each]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_script_may_load_the_model_or_the_state_first_when_it_goes_back(workers: int) -> None:
    """Under bsp all workers write the same, and the next step takes it."""

    def train(wrap: Callable[[torch.nn.Module], Any], order: str) -> list[float]:
        model = _model()
        optimizer = wrap(model)
        _train(model, optimizer, 2)
        kept = [copy.deepcopy(each.state_dict()) for each in (model, optimizer)]
        _train(model, optimizer, 3)
        for each in order:
            model.load_state_dict(kept[0]) if each == "m" else optimizer.load_state_dict(kept[1])
        _train(model, optimizer, 2)
        getattr(optimizer, "unwrap", lambda: None)()
        return [*model.weight.flatten().tolist(), *model.bias.tolist()]

    def plain(model: torch.nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    expected = train(plain, "mo")
    for order in ("mo", "om", "mom"):
        found = _in_processes(lambda _: train(lambda model: fastps.DistributedOptimizer(plain(model)), order), workers)  # noqa: B023
        assert all(np.allclose(each, expected, rtol=1e-6) for each in found), order


@pytest.mark.parametrize("sync", ["bsp", "asp,ema=0.9"])
def test_a_checkpoint_before_the_first_step_has_what_the_script_loaded(sync: str, tmp_path: Path) -> None:
    model = _model()
    with _wrap(model, model=model, sync=sync) as optimizer:
        torch.nn.init.constant_(model.weight, 5.0)
        saved = fastps.load(fastps.save(optimizer, tmp_path))
        assert saved.weights()["weight"].tolist() == [[5.0] * 4]
        _train(model, optimizer, 1)
        assert optimizer.version == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_weights_that_replace_the_first_ones_may_be_written_again(workers: int) -> None:
    def work(rank: int) -> list[float]:
        model = _model()
        with _wrap(model, model=model) as optimizer:
            if rank == 0:
                optimizer.replace_weights([torch.zeros_like(each) for each in model.parameters()])
                assert not model.weight.any()
            torch.nn.init.constant_(model.weight, 2.0)
            torch.nn.init.constant_(model.bias, 1.0)
            _train(model, optimizer, 1)
            return model.weight.flatten().tolist()

    plain = _model()
    torch.nn.init.constant_(plain.weight, 2.0)
    torch.nn.init.constant_(plain.bias, 1.0)
    _train(plain, torch.optim.SGD(plain.parameters(), lr=0.01), 1)
    assert _in_processes(work, workers) == [pytest.approx(plain.weight.flatten().tolist())] * workers


def test_a_frozen_parameter_that_worker_0_wrote_otherwise_is_told_of() -> None:
    def work(rank: int) -> tuple[float, int]:
        said, model = listen(), _model()
        model.weight.requires_grad_(False)
        with _wrap(model, model=model) as optimizer:
            model.weight.data.fill_(1.0 + rank)
            _train(model, optimizer, 2)
            return float(model.weight.sum()), len([each for each in said if "worker 0 did not write the same" in each])

    assert _in_processes(work, 2) == [(4.0, 0), (4.0, 1)]


def test_weights_that_worker_0_did_not_write_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """Each worker draws its own, without a seed: those of worker 0 count, and the other's first gradient does not."""

    def work(rank: int) -> list[float]:
        model = _model()
        with _wrap(model, model=model) as optimizer:
            torch.nn.init.constant_(model.weight, 1.0 + rank)
            _train(model, optimizer, 1)
            return [float(model.weight.detach().sum()), optimizer.version, caplog.text.count("worker 0 did not write the same")]

    plain = _model()
    torch.nn.init.constant_(plain.weight, 1.0)
    _train(plain, torch.optim.SGD(plain.parameters(), lr=0.01), 1)
    expected = float(plain.weight.detach().sum())
    assert _in_processes(work, 2) == [[pytest.approx(expected), 1, 0], [pytest.approx(expected), 1, 1]]


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_weights_that_worker_0_writes_after_others_have_pushed_are_the_jobs(
    sync: str, caplog: pytest.LogCaptureFixture
) -> None:
    has_wrapped = multiprocessing.get_context("fork").Event()

    def work(rank: int) -> list[float]:
        model = _model()
        with _wrap(model, model=model, sync=sync) as optimizer:
            if rank == 0:
                has_wrapped.set()
                store = optimizer._job.store
                while Lane(store.arena, 1).posted() < 1 or (sync == "asp" and not store.arena.shard_version(0)):
                    time.sleep(0.001)
                torch.nn.init.constant_(model.weight, 100.0)
            assert has_wrapped.wait(60)  # else worker 0 finds a job that has trained
            _train(model, optimizer, 2)
            optimizer.wait_for_others()
            return [float(model.weight.detach().min()), caplog.text.count("after others had pushed")]

    first, second = _in_processes(work, 2)
    assert first[0] == second[0] > 50.0 and (first[1], second[1]) == (1, 0)


def _scalar() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(4, 1))
    model.register_parameter("scale", torch.nn.Parameter(torch.tensor(2.0)))
    return model


@pytest.mark.parametrize("form", [
    _scalar, lambda: torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), _model,
])  # fmt: skip
def test_first_weights_of_float64_may_have_any_form(form: Callable[[], torch.nn.Module]) -> None:
    def run(wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = form().double()
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1))
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
        sum(parameter.square().sum() for parameter in model.parameters()).backward()
        optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    assert all(map(torch.equal, *with_and_without(run)))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_resumed_job_keeps_its_weights_from_a_script_that_loads_others_after_wrapping(
    workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def work(rank: int) -> list[float]:
        model = _model()
        with _wrap(
            model, model=model, checkpoint=tmp_path, every=1, resume=tmp_path if any(tmp_path.iterdir()) else None
        ) as it:
            model.load_state_dict({"weight": torch.full((1, 4), 10.0), "bias": torch.zeros(1)})
            _train(model, it, 3)
            if rank == 0:
                it.wait_for_others()
            return [float(model.weight.detach().mean()), it.version, caplog.text.count("is not used")]

    (first, version, _), *_ = _in_processes(work, workers)
    (resumed, later, warnings), *_ = _in_processes(work, workers)
    assert first < 10.0 and version == 3
    assert resumed < first and later == 3 + 3 and warnings == 1
