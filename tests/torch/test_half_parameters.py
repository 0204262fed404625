"""Parameters in half precision: the arena has float32 master weights, and the model shows their halves.

What halves and doubles have in common is here; test_double_parameters has the rest of the latter.

The reference is a torch optimizer on float32 copies of the weights, which are rounded into the model after each step.
"""

import copy
import logging
import math
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastps
from fastps.advice.auto_sync import move
from fastps.job.layout import Layout, first_difference
from fastps.job.specs import parse_policy
from fastps.store.worker import Worker
from tests.support import processes
from tests.support.rules import lazy_rule
from tests.support.torch_optimizers import OPTIMIZERS, SAME_BITS, batches_of, new_model, one_worker
from tests.torch.placements.test_staged import StagedOptimizer

Batches = list[tuple[torch.Tensor, torch.Tensor]]
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
ALL_DTYPES = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64], ids=["bfloat16", "float16", "float64"]
)
ADAM = OPTIMIZERS["adam"]


class Mixed(torch.nn.Module):
    """Norms in float32 among layers in half precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(13, 17, dtype=dtype)
        self.norm = torch.nn.LayerNorm(17)
        self.last = torch.nn.Linear(17, 3, dtype=dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(inputs).float())
        return self.last(hidden.to(inputs.dtype).tanh())  # type: ignore[no-any-return]


def _half(dtype: torch.dtype) -> torch.nn.Module:
    return new_model().to(dtype)


def _backward(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    inputs = batch[0].to(next(model.parameters()).dtype)
    torch.nn.functional.cross_entropy(model(inputs), batch[1]).backward()


def _train(model: torch.nn.Module, optimizer: Any, batches: Batches) -> None:
    for batch in batches:
        optimizer.zero_grad()
        _backward(model, batch)
        optimizer.step()


def _master_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _reference(
    model: torch.nn.Module, make: Callable[[Any], torch.optim.Optimizer], steps: list[Batches]
) -> list[torch.nn.Parameter]:
    """Train on the mean gradient of each step's batches, and return the masters, of float32 or more."""
    parameters = list(model.parameters())
    masters = [torch.nn.Parameter(parameter.detach().to(_master_dtype(parameter.dtype))) for parameter in parameters]
    optimizer = make(masters)
    for batches in steps:
        pushed = []
        for batch in batches:
            _backward(model, batch)
            pushed.append([each.grad.to(_master_dtype(each.dtype)) for each in parameters if each.grad is not None])
            model.zero_grad()
        for master, *gradients in zip(masters, *pushed, strict=True):
            master.grad = sum(gradients[1:], gradients[0]) * (1 / len(gradients))
        optimizer.step()
        for parameter, master in zip(parameters, masters, strict=True):
            parameter.data.copy_(master.data)
    return masters


def _masters(optimizer: fastps.DistributedOptimizer) -> list[torch.Tensor]:
    return [torch.tensor(weights) for weights in optimizer.worker.weights.values()]


