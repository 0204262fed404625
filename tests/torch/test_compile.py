"""torch.compile of a model under fastps, with and without the backward in a graph, and of a whole step."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo import compiled_autograd

import fastps
from tests.support.torch_optimizers import BATCH, OPTIMIZERS, batches_of, new_model, one_worker

Step = Callable[[torch.Tensor, torch.Tensor], None]
# Traced and differentiated as by the default compiler, but run by torch's own kernels: no C++ compiler is waited for.
TRACED = "aot_eager"
SLOW = pytest.mark.slow


def _loss(model: Any, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    parameter = next(model.parameters())
    return torch.nn.functional.cross_entropy(model(inputs.to(parameter.dtype)), labels)


def _forward(model: torch.nn.Module, optimizer: Any, backend: str, around: Any = contextlib.nullcontext) -> Step:
    """The model is compiled; autograd runs its backward."""
    compiled = torch.compile(model, backend=backend)

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = _loss(compiled, inputs, labels)
        with around():
            loss.backward()
        optimizer.step()

    return step


def _backward(model: torch.nn.Module, optimizer: Any, backend: str) -> Step:
    """The model is compiled, and the backward as one graph of its own."""
    return _forward(model, optimizer, backend, lambda: compiled_autograd._enable(torch.compile(backend=backend)))


def _whole_step(model: torch.nn.Module, optimizer: Any, backend: str) -> Step:
    """A function with the optimizer's calls is compiled: torch breaks its graph at them."""

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        _loss(model, inputs, labels).backward()
        optimizer.step()

    return torch.compile(step, backend=backend)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _trained(make: Callable[[], torch.nn.Module], kind: Any, backend: str, wrap: Any) -> torch.Tensor:
    model = make()
    optimizer = wrap(OPTIMIZERS["momentum"](model.parameters()))
    step = kind(model, optimizer, backend)
    for inputs, labels in batches_of(4, BATCH):
        step(inputs, labels)
    if isinstance(optimizer, fastps.DistributedOptimizer):
        optimizer.close()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "sync", "backend"), [  # what is compiled knows nothing of the discipline
    (_forward, "bsp", TRACED),
    pytest.param(_backward, "bsp", "inductor", marks=SLOW),
    pytest.param(_whole_step, "asp", "inductor", marks=SLOW),
])  # fmt: skip
def test_a_compiled_model_has_the_weights_of_the_same_model_without_fastps(kind: Any, sync: str, backend: str) -> None:
    expected = _trained(new_model, kind, backend, lambda inner: inner)
    found = _trained(new_model, kind, backend, lambda inner: fastps.DistributedOptimizer(inner, sync))
    if kind is _whole_step:  # torch compiles its own optimizer, too, which rounds otherwise
        assert torch.allclose(found, expected, atol=1e-6)
    else:
        assert torch.equal(found, expected)
    uncompiled = _trained(new_model, lambda *given: _forward(*given[:2], "eager"), backend, lambda inner: inner)
    assert torch.allclose(found, uncompiled, atol=1e-6)


@SLOW
def test_a_compiled_model_in_bfloat16_has_the_weights_of_one_that_is_not_compiled() -> None:
    wrap = fastps.DistributedOptimizer
    expected = _trained(lambda: new_model().bfloat16(), lambda *given: _forward(*given[:2], "eager"), TRACED, wrap)
    found = _trained(lambda: new_model().bfloat16(), _backward, TRACED, wrap)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)


@SLOW
def test_a_model_that_is_compiled_with_less_overhead_has_the_weights_of_torch() -> None:
    def kind(model: torch.nn.Module, optimizer: Any, backend: str) -> Step:
        model.compile(mode="reduce-overhead")
        return _forward(model, optimizer, "eager")

    expected = _trained(new_model, kind, TRACED, lambda inner: inner)
    assert torch.equal(_trained(new_model, kind, TRACED, fastps.DistributedOptimizer), expected)


def test_one_graph_with_the_optimizers_calls_is_refused_by_torch_by_name() -> None:
    with one_worker() as (model, optimizer):

        @torch.compile(backend=TRACED, fullgraph=True)
        def step() -> None:
            optimizer.step()

        _loss(model, *batches_of(1, BATCH)[0]).backward()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"DistributedOptimizer\.step"):
            step()
