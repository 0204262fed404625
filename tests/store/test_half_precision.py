"""Gradients pushed in half precision: what is rounded, what is not, and what stays as with single precision."""

from pathlib import Path

import numpy as np
import pytest
import torch

import fastps
from fastps.lab.demo.data import load
from fastps.lab.demo.options import TrainingOptions
from fastps.lab.demo.worker_main import TrainingRun
from tests.support import processes
from tests.support.torch_optimizers import OPTIMIZERS, alone, batches_of, new_model, relative_difference  # noqa: F401 - a fixture

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])


def _loss(model: torch.nn.Module, seed: int) -> torch.Tensor:
    [(inputs, labels)] = batches_of(1, 16, seed)
    return torch.nn.functional.cross_entropy(model(inputs), labels)


def _round_gradients(model: torch.nn.Module, dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.to(dtype).float()


@pytest.mark.sampled(2)
@DTYPES
@pytest.mark.parametrize(("name", "sync"), [("momentum", "bsp"), ("adamw", "asp"), ("rmsprop", "bsp"), ("nadam", "asp")])
def test_one_worker_does_what_torch_does_with_rounded_gradients(name: str, dtype: torch.dtype, sync: str) -> None:
    model, plain = new_model(), new_model()
    expected = OPTIMIZERS[name](plain.parameters())
    with fastps.DistributedOptimizer(OPTIMIZERS[name](model.parameters()), sync, push_dtype=dtype) as optimizer:
        for step in range(50):
            for each, by in ((model, optimizer), (plain, expected)):
                by.zero_grad()
                _loss(each, step).backward()
            _round_gradients(plain, dtype)
            optimizer.step()
            expected.step()
    # Torch's square root is an ulp off at times; a gradient may then be rounded to the other side.
    assert relative_difference(model, plain) <= (0 if name == "momentum" else 1e-4)


@DTYPES
def test_what_is_done_to_gradients_after_backward_is_pushed(dtype: torch.dtype) -> None:
    """Clipped by hand, added to by a second backward, or set to None."""
    model, plain = new_model(), new_model()
    expected = torch.optim.SGD(plain.parameters(), lr=0.1)
    with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), push_dtype=dtype) as optimizer:
        for step in range(6):
            for each, by in ((model, optimizer), (plain, expected)):
                by.zero_grad()
                _loss(each, step).backward()
                if step % 3 == 0:
                    torch.nn.utils.clip_grad_norm_(each.parameters(), 0.01)
                elif step % 3 == 1:
                    _loss(each, 100 + step).backward()
                else:
                    next(each.parameters()).grad = None
            _round_gradients(plain, dtype)
            optimizer.step()
            expected.step()
            assert relative_difference(model, plain) < 1e-6, step


@DTYPES
def test_zeroed_gradients_are_pushed_as_zeros(dtype: torch.dtype) -> None:
    model, before = new_model(), new_model()
    with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), push_dtype=dtype) as optimizer:
        _loss(model, 0).backward()
        optimizer.step()
        before.load_state_dict(model.state_dict())
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        assert relative_difference(model, before) == 0


def test_the_gradient_stays_in_single_precision_and_stays_there() -> None:
    model = new_model()
    with fastps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), "asp", push_dtype=torch.bfloat16
    ) as optimizer:
        _loss(model, 0).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        values = [gradient.clone() for gradient in gradients if gradient is not None]
        optimizer.step()
        for parameter, gradient, value in zip(model.parameters(), gradients, values, strict=True):
            assert parameter.grad is gradient
            assert gradient.dtype == torch.float32
            assert torch.equal(gradient, value)


def test_slots_take_half_the_memory() -> None:
    sizes = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = torch.nn.Linear(1000, 1000)
        with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), "asp", push_dtype=dtype) as optimizer:
            arena = optimizer.worker.store.arena
            sizes[dtype] = arena.gradient_offset(0, 1) - arena.gradient_offset(0, 0)
    assert sizes[torch.bfloat16] < 0.51 * sizes[torch.float32]


@DTYPES
def test_clipping_by_the_policy_is_by_the_norm_of_the_unrounded_gradient(dtype: torch.dtype) -> None:
    """A norm in float16 would overflow long before the gradient does."""
    model = torch.nn.Linear(10_000, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    with fastps.DistributedOptimizer(inner, "bsp,clip=1", push_dtype=dtype) as optimizer:
        model.weight.grad = torch.full((1, 10_000), 60_000.0)
        optimizer.step()
        assert torch.allclose(model.weight, torch.full((1, 10_000), -0.01), rtol=1e-2)


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_workers_sums_are_made_in_single_precision(sync: str) -> None:
    """Two gradients of 256 and 1: their mean has more digits than bfloat16."""

    def work(rank: int) -> list[float]:
        weight = torch.nn.Parameter(torch.zeros(100))
        with fastps.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), sync, push_dtype=torch.bfloat16) as optimizer:
            optimizer.wait_for_start()
            weight.grad = torch.full((100,), 1.0 if rank else 256.0)
            optimizer.step()
            if rank == 0:
                optimizer.wait_for_others()
            return sorted(set(weight.tolist()))

    assert processes.results(processes.start_job(work, 2), 30)[0] == ([-128.5] if sync == "bsp" else [-257.0])


def test_a_store_without_torch_pushes_float16() -> None:
    with fastps.Store.create({"w": np.zeros(5, np.float32)}, fastps.SGD(lr=1.0), gradient_type="float16") as store:
        worker = store.attach(0)
        assert worker.gradients["w"].dtype == np.float16
        worker.step({"w": np.full(5, 0.1)})
        assert np.array_equal(worker.weights["w"], np.full(5, -np.float32(np.float16(0.1))))
        worker.close()


@pytest.mark.slow
def test_a_training_run_pushes_what_its_options_say(tmp_path: Path) -> None:
    found = {}
    for name in ("float32", "bfloat16"):
        file = tmp_path / f"{name}.npz"
        options = TrainingOptions(workers=1, epochs=1, data="digits", push_dtype=name, weights_file=str(file))
        TrainingRun(options, load("digits"), 0).run()
        with np.load(file) as arrays:
            found[name] = np.concatenate([arrays[key].reshape(-1) for key in arrays.files])
    difference = np.abs(found["float32"] - found["bfloat16"]).max()
    assert 1e-5 < difference < 0.05, "the same run, but for what rounding to 8 bits does"


def test_what_cannot_be_pushed_in_half_precision_is_refused() -> None:
    with pytest.raises(fastps.UnsupportedError, match=r"NumPy has no other half\), found 'bfloat16'"):
        fastps.Store.create({"w": np.zeros(5, np.float32)}, fastps.SGD(lr=1.0), gradient_type="bfloat16")
    parameter = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(fastps.UsageError, match=r"push_dtype: expected torch\.float32"):
        fastps.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), push_dtype=torch.float64)
    with (
        fastps.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), push_dtype=torch.bfloat16) as optimizer,
        pytest.raises(fastps.UsageError, match="pushed in it: leave push_dtype out"),
    ):
        optimizer.expose_gradients()
