"""An optimizer that is made again from its class and its attributes, as the job's server does; and what cannot be."""

import threading
from typing import Any

import pytest
import torch

import fastps
from fastps.job.update_rules import Hyper
from fastps.torch.any_optimizer.rebuilt import OptimizerOrder, PushedRates
from tests.torch.any_optimizer.test_fold import Own, new_model, plain, train, values_of


def test_a_rebuilt_optimizer_goes_on_with_the_same_bits() -> None:
    model, inner = plain("own", steps=3)
    torch.optim.lr_scheduler.StepLR(inner, 5)  # patches its step()
    inner.register_step_post_hook(lambda *_: pytest.fail("a hook is the script's"))
    again = new_model()
    made = OptimizerOrder.of(inner, list(model.parameters())).make(list(again.parameters()))
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        other.data.copy_(one.data)
    expected, _ = plain("own", steps=3)
    assert isinstance(made, Own) and made.count == 3 and values_of(again) == values_of(expected)
    train(again, made, steps=2)
    assert made.count == 5 and set(made.state) == set(again.parameters())


def _refused(match: str, **attributes: Any) -> None:
    model = new_model()
    inner = Own(model.parameters())
    inner.__dict__.update(attributes)
    with pytest.raises(fastps.UnsupportedError, match=match):
        fastps.DistributedOptimizer(inner, server="process")


def test_what_cannot_be_sent_to_a_server_is_refused_by_name() -> None:
    _refused(
        r"Own: the job's server runs its step\(\): expected attributes that pickle, found TypeError", lock=threading.Lock()
    )
    _refused(r"a parameter of shape \(2,\) that is in none of its param_groups", other=torch.nn.Parameter(torch.ones(2)))


def test_a_class_that_the_server_cannot_import_is_refused_by_name() -> None:
    order = OptimizerOrder(b"cno_such_module\nOptimizer\n.", ())
    with pytest.raises(fastps.UnsupportedError, match=r"cannot be made again in the job's server: ModuleNotFoundError"):
        order.make([])


def test_rates_that_no_worker_changes_stay_the_optimizers_own() -> None:
    groups: list[dict[str, Any]] = [{"lr": 0.1}, {"lr": torch.tensor(0.5)}]
    rates = PushedRates(groups)
    groups[0]["lr"] = 0.3  # by the optimizer
    rates.take([[Hyper(0.1), Hyper(0.5)], [Hyper(0.1), Hyper(0.5)]])
    assert groups[0]["lr"] == 0.3 and groups[1]["lr"].item() == 0.5
    rates.take([[Hyper(0.2), Hyper(0.25)], [Hyper(0.4), Hyper(0.75)]])
    assert groups[0]["lr"] == pytest.approx(0.3) and groups[1]["lr"].item() == 0.5
    rates.take([[Hyper(0.05), Hyper(1.0)]])
    assert groups[0]["lr"] == 0.05 and groups[1]["lr"].item() == 1.0