def _vector(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _shown_views(worker: Worker) -> Any:
    """The arena's memory that the parameters show."""
    store = worker.store
    return store.half_views(worker.buffers) if store.arena.shown_type else store.weight_views(worker.buffers)


def _shows_its_masters(model: torch.nn.Module, optimizer: fastps.DistributedOptimizer) -> bool:
    pairs = zip(model.parameters(), _masters(optimizer), strict=True)
    return all(torch.equal(shown, master.to(shown.dtype)) for shown, master in pairs)


# -- training --------------------------------------------------------------------------------------


@pytest.mark.sampled(8)
@DTYPES
@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov", "adam", "adamw", "rmsprop", "nadam", "adadelta"])
def test_one_worker_equals_torch_on_float32_masters(name: str, dtype: torch.dtype) -> None:
    batches = batches_of(60, 16)
    plain, model = _half(dtype), _half(dtype)
    expected = _vector(_reference(plain, OPTIMIZERS[name], [[batch] for batch in batches]))
    with fastps.DistributedOptimizer(OPTIMIZERS[name](model.parameters()), sync="bsp", model=model) as optimizer:
        _train(model, optimizer, batches)
        found = _vector(_masters(optimizer))
        assert _shows_its_masters(model, optimizer)
    difference = float((found - expected).abs().max() / expected.abs().max())
    if name in SAME_BITS:
        assert difference == 0.0
        assert torch.equal(_vector(model.parameters()), _vector(plain.parameters()))
    # Torch's vector square root is an ulp off at times, and a half on the border is then rounded the other way.
    assert difference < 1e-2
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


@DTYPES
def test_steps_too_small_for_a_half_add_up_in_the_masters(dtype: torch.dtype) -> None:
    """1 + 2^-14 is 1 in either half, so an optimizer on the halves themselves never moves."""
    weight = torch.nn.Parameter(torch.ones(5, dtype=dtype))
    with fastps.DistributedOptimizer(torch.optim.SGD([weight], lr=2.0**-14)) as optimizer:
        for _ in range(1024):
            weight.grad = torch.full((5,), -1.0, dtype=dtype)
            optimizer.step()
        assert _masters(optimizer)[0].tolist() == [1 + 2.0**-4] * 5
    assert weight.tolist() == [1 + 2.0**-4] * 5


@DTYPES
def test_layers_in_float32_among_halves_train_as_in_torch(dtype: torch.dtype) -> None:
    batches = batches_of(60, 16)
    plain, model = Mixed(dtype), Mixed(dtype)
    expected = _vector(_reference(plain, OPTIMIZERS["momentum"], [[batch] for batch in batches]))
    with fastps.DistributedOptimizer(OPTIMIZERS["momentum"](model.parameters()), model=model) as optimizer:
        assert optimizer.worker.store.layout.gradient_type == "float32"
        _train(model, optimizer, batches)
        assert torch.equal(_vector(_masters(optimizer)), expected)
        assert _shows_its_masters(model, optimizer)
    assert [parameter.dtype for parameter in model.parameters()] == [dtype, dtype, torch.float32, torch.float32, dtype, dtype]


@pytest.mark.parametrize(
    "make",
    [lambda: _half(torch.bfloat16), lambda: Mixed(torch.bfloat16), lambda: _half(torch.float64)],
    ids=["all", "mixed", "float64"],
)
def test_two_workers_equal_one_process_with_the_gradients_of_both(make: Callable[[], torch.nn.Module]) -> None:
    batches = batches_of(40, 16)

    def work(rank: int) -> list[list[float]]:
        with one_worker(make(), OPTIMIZERS["momentum"], sync="bsp", named=True) as (model, optimizer):
            _train(model, optimizer, batches[rank::2])
            return [master.reshape(-1).tolist() for master in _masters(optimizer)]

    found, other = processes.results(processes.start_job(work, 2), 60)
    assert found == other
    steps = [[batches[2 * step], batches[2 * step + 1]] for step in range(20)]
    expected = _vector(_reference(make(), OPTIMIZERS["momentum"], steps))
    assert torch.equal(_vector(torch.tensor(values, dtype=expected.dtype) for values in found), expected)


SYNCS = ["asp", "asp,shards=2", "ssp:2", "asp,ema=0.9", "softsync:1", "asp,combine=true", "psp:1,0.75,shards=3"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("dtype", "kind", "options"), [
    *((dtype, fastps.DistributedOptimizer, {"sync": sync}) for sync in SYNCS for dtype in (torch.bfloat16, torch.float64)),
    (torch.bfloat16, fastps.DistributedOptimizer, {"server": "process"}),
    (torch.bfloat16, fastps.DistributedOptimizer, {"push_dtype": torch.float32}),
    (torch.bfloat16, StagedOptimizer, {}),
    (torch.float16, StagedOptimizer, {}),
], ids=lambda each: str([*each.values(), "bsp"][0] if isinstance(each, dict) else getattr(each, "__name__", each)))  # fmt: skip
def test_whoever_folds_and_whatever_is_pushed_the_masters_have_torchs_bits_and_are_shown(
    dtype: torch.dtype, kind: Any, options: Any
) -> None:
    """Under every kind of discipline, too."""
    batches, model = batches_of(20, 16), _half(dtype)
    with kind(OPTIMIZERS["momentum"](model.parameters()), model=model, **{"sync": "bsp", **options}) as optimizer:
        for batch in batches:
            _train(model, optimizer, [batch])
            assert _shows_its_masters(model, optimizer)
        found = _vector(_masters(optimizer))
        if "push_dtype" in options:
            with pytest.raises(fastps.UsageError, match="gradients that are pushed in it"):
                optimizer.expose_gradients()
    assert torch.equal(found, _vector(_reference(_half(dtype), OPTIMIZERS["momentum"], [[batch] for batch in batches])))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_move_to_another_arena_takes_masters_and_halves_along(dtype: torch.dtype) -> None:
    """As sync="auto" does after its warm-up."""
    with one_worker(_half(dtype), OPTIMIZERS["adam"], named=True) as (model, optimizer):
        _train(model, optimizer, batches_of(8, 16))
        before, hypers = _masters(optimizer), optimizer.worker.store.hypers
        with closing(move(optimizer.worker, parse_policy("asp,shards=2"), f"halves-{os.getpid()}.1", hypers)) as moved:
            for parameter, master, weights, shown in zip(
                model.parameters(), before, moved.weights.values(), _shown_views(moved), strict=True
            ):
                assert torch.equal(torch.tensor(weights), master)
                assert torch.equal(torch.tensor(shown).view(dtype), parameter.reshape(-1))
        moved.store.close()


@lazy_rule(hyper=("learning_rate",))
def sign_rule(weight: float, gradient: float, learning_rate: float) -> float:
    return weight - learning_rate * (1 if gradient > 0 else -1)


def test_a_users_rule_updates_masters() -> None:
    model = _half(torch.float16)
    first = _vector(model.parameters()).float()
    inner = fastps.RuleOptimizer(model.parameters(), sign_rule(), learning_rate=2.0**-12)
    with fastps.DistributedOptimizer(inner, model=model) as optimizer:
        _train(model, optimizer, batches_of(1, 16))
        assert torch.equal((_vector(_masters(optimizer)) - first).abs(), torch.full_like(first, 2.0**-12))
        assert _shows_its_masters(model, optimizer)


def _norms(weight: float, gradient: float, learning_rate: float) -> tuple[float, float]:
    return weight * weight, gradient * gradient


@lazy_rule(hyper=("learning_rate",), sums=_norms)
def scaled_rule(weight: float, gradient: float, learning_rate: float, weights: float, gradients: float) -> float:
    return weight - learning_rate * math.sqrt(weights / (gradients + 1e-12)) * gradient


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("sync", ["bsp", "asp", "asp,ema=0.9"])
def test_a_rule_with_sums_over_a_parameter_writes_halves(sync: str) -> None:
    model = _half(torch.bfloat16)
    inner = fastps.RuleOptimizer(model.parameters(), scaled_rule(), learning_rate=0.01)
    with fastps.DistributedOptimizer(inner, sync, model=model) as optimizer:
        for batch in batches_of(4, 16):
            before = _vector(_masters(optimizer))
            _train(model, optimizer, [batch])
            assert _shows_its_masters(model, optimizer)
            assert not torch.equal(before, _vector(_masters(optimizer)))


def test_a_float32_table_trains_beside_layers_in_half_precision() -> None:
    torch.manual_seed(0)
    table = torch.nn.EmbeddingBag(50, 8, sparse=True, mode="sum")
    model = torch.nn.ModuleList([table, torch.nn.Linear(8, 3).bfloat16()])
    first = table.weight.detach().clone()
    with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model) as optimizer:
        for _ in range(4):
            optimizer.zero_grad()
            model[1](table(torch.tensor([[1, 2], [3, 4]])).bfloat16()).float().square().sum().backward()
            optimizer.step()
            assert _shows_its_masters(model, optimizer)
        changed = (table.weight != first).any(1).nonzero().reshape(-1)
        assert changed.tolist() == [1, 2, 3, 4]
    half = torch.nn.Embedding(50, 8, sparse=True).bfloat16()
    with pytest.raises(fastps.UnsupportedError, match="because a table is in the arena once, found bfloat16"):
        fastps.DistributedOptimizer(torch.optim.SGD(half.parameters(), lr=0.1))


