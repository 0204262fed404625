"""fastps.reader: a model shows a running job's newest weights; what it refuses, and what a write into them does."""

import copy
import os
from typing import Any

import pytest
import torch

import fastps
from tests.support.said import listen
from tests.support.torch_optimizers import mean_square, steps_on


def _model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(16, 2))


def _wrapped(model: torch.nn.Module, /, **options: Any) -> fastps.DistributedOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return fastps.DistributedOptimizer(inner, **{"model": model, "job": f"reader-{os.getpid()}", **options})


def _step(model: torch.nn.Module, optimizer: Any) -> None:
    steps_on(model, optimizer, torch.randn(8, 3, 4, 4), loss=mean_square)


def _same(model: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_model_shows_each_version_and_keeps_it(memory_format: torch.memory_format) -> None:
    model, other = _model().to(memory_format=memory_format), _model(1)
    with _wrapped(model) as optimizer, fastps.reader(optimizer.worker.store.job) as reader:
        for step in range(20):
            assert reader.wait(step)
            assert reader.update(other) == reader.version == step
            assert _same(model, other)
            shown = [parameter.detach().clone() for parameter in other.parameters()]
            _step(model, optimizer)
            assert not _same(model, other)
            assert all(torch.equal(a, b) for a, b in zip(shown, other.parameters(), strict=True))
        addresses = [parameter.data_ptr() for parameter in other.parameters()]
        assert reader.update() == 20
        assert addresses != [parameter.data_ptr() for parameter in other.parameters()], "no parameter was copied into"
        other.eval()(torch.randn(1, 3, 4, 4))
    assert _same(model, other)
    assert other.get_buffer("1.num_batches_tracked") == 20, "it had the job's buffers"
    with torch.no_grad():
        next(other.parameters()).add_(1.0)  # a copy of its own since the reader is closed
    other.load_state_dict(model.state_dict())


def test_two_models_of_a_reader_move_together() -> None:
    model, one, two = _model(), _model(1), _model(2)
    with _wrapped(model) as optimizer, fastps.reader(optimizer.worker.store.job) as reader:
        reader.update(one)
        _step(model, optimizer)
        reader.update(two)
        assert _same(model, one)
        assert _same(model, two)
        del two
        _step(model, optimizer)
        reader.update()
        assert _same(model, one)


def test_parameters_are_found_by_name_and_others_stay() -> None:
    """The job trains a part of the model, in another order."""
    model, other = _model(), _model(1)
    bias = other.get_parameter("0.bias").detach().clone()
    trained = [model.get_parameter(name) for name in ("3.weight", "0.weight")]
    optimizer = fastps.DistributedOptimizer(torch.optim.SGD(trained, lr=0.01), model=model, job=f"reader-{os.getpid()}")
    with optimizer, fastps.reader(optimizer.worker.store.job) as reader:
        _step(model, optimizer)
        reader.update(other)
        for name in ("3.weight", "0.weight"):
            assert torch.equal(other.get_parameter(name), model.get_parameter(name))
        assert torch.equal(other.get_parameter("0.bias"), bias)


def test_arrays_by_name_have_the_values_of_parameters_of_any_strides() -> None:
    model = _model().to(memory_format=torch.channels_last)
    with _wrapped(model, sync="bsp") as optimizer, fastps.reader(optimizer.worker.store.job) as reader:
        _step(model, optimizer)
        reader.pull()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        optimizer.expose_gradients()
        for name, array in optimizer.worker.gradients.items():
            array[...] = gradients[name]
            assert torch.equal(model.get_parameter(name).grad, gradients[name])
        for arrays in (reader.weights, optimizer.worker.weights):
            assert not any(array.flags.writeable for array in arrays.values())
            state = model.state_dict()
            assert all(torch.equal(torch.tensor(array), state[name]) for name, array in arrays.items())


def test_a_job_without_names_is_matched_by_place() -> None:
    parameters, other = [torch.nn.Parameter(each.detach().clone()) for each in _model().parameters()], _model(1)
    inner = torch.optim.SGD(parameters, lr=0.1)
    with fastps.DistributedOptimizer(inner) as optimizer, fastps.reader(optimizer.worker.store.job) as reader:
        reader.update(other)
        assert all(torch.equal(*pair) for pair in zip(parameters, other.parameters(), strict=True))
        with pytest.raises(fastps.LayoutError, match="6 parameters without names: expected a model with as many, found 2"):
            reader.update(torch.nn.Linear(1, 1))


def test_models_that_do_not_fit_are_refused_by_name_and_left_as_they_are() -> None:
    model = _model()
    with _wrapped(model) as optimizer, fastps.reader(optimizer.worker.store.job) as reader:
        with pytest.raises(fastps.LayoutError, match="expected a model with that parameter or buffer, found weight"):
            reader.update(torch.nn.Linear(16, 2))
        wider = _model()
        wider[3] = torch.nn.Linear(16, 3)  # type: ignore[index]
        before = wider.get_parameter("0.weight").data_ptr()
        expected = r"parameter '3.weight': expected shape \(2, 16\) as in job .*, found \(3, 16\); build the job's model"
        with pytest.raises(fastps.LayoutError, match=expected):
            reader.update(wider)
        assert wider.get_parameter("0.weight").data_ptr() == before
        with pytest.raises(fastps.LayoutError, match=r"'0.weight': expected float32, found float64; convert the model as job"):
            reader.update(_model().double())
        cured = r"'0.weight': expected a tensor of this process on the CPU, found one in {}; give it copies: update\("
        with pytest.raises(fastps.UnsupportedError, match=cured.format(r"memory that torch shares .*")):
            reader.update(_model().share_memory())
        with pytest.raises(fastps.UnsupportedError, match=cured.format("memory of meta")):
            reader.update(_model().to("meta"))
        with torch.inference_mode():
            frozen = _model()
        with pytest.raises(fastps.UnsupportedError, match=cured.format(r"torch.inference_mode\(\), .*")):
            reader.update(frozen)
        reader.update()
        reader.update(_model())


def test_a_write_into_the_weights_is_the_readers_own_until_its_next_update() -> None:
    model = _model()
    with _wrapped(model) as optimizer, fastps.reader(optimizer.worker.store.job) as reader:
        before, other = copy.deepcopy(model), _model(1)
        for _ in range(2):
            reader.update(other)
            with torch.no_grad():
                next(other.parameters()).add_(1.0)
            assert _same(model, before) and not _same(other, before)
        reader.update(other)
        assert _same(other, before)


def test_a_backward_through_a_graph_of_an_earlier_version_is_refused() -> None:
    model = _model()
    with _wrapped(model) as optimizer, fastps.reader(optimizer.worker.store.job) as reader:
        reader.update(other := _model(1))
        stale = sum((parameter**2).sum() for parameter in other.parameters())
        _step(model, optimizer)
        reader.update(other)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            stale.backward()


def test_a_reader_is_no_worker() -> None:
    """Under ssp:1 an idle worker would stop the others; an idle reader does not."""
    model = _model()
    with _wrapped(model, sync="ssp:1", timeout_s=10) as optimizer, fastps.reader(optimizer.worker.store.job) as reader:
        reader.update(_model(1))
        for _ in range(50):
            _step(model, optimizer)
        assert len(optimizer.statistics()) == 1
        assert reader.newest == 50


@pytest.mark.parametrize("kind", ["plain", "meta", "shared", "double"])
def test_copies_are_the_models_own_wherever_it_is(kind: str) -> None:
    model = _model()
    with _wrapped(model) as optimizer, fastps.reader(optimizer.worker.store.job) as reader:
        other = _model(1)
        if kind == "meta":
            other = other.to("meta")
        if kind == "shared":
            other.share_memory()
        if kind == "double":
            other = other.double()
        reader.update(other, copy=True)
        kept = {name: each.detach() for name, each in other.named_parameters()}  # as a state dict has them
        for one, mine in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(one.to(mine.dtype), mine) and mine.is_shared() == (kind == "shared")
        before = {name: value.clone() for name, value in kept.items()}
        _step(model, optimizer)
        reader.update()
        assert all(torch.equal(value, before[name]) for name, value in other.named_parameters())
        reader.update(other, copy=True)
        assert not torch.equal(next(other.parameters()), next(iter(before.values())))
        if kind != "shared":
            assert all(torch.equal(kept[name], value) for name, value in before.items())
        with pytest.raises(fastps.LayoutError, match="expected shape"):
            wider = _model()
            wider[3] = torch.nn.Linear(16, 3)  # type: ignore[index]
            reader.update(wider, copy=True)


def test_a_reader_can_tell_replaced_weights_which_make_no_version() -> None:
    model, other = _model(), _model(1)
    with _wrapped(model) as optimizer, fastps.reader(optimizer.worker.store.job) as reader:
        reader.update(other)
        assert not reader.is_behind
        optimizer.replace_weights([torch.ones_like(each) for each in model.parameters()])
        assert reader.is_behind and reader.newest == reader.version
        reader.update()
        assert not reader.is_behind and _same(model, other)


def test_an_update_after_the_job_has_ended_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastps.store.reader._LOOK_NS", 0)
    said, model, other = listen(), _model(), _model(1)
    with _wrapped(model) as optimizer:
        reader = fastps.reader(job := optimizer.worker.store.job)
        reader.update(other)
        _step(model, optimizer)
        reader.update()
        reader.update()
        assert not said
    with _wrapped(model, job=job) as optimizer:  # begun anew under its name
        for _ in range(3):
            assert reader.update() == 1
    assert [each for each in said if "has ended, or has begun anew" in each] == [
        f"job {job} has ended, or has begun anew: this reader reads its last weights, of version 1; open another,"
        " or open it with follow=True"
    ]
    reader.close()
