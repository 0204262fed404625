"""The state and the options of torch's optimizers: what state_dict has, what may change, and what has no effect."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastps
from tests.support.torch_optimizers import (
    BATCH,
    OPTIMIZERS,
    as_in_torch,
    batches_of,
    new_model,
    one_worker,
    relative_difference,
    steps_on,
    train_on,
)


def _assert_same_keys(found: dict[int, Any], expected: dict[int, Any]) -> None:
    for index, entry in expected.items():
        theirs = {key for key, value in entry.items() if value is not None}
        assert set(found.get(index, {})) == theirs
        if "step" in theirs:
            assert found[index]["step"] == entry["step"]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_dict_has_the_keys_of_plain_torch_and_loads_there_and_back(name: str) -> None:
    batches = batches_of(20, BATCH)
    plain, model, resumed = new_model(), new_model(), new_model()
    expected = OPTIMIZERS[name](plain.parameters())
    train_on(plain, expected, batches[:10])
    with fastps.DistributedOptimizer(OPTIMIZERS[name](model.parameters())) as optimizer:
        train_on(model, optimizer, batches[:10])
        saved = copy.deepcopy(optimizer.state_dict())
    _assert_same_keys(saved["state"], expected.state_dict()["state"])
    train_on(plain, expected, batches[10:])
    torch_optimizer = OPTIMIZERS[name](model.parameters())
    torch_optimizer.load_state_dict(saved)
    resumed.load_state_dict(model.state_dict())
    with fastps.DistributedOptimizer(OPTIMIZERS[name](resumed.parameters())) as optimizer:
        optimizer.load_state_dict(copy.deepcopy(torch_optimizer.state_dict()))
        train_on(resumed, optimizer, batches[10:])
    train_on(model, torch_optimizer, batches[10:])
    assert relative_difference(model, plain) < 1e-6
    assert relative_difference(resumed, plain) < 1e-6


@pytest.mark.parametrize("wraps", [False, True])
def test_steps_are_counted_in_single_precision_whatever_the_default_type(wraps: bool) -> None:
    model, table = torch.nn.Linear(2, 1), torch.nn.Embedding(3, 2, sparse=True)
    inner, of_rows = torch.optim.Adam(model.parameters()), fastps.RowWiseAdagradOptimizer(table.parameters())
    torch.set_default_dtype(torch.bfloat16)  # as scripts for language models do
    try:
        optimizer: Any = fastps.DistributedOptimizer(inner) if wraps else inner
        steps_on(model, optimizer, torch.ones(1, 2, dtype=torch.float32), 259)
        saved = optimizer.state_dict()
        steps_on(table, of_rows, torch.tensor([1]))
    finally:
        torch.set_default_dtype(torch.float32)
        if wraps:
            optimizer.close()
    assert (saved["state"][0]["step"], saved["state"][0]["step"].dtype) == (259, torch.float32)
    assert {value.dtype for value in of_rows.state[table.weight].values()} == {torch.float32}


def test_a_state_dict_of_adagrad_before_its_first_step_loads_both_ways() -> None:
    plain, model = new_model(), new_model()
    expected = torch.optim.Adagrad(plain.parameters(), lr=0.05, initial_accumulator_value=0.1)
    made = torch.optim.Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.1)
    with fastps.DistributedOptimizer(made) as optimizer:
        saved = copy.deepcopy(optimizer.state_dict())
        assert saved["state"][0]["step"] == 0 and float(saved["state"][0]["sum"].min()) == np.float32(0.1)
        optimizer.load_state_dict(saved)
        train_on(model, optimizer, batches_of(10, BATCH))
    expected.load_state_dict(saved)
    train_on(plain, expected, batches_of(10, BATCH))
    assert relative_difference(model, plain) < 1e-6


@pytest.mark.parametrize("name", ["adamw", "nesterov", "rmsprop-all"])
def test_a_state_dict_of_an_older_torch_loads_with_the_options_that_torch_adds(name: str) -> None:
    batches, plain, model = batches_of(20, BATCH), new_model(), new_model()
    saving, expected = OPTIMIZERS[name](plain.parameters()), OPTIMIZERS[name](plain.parameters())
    train_on(plain, saving, batches[:10])
    model.load_state_dict(plain.state_dict())
    saved = copy.deepcopy(saving.state_dict())
    for option in ("decoupled_weight_decay", "nesterov", "centered", "maximize", "foreach", "fused", "differentiable"):
        saved["param_groups"][0].pop(option, None)
    expected.load_state_dict(copy.deepcopy(saved))
    with fastps.DistributedOptimizer(OPTIMIZERS[name](model.parameters())) as optimizer:
        optimizer.load_state_dict(saved)
        train_on(model, optimizer, batches[10:])
        assert optimizer.state_dict()["param_groups"] == expected.state_dict()["param_groups"]
    train_on(plain, expected, batches[10:])
    assert relative_difference(model, plain) < 1e-6


@pytest.mark.parametrize("resumes", [False, True])
def test_adamw_stays_adamw_when_it_goes_on_from_adam(resumes: bool, tmp_path: Path) -> None:
    batches, model = batches_of(20, BATCH), new_model()
    with fastps.DistributedOptimizer(torch.optim.Adam(model.parameters(), weight_decay=0.5), model=model) as optimizer:
        train_on(model, optimizer, batches[:10])
        saved, folder = optimizer.state_dict(), fastps.save(optimizer, tmp_path)
    plain = copy.deepcopy(model)
    inner, expected = OPTIMIZERS["adamw"](model.parameters()), OPTIMIZERS["adamw"](plain.parameters())
    with fastps.DistributedOptimizer(inner, model=model, resume=folder if resumes else None) as optimizer:
        if not resumes:
            optimizer.load_state_dict(saved)
        train_on(model, optimizer, batches[10:])
    expected.load_state_dict(saved)
    train_on(plain, expected, batches[10:])
    assert expected.param_groups[0]["decoupled_weight_decay"]
    assert relative_difference(model, plain) < 1e-6


def test_a_script_that_keeps_its_own_entry_in_the_state_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    with one_worker(make=OPTIMIZERS["adamw"], named=True) as (model, optimizer):
        train_on(model, optimizer, batches_of(2, BATCH))
        folder = fastps.save(optimizer, tmp_path)
    inner, first = OPTIMIZERS["adamw"](model.parameters()), next(model.parameters())
    inner.state[first]["mine"] = 1
    with fastps.DistributedOptimizer(inner, model=model, resume=folder) as optimizer:
        assert optimizer.version == 2 and optimizer.state[first]["mine"] == 1


def _rmsprop(parameters: Any) -> torch.optim.Optimizer:
    first, second, *rest = parameters
    groups = [{"params": [first], "momentum": 0.9}, {"params": [second], "centered": True}, {"params": rest}]
    return torch.optim.RMSprop(groups, lr=0.002)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    first, *rest = parameters
    return torch.optim.AdamW([{"params": [first], "amsgrad": True}, {"params": rest}], lr=0.01)


@pytest.mark.parametrize("make", [_rmsprop, _adamw])
def test_groups_with_and_without_an_option_keep_different_state(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    def run(model: torch.nn.Module, optimizer: Any) -> dict[int, set[str]]:
        train_on(model, optimizer, batches_of(50, BATCH))
        return {index: set(entry) for index, entry in optimizer.state_dict()["state"].items()}

    found, expected = as_in_torch(run, make, most=1e-6)
    assert found == expected


def test_an_option_that_needs_state_which_is_not_kept_is_refused_by_name() -> None:
    with one_worker(make=OPTIMIZERS["rmsprop"]) as (model, optimizer):
        optimizer.param_groups[0]["centered"] = True
        with pytest.raises(fastps.UnsupportedError, match=r"centered was off when .* optimizer.unwrap\(\)"):
            train_on(model, optimizer, batches_of(1, BATCH))


def test_nadams_product_of_momenta_has_the_bits_of_torch() -> None:
    def run(model: torch.nn.Module, optimizer: Any) -> list[Any]:
        found = []
        for steps in (1, 2, 60):
            train_on(model, optimizer, batches_of(steps, BATCH))
            found.append(optimizer.state_dict()["state"][0]["mu_product"].clone())
        return [(product.dtype, product.item()) for product in found]

    found, expected = as_in_torch(run, OPTIMIZERS["nadam"], most=1e-6)
    assert found == expected


def test_nadams_betas_must_stay_as_they_are() -> None:
    """The product of momenta is computed from them and the count of steps, so a change is refused and not computed wrongly."""
    with one_worker(make=OPTIMIZERS["nadam"]) as (model, optimizer):
        train_on(model, optimizer, batches_of(2, BATCH))
        optimizer.param_groups[0]["betas"] = (0.8, 0.999)
        sentence = "betas changed after the first step, and nadam computes state from it"
        with pytest.raises(fastps.UnsupportedError, match=sentence):
            train_on(model, optimizer, batches_of(1, BATCH))


def test_nadams_state_of_changed_betas_is_refused_when_wrapped_and_when_loaded() -> None:
    plain, model = new_model(), new_model()
    changed = OPTIMIZERS["nadam"](plain.parameters())
    train_on(plain, changed, batches_of(2, BATCH))
    changed.param_groups[0]["betas"] = (0.8, 0.999)
    sentence = r"expected mu_product .* after 2 steps with these betas and momentum_decay"
    with pytest.raises(fastps.UnsupportedError, match=sentence):
        fastps.DistributedOptimizer(changed)
    with fastps.DistributedOptimizer(OPTIMIZERS["nadam"](model.parameters())) as optimizer:
        with pytest.raises(fastps.UnsupportedError, match="expected mu_product"):
            optimizer.load_state_dict(changed.state_dict())
        train_on(model, optimizer, batches_of(2, BATCH))


def test_radams_betas_may_change_at_any_step() -> None:
    def run(model: torch.nn.Module, optimizer: Any) -> None:
        for step, batch in enumerate(batches_of(20, BATCH)):
            optimizer.param_groups[0]["betas"] = (0.9 - 0.01 * step, 0.9)
            train_on(model, optimizer, [batch])

    as_in_torch(run, OPTIMIZERS["radam"], most=1e-6)


@pytest.mark.parametrize(
    ("option", "level"), [("foreach", "INFO"), ("fused", "INFO"), ("capturable", "INFO"), ("differentiable", "WARNING")]
)
def test_options_of_how_torch_runs_an_optimizer_are_said_to_have_no_effect(
    option: str, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain, model = new_model(), new_model()
    train_on(plain, torch.optim.Adam(plain.parameters(), lr=0.01), batches_of(20, BATCH))
    made = torch.optim.Adam(model.parameters(), lr=0.01, **{option: True})  # type: ignore[arg-type]
    with caplog.at_level("INFO", "fastps.torch"), fastps.DistributedOptimizer(made) as optimizer:
        train_on(model, optimizer, batches_of(20, BATCH))
    said = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "fastps.torch"]
    assert [name for name, _ in said] == [level]
    assert f"Adam({option}=True) has no effect" in said[0][1]
    assert relative_difference(model, plain) < 1e-6
