"""Parameters in double precision: the results are those of torch's optimizers in double, to twelve digits."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fastps
from fastps.torch.placements.placed import placed
from tests.support.rules import lazy_rule
from tests.support.torch_optimizers import BATCH, OPTIMIZERS, STEPS, as_in_torch, batches_of, new_model, train_on

Batches = list[tuple[torch.Tensor, torch.Tensor]]
ADAM = OPTIMIZERS["adam"]
# An optimizer of each rule; the fold's tests have all options of each.
RULES = ("nesterov", "adamw-amsgrad", "nadam-decays", "rmsprop-all", "adagrad-decays", "radam", "adamax", "adadelta-decay")


def _double(seed: int = 0) -> torch.nn.Module:
    """A model whose weights have digits beyond float32's."""
    model = new_model(seed).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 / 3)
    return model


def _batches(steps: int, size: int = BATCH) -> Batches:
    return [(inputs.double() / 3, labels) for inputs, labels in batches_of(steps, size)]


def _vector(model: torch.nn.Module) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


# -- training --------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", RULES)
def test_one_worker_equals_torch_in_double_for_200_steps(name: str) -> None:
    def run(model: torch.nn.Module, optimizer: Any) -> Any:
        train_on(model, optimizer, _batches(STEPS))
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
        return optimizer

    optimizer, _ = as_in_torch(run, OPTIMIZERS[name], most=1e-12, model=_double, sync="bsp")
    assert optimizer.worker.store.layout.gradient_type == "float64"


@pytest.fixture
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.slow
@pytest.mark.usefixtures("double_by_default")
def test_nadam_equals_torch_also_where_double_is_the_default_type() -> None:
    def run(model: torch.nn.Module, optimizer: Any) -> Any:
        train_on(model, optimizer, _batches(STEPS))
        return optimizer.state_dict()["state"][0]["mu_product"]

    found, expected = as_in_torch(run, OPTIMIZERS["nadam"], most=1e-12, model=_double)
    assert torch.equal(found, expected)
    assert found.dtype == torch.float64


def test_a_gradient_beyond_float32_is_finite_and_an_infinite_one_is_rejected() -> None:
    weight = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
    with fastps.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), "asp", nonfinite="reject") as optimizer:
        for value in (-1e100, float("inf")):
            weight.grad = torch.full((5,), value, dtype=torch.float64)
            optimizer.step()
        assert weight.tolist() == [1e100] * 5


# -- memory and state ------------------------------------------------------------------------------


def test_weights_are_replaced_shown_and_read_in_double() -> None:
    model, shown, other = _double(), _double(seed=1), _double(seed=2)
    weights = [parameter.detach().clone() for parameter in other.parameters()]
    job = f"doubles-reader-{os.getpid()}"
    with fastps.DistributedOptimizer(ADAM(model.parameters()), model=model, job=job) as optimizer, fastps.reader(job) as reader:
        train_on(model, optimizer, _batches(3))
        with optimizer.shown_weights(weights):
            assert torch.equal(_vector(model), _vector(other))
        optimizer.replace_weights(weights)
        assert torch.equal(_vector(model), _vector(other))
        reader.update(shown)
        assert torch.equal(_vector(shown), _vector(other))
        with pytest.raises(fastps.LayoutError, match="expected float64, found float32; convert the model"):
            reader.update(new_model())


# -- what is refused -------------------------------------------------------------------------------


@lazy_rule(hyper=("learning_rate",))
def _descent(weight: float, gradient: float, learning_rate: float) -> float:
    return weight - learning_rate * gradient


def _mixed() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 2).double(), torch.nn.Linear(2, 1))


@pytest.mark.parametrize(("make", "sentence"), [
    (lambda: ADAM(_mixed().parameters()), "expected float64 for all parameters or for none, found float32 and float64"),
    (lambda: fastps.RuleOptimizer(_double().parameters(), _descent(), learning_rate=0.1),
     "is compiled for float32: expected float32 parameters, found float64"),
], ids=["a mix", "a user's rule"])  # fmt: skip
def test_what_a_job_in_double_cannot_have_is_refused_by_name(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(fastps.UnsupportedError, match=sentence):
        fastps.DistributedOptimizer(make())


def test_a_table_in_double_is_refused() -> None:
    layer = torch.nn.Embedding(5, 2, sparse=True).double()
    with pytest.raises(fastps.UnsupportedError, match=r"expected float32, .* found float64; use model.float\(\)"):
        fastps.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1), model=layer)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_pushed_in_double_only(dtype: torch.dtype) -> None:
    with pytest.raises(fastps.UnsupportedError, match="to be pushed in float64, found"):
        fastps.DistributedOptimizer(ADAM(_double().parameters()), push_dtype=dtype)
    with fastps.DistributedOptimizer(ADAM(_double().parameters()), push_dtype=torch.float64):
        pass
    with pytest.raises(fastps.UsageError, match=r"push_dtype: expected torch.float32, torch\.bfloat16 or"):
        fastps.DistributedOptimizer(ADAM(new_model().parameters()), push_dtype=torch.float64)


def test_doubles_on_a_gpu_are_refused() -> None:
    with FakeTensorMode():
        parameter = torch.empty(3, device="cuda", dtype=torch.float64)
    with pytest.raises(fastps.UnsupportedError, match="a model on a GPU: expected float32, bfloat16 or float16 parameters"):
        placed([parameter], torch.float64, is_told=True)
