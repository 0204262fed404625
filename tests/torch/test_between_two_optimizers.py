"""What scripts do with one of the two optimizers, the wrapped and the wrapping one, counts for both, or is refused by name."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastps
from tests.support.torch_optimizers import BATCH, batches_of, new_model, relative_difference, train_on

Script = Callable[[torch.nn.Module, torch.optim.Optimizer, Callable[[Any], Any]], Any]


def _own_state(model: torch.nn.Module, inner: torch.optim.Optimizer, wrap: Callable[[Any], Any]) -> Any:
    """A script keeps tensors and other things of its own in the state, as look-ahead and sharpness-aware wrappers do."""
    inner.state["calls"] = {"count": 1}
    optimizer = wrap(inner)
    weight = model[0].weight
    for batch in batches_of(4, BATCH):
        train_on(model, optimizer, [batch])
        entry = optimizer.state[weight]
        entry.setdefault("slow", torch.zeros_like(weight)).lerp_(weight.detach(), 0.5)
        entry["note"] = "kept"
        optimizer.state["calls"]["count"] += 1
    train_on(model, optimizer, batches_of(1, BATCH))
    entry.get("slow").add_(1.0)  # an own tensor may be written to at any time
    train_on(model, optimizer, batches_of(1, BATCH))
    found = copy.deepcopy(optimizer.state_dict()["state"])
    del optimizer.state[weight]["slow"]
    train_on(model, optimizer, batches_of(1, BATCH))
    return found[0]["slow"].tolist(), found[0]["note"], found["calls"], sorted(optimizer.state[weight])


@pytest.mark.parametrize("script", [_own_state])
def test_scripts_have_the_same_results_as_with_one_optimizer(script: Script) -> None:
    plain, model = new_model(), new_model()
    expected = script(plain, torch.optim.Adam(plain.parameters(), lr=0.01), lambda inner: inner)
    opened: list[fastps.DistributedOptimizer] = []

    def wrap(inner: torch.optim.Optimizer) -> fastps.DistributedOptimizer:
        opened.append(fastps.DistributedOptimizer(inner))
        return opened[0]

    found = script(model, torch.optim.Adam(model.parameters(), lr=0.01), wrap)
    opened[0].close()
    if script is _own_state:
        torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
        found, expected = found[1:], expected[1:]
    assert found == expected
    assert relative_difference(model, plain) < 1e-6
