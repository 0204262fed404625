"""Gradients, graphs and tensors that a script holds across wrapping, steps and close are what torch makes of them."""

import contextlib
import copy
import mmap
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastps
from fastps.torch.tensor_loops import why_not_compiled
from tests.support import processes
from tests.support.torch_optimizers import BATCH, as_in_torch, batches_of, new_model, relative_difference, train_on


def test_a_grad_scaler_unscales_and_skips_as_in_torch() -> None:
    def run(model: torch.nn.Module, optimizer: Any) -> list[list[float]]:
        scaler, seen = torch.amp.GradScaler("cpu", init_scale=300.0), []  # type: ignore[attr-defined]
        for step, (inputs, labels) in enumerate(batches_of(4, BATCH)):
            optimizer.zero_grad()
            scaler.scale(torch.nn.functional.cross_entropy(model(inputs), labels)).backward()
            if step == 1:
                scaler.unscale_(optimizer)
            if step == 2:
                model[0].weight.grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            seen.append([float(each.grad.norm()) for each in model.parameters()])
        assert getattr(optimizer, "version", 4) == 4, "a skipped step counts, so that nobody waits for it"
        return seen

    found, expected = as_in_torch(run)
    assert found == expected


def test_a_scaled_step_that_is_interrupted_does_not_scale_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # type: ignore[attr-defined]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0)) as optimizer:
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 1)).sum()).backward()
            with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
                if step == 1:
                    patched.setattr(optimizer.worker, "advance", interrupt)
                scaler.step(optimizer)
            scaler.update()
        assert model.weight.item() == -3.0


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("sync", ["bsp", "asp"])
@pytest.mark.sampled(2)
def test_a_backward_through_a_graph_of_earlier_weights_is_refused_as_in_torch(sync: str) -> None:
    one, other = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    with fastps.DistributedOptimizer(torch.optim.SGD([one, other], lr=0.1), sync=sync) as optimizer:
        stale, current, retained = one.square().sum(), other.square().sum(), one.square().sum()
        retained.backward(retain_graph=True)
        optimizer.step()  # pushes nothing for the other one
        current.backward()
        for graph in (stale, retained):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                graph.backward()
        optimizer.step()
        optimizer.zero_grad()
        fresh = other.square().sum()
        optimizer.step()  # pushes nothing at all
        fresh.backward()
        assert other.grad is not None


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("way", ["replace_weights", "take_newest", "take_newest_weights", "load_state_dict"])
def test_a_backward_through_a_graph_of_weights_that_others_have_changed_is_refused(way: str) -> None:
    own, other = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    job: dict[str, Any] = {"sync": "asp", "job": f"graph-{os.getpid()}", "workers": 2}
    optimizer = fastps.DistributedOptimizer(torch.optim.SGD([own], lr=0.1), rank=0, **job)
    with fastps.DistributedOptimizer(torch.optim.SGD([other], lr=0.1), rank=1, **job) as pushing, optimizer:
        ways: dict[str, Callable[[], Any]] = {
            "replace_weights": lambda: optimizer.replace_weights([torch.full((3,), 100.0)]),
            "load_state_dict": lambda: optimizer.load_state_dict(optimizer.state_dict()),
        }
        change = ways.get(way, getattr(optimizer, way))
        if way != "replace_weights":
            fresh = own.square().sum()
            change()
            fresh.backward()  # nothing has changed
            other.grad = torch.ones(3)
            pushing.step()
        stale = own.square().sum()
        change()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            stale.backward()


def test_inference_mode_leaves_nothing_that_a_later_backward_cannot_use() -> None:
    model, plain = new_model(), new_model()
    batches = batches_of(8, BATCH)
    train_on(plain, torch.optim.SGD(plain.parameters(), lr=0.1), batches)
    with torch.inference_mode():
        optimizer = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for inputs, labels in batches[:6]:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        with torch.inference_mode():
            optimizer.step()
            optimizer.take_newest()
            optimizer.state_dict()
    inner = optimizer._inner
    with torch.inference_mode():
        optimizer.close()
    train_on(model, inner, batches[6:])
    assert relative_difference(model, plain) == 0.0