def test_a_model_that_is_wrapped_again_keeps_its_masters() -> None:
    batches = batches_of(20, 16)
    expected = _reference(_half(torch.bfloat16), ADAM, [[batch] for batch in batches])
    model = _half(torch.bfloat16)
    optimizer = fastps.DistributedOptimizer(ADAM(model.parameters()), model=model)
    _train(model, optimizer, batches[:10])
    before = _masters(optimizer)
    inner = optimizer.unwrap()
    with fastps.DistributedOptimizer(inner, model=model) as optimizer:
        assert torch.equal(_vector(_masters(optimizer)), _vector(before))
        _train(model, optimizer, batches[10:])
        assert torch.allclose(_vector(_masters(optimizer)), _vector(expected), atol=1e-3)


def test_spawned_workers_leave_the_final_halves_in_the_model() -> None:
    def work(rank: int, model: torch.nn.Module) -> None:
        with fastps.DistributedOptimizer(OPTIMIZERS["momentum"](model.parameters()), sync="bsp", model=model) as optimizer:
            _train(model, optimizer, batches_of(20, 16)[rank::2])

    model = _half(torch.bfloat16)
    fastps.spawn(work, (model,), workers=2, model=model, start_method="fork")
    batches = batches_of(20, 16)
    expected = _reference(_half(torch.bfloat16), OPTIMIZERS["momentum"], [batches[step : step + 2] for step in range(0, 20, 2)])
    assert torch.equal(_vector(model.parameters()), _vector(expected).bfloat16())


