"""The option sets with which torch tests its own optimizers: workers end with torch's weights.

All dense ones have torch's bits. On the CPU torch may take square roots from a library (MKL) that does not round all of them
correctly, and then some last digits differ; so the tests give torch correctly rounded ones.
"""

import inspect
import sys
import types
import unittest
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import fastps
from tests.support import processes
from tests.support.sizes import sample_and_full
from tests.support.torch_optimizers import with_and_without

ELSEWHERE = {"LBFGS", "Muon"}  # of closures, and for matrices alone: tests/torch/any_optimizer
OF_TABLES = {"SparseAdam"}


KINDS = {name: kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
NAMES = sorted(name for name, kind in KINDS.items() if issubclass(kind, torch.optim.Optimizer))
NAMES = [name for name in NAMES if name not in {"Optimizer", *ELSEWHERE}]


def _cases(kind: Any) -> list[dict[str, Any]]:
    """The arguments of each of torch's cases. To import them takes a second, so only the test does it."""
    if "expecttest" not in sys.modules:  # torch's helpers import it for tests of their own
        stub: Any = types.ModuleType("expecttest")
        stub.TestCase, stub.assert_expected_inline = unittest.TestCase, None
        sys.modules["expecttest"] = stub
    from torch.testing._internal.common_optimizers import optim_db

    (found,) = [info.optim_inputs_func(device="cpu") for info in optim_db if info.optim_cls is kind]
    return [dict(case.kwargs) for case in found]


def _rounded_root(values: torch.Tensor) -> torch.Tensor:
    """The square roots, each the nearest float."""
    return torch.from_numpy(np.asarray(np.sqrt(values.detach().numpy())))


def _weights(kind: Any, options: dict[str, Any], wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
    """The parameters after twelve steps, in which one of them is frozen and unfrozen."""
    torch.manual_seed(0)
    parameters = [
        torch.nn.Parameter(torch.randn(4, 3)),
        torch.nn.Parameter(torch.randn(4)),
        torch.nn.Parameter(torch.randn(())),
    ]
    optimizer = wrap(kind(parameters, **options))
    inputs = torch.randn(5, 3)
    for step in range(12):
        parameters[1].requires_grad_(step not in (6, 7))
        optimizer.zero_grad()
        ((inputs @ parameters[0].t() + parameters[1]) * parameters[2]).square().mean().backward()
        optimizer.step()
    return [each.detach().clone() for each in parameters]


def _table(kind: Any, options: dict[str, Any], wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
    """A table after twelve steps, each with a few of its rows, one of them twice."""
    torch.manual_seed(0)
    layer = torch.nn.Embedding(6, 3, sparse=True)
    optimizer = wrap(kind(layer.parameters(), **options))
    for step in range(12):
        optimizer.zero_grad()
        layer(torch.tensor([step % 6, (step * step) % 6, step % 6])).square().sum().backward()
        optimizer.step()
    return [layer.weight.detach().clone()]


@sample_and_full(4, 1, "every")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(6)
def test_one_worker_ends_with_torchs_weights(name: str, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = KINDS[name]
    for options in _cases(kind)[::every]:
        _compare(kind, options, monkeypatch)


def _compare(kind: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    name = kind.__name__
    weights = _table if name in OF_TABLES else _weights
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "sqrt", _rounded_root)
        patch.setattr(torch.Tensor, "sqrt_", lambda values: values.copy_(_rounded_root(values)))
        both = with_and_without(lambda wrap: weights(kind, options, wrap))
    for own, plain in zip(*both, strict=True):
        if name in OF_TABLES:
            assert torch.allclose(own, plain, rtol=3e-7, atol=1e-8), options
        else:
            assert torch.equal(own, plain), options


STEPS = 8
SHAPES = {"Muon": [(4, 3), (4, 4)]}  # of the parameters; of others:
OTHERS = [(4, 3), (4,), ()]


def _parameters(name: str) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES.get(name, OTHERS)]


def _loss(parameters: Sequence[torch.Tensor], number: int) -> torch.Tensor:
    hidden = torch.randn(5, 3, generator=torch.Generator().manual_seed(number)) @ parameters[0].t()
    last = (hidden + parameters[1]) * parameters[2] if len(parameters) == 3 else torch.tanh(hidden) @ parameters[1]
    return last.square().mean()


def _summed(kind: Any, options: dict[str, Any], workers: int) -> list[list[float]]:
    """The parameters of one process that adds up the gradients of all workers in their order."""
    parameters = _parameters(kind.__name__)
    optimizer = kind(parameters, **options)
    for step in range(STEPS):
        sums: list[torch.Tensor] = []
        for rank in range(workers):
            found = torch.autograd.grad(_loss(parameters, 100 * step + rank), parameters)
            sums = [one + other for one, other in zip(sums, found, strict=True)] if sums else list(found)
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = total * (1 / workers)
        optimizer.step()
    return [parameter.flatten().tolist() for parameter in parameters]


def _of_workers(kind: Any, cases: list[dict[str, Any]], workers: int) -> list[list[list[list[float]]]]:
    """Of each worker the parameters that each of these option sets ends with, in one job after the other."""

    def train(rank: int) -> list[list[list[float]]]:
        torch.set_num_threads(1)
        found = []
        for options in cases:
            parameters = _parameters(kind.__name__)
            with fastps.DistributedOptimizer(kind(parameters, **options)) as optimizer:
                for step in range(STEPS):
                    optimizer.zero_grad()
                    _loss(parameters, 100 * step + rank).backward()
                    optimizer.step()
                found.append([parameter.flatten().tolist() for parameter in parameters])
        return found

    return processes.results(processes.start_job(train, workers), 120)


IMPLEMENTATIONS = ["foreach", "fused"]  # "differentiable" is for parameters that are no leaves


@sample_and_full(5, 1, "every")
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("is_own", [False, True], ids=["class", "subclass"])
@pytest.mark.parametrize("name", [name for name in [*NAMES, "Muon"] if name in KINDS and name not in OF_TABLES])
@pytest.mark.sampled(9)
def test_workers_end_with_the_weights_of_one_process_that_sums_in_their_order(
    name: str, is_own: bool, workers: int, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A subclass runs in Python, where torch's ways to run it have their own bits."""
    kind, cases = KINDS[name], _cases(KINDS[name])
    if is_own:
        kind = type(name, (kind,), {})
        known = inspect.signature(KINDS[name]).parameters
        cases = [*cases, *({**case, way: True} for way in IMPLEMENTATIONS if way in known for case in cases)]
    monkeypatch.setattr(torch.Tensor, "sqrt", _rounded_root)
    monkeypatch.setattr(torch.Tensor, "sqrt_", lambda values: values.copy_(_rounded_root(values)))
    torch.set_num_threads(1)
    expected = [_summed(kind, options, workers) for options in cases[::every]]
    for found in _of_workers(kind, cases[::every], workers):
        for options, own, plain in zip(cases[::every], found, expected, strict=True):
            assert own == plain, options