@pytest.mark.skipif(
    why_not_compiled() is not None,
    reason="by attributes they go stale: docs/architecture/decisions/015-tensors-without-python.md",
)
def test_tensors_over_a_parameters_memory_follow_it_from_before_wrapping_to_after_close() -> None:
    said = mmap.mmap(-1, 2)

    def work(rank: int) -> list[bool]:
        model = new_model()
        before = model.state_dict()
        with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sync="asp", timeout_s=30) as optimizer:
            train_on(model, optimizer, batches_of(2, BATCH, seed=rank))
            during = model.state_dict()
            if rank == 1:
                processes.wait_until(lambda: said[0], 60)
                train_on(model, optimizer, batches_of(20, BATCH))  # into all buffers of the arena
        expected = copy.deepcopy(model.state_dict())
        said[rank] = 1
        processes.wait_until(lambda: said[1], 60)
        found = [torch.equal(expected[name], each[name]) for each in (before, during) for name in expected]
        with torch.no_grad():
            model[0].weight.zero_()
        return [all(found), not before["0.weight"].any(), not during["0.weight"].any()]

    assert processes.results(processes.start_job(work, 2), 60) == [[True] * 3] * 2


# -- between two steps, under disciplines that do not wait -----------------------------------------


def _none_then_zeros(model: torch.nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    optimizer.zero_grad(set_to_none=False)


def _zeros_then_none(model: torch.nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)
    for parameter in model.parameters():
        parameter.grad = None
    optimizer.zero_grad(set_to_none=False)


def _frozen(model: torch.nn.Module, optimizer: Any) -> None:
    parameter = next(model.parameters()).requires_grad_(False)
    parameter.grad = None
    optimizer.zero_grad(set_to_none=False)


@torch.inference_mode()
def _zeros_in_inference_mode(model: torch.nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("clear", [_none_then_zeros, _zeros_then_none, _frozen, _zeros_in_inference_mode])
@pytest.mark.parametrize("sync", ["bsp", "asp"])
@pytest.mark.sampled(2)
def test_gradients_are_cleared_as_in_torch_between_steps(clear: Callable[[torch.nn.Module, Any], None], sync: str) -> None:
    def run(model: torch.nn.Module, optimizer: Any) -> None:
        batches = batches_of(4, BATCH)
        train_on(model, optimizer, batches[:2])
        clear(model, optimizer)
        optimizer.step()
        train_on(model, optimizer, batches[2:])

    as_in_torch(run, sync=sync)


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_gradients_that_a_script_holds_stay_those_of_the_parameters(sync: str) -> None:
    """Fetched once, scaled in each step; one of them required a gradient for a while."""

    def run(model: torch.nn.Module, optimizer: Any) -> None:
        held: list[torch.Tensor] = []
        for inputs, labels in batches_of(5, BATCH):
            optimizer.zero_grad(set_to_none=False)
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            held = held or [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            torch._foreach_mul_(held, 0.5)
            held[0].requires_grad_(True)
            optimizer.step()

    as_in_torch(run, sync=sync)


@pytest.mark.parametrize("sync", ["bsp", "asp", "ssp:3"])
def test_gradients_of_zero_and_a_scripts_own_buffer_count_after_a_step_that_does_not_wait(sync: str) -> None:
    def run(model: torch.nn.Module, optimizer: Any) -> None:
        for step, (inputs, labels) in enumerate(batches_of(4, BATCH)):
            optimizer.zero_grad(set_to_none=False)
            if step == 0:
                torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()  # without a gradient, a parameter goes on by its momentum
        flat = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
        for parameter, view in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
            parameter.grad = view.view_as(parameter)
        for inputs, labels in batches_of(4, BATCH):
            flat.zero_()
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            flat.mul_(0.5)
            optimizer.step()

    as_in_torch(run, sync=sync)