# -- memory ----------------------------------------------------------------------------------------


@ALL_DTYPES
def test_weights_and_gradients_are_shown_without_a_copy(dtype: torch.dtype) -> None:
    with one_worker(_half(dtype), ADAM, sync="bsp", named=True) as (model, optimizer):
        worker = optimizer.worker
        store, arena = worker.store, worker.store.arena
        begins = [np.frombuffer(each, np.uint8).ctypes.data for each in (store.memory, optimizer._tensors.view)]
        _backward(model, next(iter(batches_of(1, 16))))
        optimizer.step()
        for batch in batches_of(3, 16):
            optimizer.zero_grad()
            _backward(model, batch)
            slots = store.gradient_views(0, worker.slot)
            for parameter, shown, slot in zip(model.parameters(), _shown_views(worker), slots, strict=True):
                assert parameter.data_ptr() == shown.ctypes.data - begins[0] + begins[1]
                assert parameter.grad is not None
                assert (parameter.grad.data_ptr(), parameter.grad.dtype) == (slot.ctypes.data, dtype)
                assert (shown.size, slot.size) == (parameter.numel(), parameter.numel())
            optimizer.step()
        if arena.shown_type:
            assert arena.halves_offset(1) - arena.halves_offset(0) == arena.weights_offset(1) - arena.weights_offset(0)
        optimizer.expose_gradients()


def test_float32_jobs_have_no_halves_in_their_arena() -> None:
    with one_worker(make=ADAM) as (_, optimizer):
        store = optimizer.worker.store
        assert store.arena.shown_type == 0
        with pytest.raises(ValueError, match="expected an arena that has weights in half precision"):
            store.half_views(0)


@DTYPES
def test_clipping_takes_the_norm_of_halves_in_single_precision(dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.zeros(10_000, dtype=dtype))
    with fastps.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), "bsp,clip=1") as optimizer:
        weight.grad = torch.full((10_000,), 60_000.0, dtype=dtype)  # a norm in float16 would be infinite
        optimizer.step()
        assert torch.allclose(_masters(optimizer)[0], torch.tensor(-0.01), rtol=1e-4)


