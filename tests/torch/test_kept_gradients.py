"""Tensors that a script keeps stay as they are: gradients of earlier backwards, states, shown and averaged weights."""

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastps
from tests.support.torch_optimizers import with_and_without

pytestmark = pytest.mark.usefixtures("loops")
Model = torch.nn.Module
Optimizer = torch.optim.Optimizer
Zero = Callable[[Optimizer, Model], None]
ZEROS: dict[str, Zero] = {
    "optimizer.zero_grad": lambda optimizer, model: optimizer.zero_grad(),
    "model.zero_grad": lambda optimizer, model: model.zero_grad(),
    "p.grad = None": lambda optimizer, model: [setattr(each, "grad", None) for each in model.parameters()] and None,
}


def _data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(8, 3, generator=draw), torch.randn(8, 1, generator=draw), torch.randn(8, 1, generator=draw)


def _surgery(optimizer: Optimizer, model: Model, zero: Zero, kept: list[Any]) -> None:
    """Two tasks: each one's gradient is kept, and the part of one that is against the other is taken away."""
    inputs, *targets = _data()
    found = []
    for target in targets:
        zero(optimizer, model)
        (model(inputs) - target).square().mean().backward()
        found.append([each.grad for each in model.parameters()])
    for each, one, other in zip(model.parameters(), *found, strict=True):
        dot = (one * other).sum()
        each.grad = one + other - min(dot, torch.zeros(())) / one.square().sum() * one
    optimizer.step()


def _last_step(optimizer: Optimizer, model: Model, zero: Zero, kept: list[Any]) -> None:
    """The gradients of the last step, compared with those of this one, and a momentum by hand."""
    inputs, *targets = _data()
    last: list[Any] = []
    for step in range(4):
        zero(optimizer, model)
        (model(inputs * (step + 1)) - targets[step % 2]).square().mean().backward()
        now = [each.grad for each in model.parameters()]
        kept += [float((one * other).sum()) for one, other in zip(now, last, strict=False)]
        if last:
            for each, before in zip(model.parameters(), last, strict=True):
                each.grad = each.grad + 0.5 * before
        last = now
        optimizer.step()


def _variance(optimizer: Optimizer, model: Any, zero: Zero, kept: list[Any]) -> None:
    """The variance of the gradient over micro batches, of which each is kept as a tensor of another form."""
    inputs, target, _ = _data()
    found = []
    for part in range(4):
        zero(optimizer, model)
        (model(inputs[part * 2 : part * 2 + 2]) - target[part * 2 : part * 2 + 2]).square().mean().backward()
        found.append([model.weight.grad.view(-1), model.weight.grad.detach().t(), model.weight.grad.data][part % 3].flatten())
    kept.append(float(torch.stack(found).var(0).sum()))
    model.weight.grad = torch.stack(found).mean(0).view(1, 3)
    optimizer.step()


def _kept_in_place(optimizer: Optimizer, model: Any, zero: Zero, kept: list[Any]) -> None:
    """A gradient that is set again accumulates in place, and what an autograd graph has saved stays."""
    inputs, target, other = _data()
    (model(inputs) - target).square().mean().backward()
    first = model.weight.grad
    factor = torch.ones(1, 3, requires_grad=True)
    product = (factor * first).sum()  # saves the gradient
    zero(optimizer, model)
    (model(inputs) - other).square().mean().backward()
    product.backward()
    kept += [factor.grad.tolist(), first.tolist()]
    model.weight.grad = first
    (model(inputs) - other).square().mean().backward()
    kept += [first.tolist(), model.weight.grad is first]
    optimizer.step()


def _pointed_elsewhere(optimizer: Optimizer, model: Model, zero: Zero, kept: list[Any]) -> None:
    """p.grad stays the same tensor, over other memory."""
    inputs, target, _ = _data()
    for step in range(6):
        zero(optimizer, model)
        (model(inputs * (step + 1)) - target).square().mean().backward()
        for each in model.parameters():
            if step == 1:
                each.grad.data = each.grad.data / 2
            elif step == 3:
                each.grad.set_(torch.ones_like(each))
        optimizer.step()


def _assert_as_in_torch(script: Callable[..., None], zero: Zero, sync: str) -> None:
    """The weights in the end, and what the script kept, are those of torch alone."""

    def run(wrap: Callable[[Any], Any]) -> tuple[list[Any], list[Any]]:
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 1)
        kept: list[Any] = []
        script(wrap(torch.optim.SGD(model.parameters(), lr=0.1)), model, zero, kept)
        return [each.tolist() for each in model.parameters()], kept

    found, expected = with_and_without(run, sync=sync)
    assert found == expected


@pytest.mark.sampled(8)
@pytest.mark.parametrize("zero", list(ZEROS))
@pytest.mark.parametrize("script", [_surgery, _last_step, _variance, _kept_in_place, _pointed_elsewhere])
@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_scripts_that_keep_gradients_compute_what_they_do_in_torch(script: Callable[..., None], zero: str, sync: str) -> None:
    _assert_as_in_torch(script, ZEROS[zero], sync)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("script", [_surgery, _last_step, _variance])
