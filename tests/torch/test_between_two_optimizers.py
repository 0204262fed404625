"""What scripts do with one of the two optimizers, the wrapped and the wrapping one, counts for both, or is refused by name."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastps
from tests.support.torch_optimizers import (
    BATCH,
    batches_of,
    new_model,
    one_worker,
    relative_difference,
    train_on,
    with_and_without,
)

Script = Callable[[torch.nn.Module, torch.optim.Optimizer, Callable[[Any], Any]], Any]


def _noise_in_a_hook(model: torch.nn.Module, inner: torch.optim.Optimizer, wrap: Callable[[Any], Any]) -> Any:
    """Hooks of a step that were registered before wrapping: one adds to the gradients, one counts."""
    counts = []

    def add(optimizer: Any, arguments: Any, named: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.add_(0.01)

    inner.register_step_pre_hook(add)
    inner.register_step_post_hook(lambda optimizer, arguments, named: counts.append(len(optimizer.state)))
    optimizer = wrap(inner)
    train_on(model, optimizer, batches_of(2, BATCH))
    inner.register_step_pre_hook(add)
    handle = optimizer.register_step_pre_hook(add)
    train_on(model, optimizer, batches_of(2, BATCH))
    handle.remove()
    train_on(model, optimizer, batches_of(2, BATCH))
    return counts


def _states_in_hooks(model: torch.nn.Module, inner: torch.optim.Optimizer, wrap: Callable[[Any], Any]) -> Any:
    """Hooks put the state dict into another form and back; a state dict is made while the state is lent, too."""
    inner.register_state_dict_post_hook(lambda optimizer, found: {"optimizer": found, "epoch": 3})
    inner.register_load_state_dict_pre_hook(lambda optimizer, found: found["optimizer"])
    optimizer = wrap(inner)
    train_on(model, optimizer, batches_of(3, BATCH))
    lent = optimizer.state[model[0].weight]["exp_avg"]
    found = copy.deepcopy(optimizer.state_dict())
    seen = found["epoch"], found["optimizer"]["state"][0]["step"].item()
    lent.zero_()
    train_on(model, optimizer, batches_of(2, BATCH))
    optimizer.load_state_dict(found)
    train_on(model, optimizer, batches_of(2, BATCH))
    return seen


def _other_groups(model: torch.nn.Module, inner: torch.optim.Optimizer, wrap: Callable[[Any], Any]) -> Any:
    """A script gives either optimizer another list of param_groups, and changes a rate in it through the other."""
    optimizer = wrap(inner)
    for one, other in ((optimizer, inner), (inner, optimizer)):
        one.param_groups = [dict(group) for group in one.param_groups]
        train_on(model, optimizer, batches_of(1, BATCH))
        other.param_groups[0]["lr"] *= 0.5
        train_on(model, optimizer, batches_of(1, BATCH))
    return inner.param_groups[0]["lr"]


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


@pytest.mark.parametrize("script", [_noise_in_a_hook, _states_in_hooks, _other_groups, _own_state])
def test_scripts_have_the_same_results_as_with_one_optimizer(script: Script) -> None:
    def run(wrap: Callable[[Any], Any]) -> tuple[Any, torch.nn.Module]:
        model = new_model()
        return script(model, torch.optim.Adam(model.parameters(), lr=0.01), wrap), model

    (found, model), (expected, plain) = with_and_without(run)
    if script is _own_state:
        torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
        found, expected = found[1:], expected[1:]
    assert found == expected
    assert relative_difference(model, plain) < 1e-6


def test_step_of_the_wrapped_optimizer_is_refused_until_close() -> None:
    with one_worker() as (model, optimizer):
        inner = optimizer._inner
        before = [each.detach().clone() for each in model.parameters()]
        (inputs, labels), *_ = batches_of(1, BATCH)
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        with pytest.raises(fastps.UsageError, match=r"pushes nothing, .*: call step\(\) of the DistributedOptimizer"):
            inner.step()
        assert all(map(torch.equal, before, model.parameters()))
        optimizer.step()
        assert optimizer.version == 1
    inner.step()