def test_a_grad_scaler_skips_a_step_of_float16_that_overflowed() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)  # type: ignore[attr-defined]
    with one_worker(_half(torch.float16), named=True) as (model, optimizer):
        for factor in (1.0, 1e4, 1.0):
            optimizer.zero_grad()
            inputs, labels = batches_of(1, 16)[0]
            loss = torch.nn.functional.cross_entropy(model(inputs.half()).float(), labels) * factor
            scaler.scale(loss).backward()
            before = _vector(_masters(optimizer))
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(before, _vector(_masters(optimizer))) == (factor > 1)


# -- saving and loading ----------------------------------------------------------------------------


@ALL_DTYPES
def test_a_checkpoint_has_the_masters_and_resumes_from_the_same_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    batches = batches_of(20, 16)
    with one_worker(torch.nn.Sequential(new_model(), torch.nn.BatchNorm1d(3)).to(dtype), ADAM, named=True) as (
        model,
        optimizer,
    ):
        _train(model, optimizer, batches[:10])
        folder = fastps.save(optimizer, tmp_path)
        saved, statistics = _masters(optimizer), dict(copy.deepcopy(model).named_buffers())
        _train(model, optimizer, batches[10:])
        expected = _vector(_masters(optimizer))
    checkpoint = fastps.load(folder)
    for (name, _), master in zip(model.named_parameters(), saved, strict=True):
        assert torch.equal(torch.tensor(checkpoint.weights()[name]), master)
    resumed = torch.nn.Sequential(new_model(1), torch.nn.BatchNorm1d(3)).to(dtype)
    with fastps.DistributedOptimizer(ADAM(resumed.parameters()), model=resumed, resume=folder) as optimizer:
        assert torch.equal(_vector(_masters(optimizer)), _vector(saved))
        assert _shows_its_masters(resumed, optimizer)
        assert all(torch.equal(buffer, statistics[name]) for name, buffer in resumed.named_buffers())
        _train(resumed, optimizer, batches[10:])
        assert torch.equal(_vector(_masters(optimizer)), expected)


def test_a_checkpoint_of_a_float32_job_resumes_in_half_precision(tmp_path: Path) -> None:
    with one_worker(make=ADAM, named=True) as (model, optimizer):
        _train(model, optimizer, batches_of(5, 16))
        fastps.save(optimizer, tmp_path)
        saved = _vector(_masters(optimizer))
    with one_worker(_half(torch.bfloat16), ADAM, named=True, resume=tmp_path) as (half, optimizer):
        assert torch.equal(_vector(_masters(optimizer)), saved)
        assert _shows_its_masters(half, optimizer)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "dtype"), [
    ("adam", torch.bfloat16), ("momentum", torch.float64), ("sgd", torch.bfloat16), ("nadam", torch.float64),
    ("momentum", torch.bfloat16), ("rmsprop-all", torch.float64),
])  # fmt: skip
def test_state_dicts_of_model_and_optimizer_continue_with_the_same_bits(name: str, dtype: torch.dtype) -> None:
    batches = batches_of(20, 16)
    with one_worker(_half(dtype), OPTIMIZERS[name], named=True) as (model, optimizer):
        _train(model, optimizer, batches[:10])
        of_model, of_optimizer = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        _train(model, optimizer, batches[10:])
        expected = _vector(_masters(optimizer))
    for entry in of_optimizer["state"].values():
        assert {value.dtype for value in entry.values() if value.dim()} == {_master_dtype(dtype)}
        assert ("master" in entry) == (dtype == torch.bfloat16)
    again = _half(dtype)
    again.load_state_dict(of_model)
    with fastps.DistributedOptimizer(OPTIMIZERS[name](again.parameters()), model=again) as optimizer:
        optimizer.load_state_dict(of_optimizer)
        again_saved = optimizer.state_dict()
        for index, entry in of_optimizer["state"].items():
            assert all(torch.equal(value, again_saved["state"][index][key]) for key, value in entry.items())
        _train(again, optimizer, batches[10:])
        assert torch.equal(_vector(_masters(optimizer)), expected)
    OPTIMIZERS[name](again.parameters()).load_state_dict(of_optimizer)