def test_gradients_that_are_zeroed_in_place_are_the_tensors_that_were_kept(script: Callable[..., None]) -> None:
    _assert_as_in_torch(script, lambda optimizer, model: optimizer.zero_grad(set_to_none=False), "bsp")


def _backward(model: Model, factor: float) -> None:
    (model(torch.ones(1, 3)) * factor).sum().backward()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_arrays_and_tensors_that_are_kept_outlive_the_job(sync: str) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sync=sync)
    kept, arrays = [], []
    for factor in range(1, 6):
        optimizer.zero_grad()
        _backward(model, factor)
        kept.append(model.weight.grad)
        arrays.append(model.weight.grad.numpy())
        optimizer.step()
    optimizer.zero_grad()
    _backward(model, 6.0)
    last = model.weight.grad
    optimizer.close()
    assert model.weight.grad.tolist() == last.tolist() == [[6.0] * 3]
    del optimizer
    gc.collect()
    assert [each.tolist() for each in kept] == [[[float(factor)] * 3] for factor in range(1, 6)]
    assert [array.shape for array in arrays] == [(1, 3)] * 5 and all(array.sum() > 0 for array in arrays)


def test_write_to_a_kept_gradient_does_not_change_a_push_that_waits() -> None:
    model = torch.nn.Linear(3, 1, bias=False)
    other = torch.nn.Linear(3, 1, bias=False)
    job: dict[str, Any] = {"job": f"kept-{time.monotonic_ns()}", "workers": 2}
    optimizer, pushing = (
        fastps.DistributedOptimizer(torch.optim.SGD(each.parameters(), lr=1.0), "softsync:1", rank=rank, **job)
        for rank, each in enumerate((model, other))
    )
    start = model.weight.detach().clone()
    optimizer.zero_grad()
    _backward(model, 1.0)
    kept = model.weight.grad
    optimizer.step()  # waits for the other's push, because a fold takes two
    kept.mul_(1000.0)
    _backward(other, 1.0)
    pushing.step()
    pushing.close()
    optimizer.wait_for_others()
    moved = (start - model.weight.detach()).tolist()
    optimizer.close()
    assert moved == [pytest.approx([1.0] * 3)], "the mean of both pushes"
    assert kept.tolist() == [[1000.0] * 3]


def test_nothing_else_that_is_handed_out_changes_later() -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = fastps.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model=model)
    _backward(model, 1.0)
    optimizer.step()
    kept: list[torch.Tensor] = []

    def add(weights: list[torch.Tensor]) -> list[torch.Tensor]:
        kept.extend(weights)
        return [each + 1 for each in weights]

    kept += [value for entry in optimizer.state_dict()["state"].values() for value in entry.values()]
    kept += [array for array in map(torch.as_tensor, optimizer.model_buffers().values())]
    optimizer.replace_weights(add)
    with optimizer.shown_weights([torch.zeros(1, 3), torch.zeros(1)]):
        kept.append(model.weight.grad if model.weight.grad is not None else torch.zeros(1))
    before = [each.clone() for each in kept]
    for factor in (2.0, 3.0, 4.0, 5.0):
        optimizer.zero_grad()
        _backward(model, factor)
        optimizer.step()
    optimizer.close()
    assert all(torch.equal(one, other) for one, other in zip(kept, before, strict=True))


def test_a_gradient_that_was_pointed_at_other_memory_is_pushed_from_there() -> None:
    """Neither the tensor nor its version tells: `p.grad.data = ...` changes its address alone."""
    weight = torch.nn.Parameter(torch.zeros(2))
    with fastps.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0)) as optimizer:
        for _ in range(2):
            optimizer.zero_grad()
            weight.sum().backward()
            assert weight.grad is not None
            weight.grad.data = torch.tensor([3.0, 5.0])
            optimizer.step()
        assert weight.tolist() == [-6.0, -10.0]


def _turn_data(gradient: torch.Tensor) -> None:
    gradient.data = gradient.data.t()


def _set_to_turned(gradient: torch.Tensor) -> None:
    gradient.set_(gradient.data.t())  # type: ignore[call-overload]


@pytest.mark.parametrize("sync", ["bsp", "asp"])
@pytest.mark.parametrize("turn", [_turn_data, _set_to_turned, lambda gradient: gradient.t_()])
def test_a_gradient_that_was_turned_over_its_own_memory_is_pushed_so(turn: Callable[[torch.Tensor], Any], sync: str) -> None:
    def run(wrap: Callable[[Any], Any]) -> list[list[float]]:
        weight = torch.nn.Parameter(torch.zeros(2, 2))
        optimizer = wrap(torch.optim.SGD([weight], lr=1.0))
        for step in range(3):
            optimizer.zero_grad()
            (weight * torch.tensor([[1.0, 2.0], [4.0, 8.0]])).sum().backward()
            if step:
                assert weight.grad is not None
                turn(weight.grad)
            optimizer.step()
        return weight.tolist()  # type: ignore[no-any-return]

    found, expected = with_and_without(run, sync=sync)
    assert found == expected == [[-3.0, -10.0], [-8.0, -24.0]]
