"""Checkpoints of optimizers that run in Python: they resume to the bit, and reading one runs nothing of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fastps
from fastps.checkpoint.format import JSON_FILE, sealed
from tests.torch.any_optimizer.test_fold import KINDS, Own, are_same, loss_of, new_model, plain, values_of


def _run(kind: str, steps: range, **options: Any) -> list[list[float]]:
    model = new_model()
    with fastps.DistributedOptimizer(KINDS[kind](model.parameters()), **options) as optimizer:
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, 100 * step).backward()
            optimizer.step()
    return values_of(model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_has_the_bits_of_one_that_went_on(kind: str, tmp_path: Path) -> None:
    _run(kind, range(5), checkpoint=tmp_path, every=1000)
    assert _run(kind, range(5, 12), resume=tmp_path) == values_of(plain(kind)[0])


def test_a_saved_state_has_the_types_and_the_attributes_of_the_optimizer(tmp_path: Path) -> None:
    model = new_model()
    with fastps.DistributedOptimizer(Own(model.parameters())) as optimizer:
        loss_of(model, 0).backward()
        optimizer.step()
        folder = fastps.save(optimizer, tmp_path)
        before = optimizer.state_dict()
    assert are_same(fastps.optimizer_state_dict(fastps.load(folder)), before)
    again = new_model()
    with fastps.DistributedOptimizer(Own(again.parameters()), resume=folder) as resumed:
        assert are_same(resumed.state_dict(), before) and resumed._inner.count == 1
        assert {entry["mean"].dtype for entry in resumed.state.values()} == {torch.bfloat16}


def test_a_value_that_a_checkpoint_cannot_hold_is_named(tmp_path: Path) -> None:
    model = new_model()
    with fastps.DistributedOptimizer(Own(model.parameters())) as optimizer:
        optimizer.state[model[0].weight]["object"] = object()
        with pytest.raises(fastps.CheckpointError, match=r"'state', 0, 'object': expected numbers, .* found object"):
            fastps.save(optimizer, tmp_path)


@pytest.mark.parametrize("described", [
    None, [], {"attributes": {}}, {"attributes": {}, "state": {"tensor": ["9", "float32"]}},
    {"attributes": {}, "state": {"tensor": ["0", "object"]}}, {"attributes": {}, "state": {"call": ["os.system"]}},
    {"attributes": {"count": {"tensor": "0"}}, "state": {"dict": []}}, {"attributes": {}, "state": {"dict": [], "list": []}},
])  # fmt: skip
def test_a_damaged_or_foreign_description_is_refused_by_name(described: Any, tmp_path: Path) -> None:
    model = new_model()
    with fastps.DistributedOptimizer(Own(model.parameters()), model=model) as optimizer:
        loss_of(model, 0).backward()
        optimizer.step()
        folder = fastps.save(optimizer, tmp_path)
    found = json.loads((folder / JSON_FILE).read_bytes())
    (folder / JSON_FILE).write_bytes(sealed({**found, "optimizer": described}))
    with pytest.raises(fastps.CheckpointError, match=r"checkpoint .*optimizer"):
        fastps.DistributedOptimizer(Own((again := new_model()).parameters()), model=again, resume=folder)