def test_masters_of_other_weights_are_not_used_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with one_worker(_half(torch.bfloat16), ADAM, named=True) as (model, optimizer):
        _train(model, optimizer, batches_of(3, 16))
        saved = optimizer.state_dict()
    other = new_model(seed=1).bfloat16()
    first = _vector(other.parameters()).float()
    with fastps.DistributedOptimizer(ADAM(other.parameters()), model=other) as optimizer:
        with caplog.at_level(logging.WARNING, "fastps.torch"):
            optimizer.load_state_dict(saved)
        assert torch.equal(_vector(_masters(optimizer)), first)
    assert "are of other weights than the model's, and are not used" in caplog.text


def test_weights_that_are_replaced_or_shown_may_be_float32() -> None:
    others = [parameter.detach() for parameter in new_model(seed=3).parameters()]
    with one_worker(_half(torch.bfloat16), ADAM, sync="bsp,ema=0.5", named=True) as (model, optimizer):
        with optimizer.shown_weights(others):
            assert torch.equal(_vector(model.parameters()), _vector(others).bfloat16())
        _train(model, optimizer, batches_of(2, 16))
        with optimizer.averaged_weights():
            assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        optimizer.replace_weights(others)
        assert torch.equal(_vector(_masters(optimizer)), _vector(others))
        assert _shows_its_masters(model, optimizer)
        _train(model, optimizer, batches_of(2, 16))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        model[0].weight.zero_()  # after close() the parameters are this process's own


def test_readers_show_the_halves_or_the_masters_of_a_job() -> None:
    halves, floats, job = _half(torch.bfloat16), new_model(), f"halves-reader-{os.getpid()}"
    with one_worker(_half(torch.bfloat16), ADAM, named=True, job=job) as (model, optimizer), fastps.reader(job) as reader:
        for batch in batches_of(6, 16):
            _train(model, optimizer, [batch])
            reader.update(halves)
            reader.update(floats)
            assert torch.equal(_vector(halves.parameters()), _vector(model.parameters()))
            assert torch.equal(_vector(floats.parameters()), _vector(_masters(optimizer)))
        with pytest.raises(fastps.LayoutError, match=r"expected bfloat16 or float32, found float16; convert the model"):
            reader.update(new_model().half())
    assert {parameter.dtype for parameter in halves.parameters()} == {torch.bfloat16}


def test_buffers_in_half_precision_are_averaged_in_single_precision() -> None:
    normed = torch.nn.Sequential(torch.nn.Linear(13, 3), torch.nn.BatchNorm1d(3)).bfloat16()
    with one_worker(normed, ADAM, named=True) as (model, optimizer):
        _train(model, optimizer, batches_of(3, 16))
        before = copy.deepcopy(dict(model.named_buffers()))
        optimizer.average_buffers()
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, before[name]), name


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 2])
def test_a_write_into_halves_reaches_their_masters_whose_other_digits_stay(steps: int) -> None:
    with one_worker(_half(torch.bfloat16), ADAM, named=True) as (model, optimizer):
        for batch in batches_of(steps, 16):
            _train(model, optimizer, [batch])
        masters = {name: weights.copy() for name, weights in optimizer.worker.weights.items()}
        model[0].weight.data[0, 0] = 3.0
        _backward(model, batches_of(1, 16)[0])
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
        masters["0.weight"][0, 0] = 3.0
        for name, weights in optimizer.worker.weights.items():
            assert np.array_equal(weights, masters[name]), name


def test_the_type_of_a_parameter_is_a_part_of_the_layout() -> None:
    layouts: list[Layout] = []
    for model in (new_model(), _half(torch.bfloat16)):
        with one_worker(model, ADAM, named=True, push_dtype=torch.float32) as (_, optimizer):
            layouts.append(optimizer.worker.store.layout)
    assert layouts[0].digest() != layouts[1].digest()
    found = first_difference(layouts[0].text(), layouts[1].text())
    assert found.startswith("parameter 0: here '0.weight'")
    assert "type float32, there" in found
    assert found.endswith("type bfloat16")
