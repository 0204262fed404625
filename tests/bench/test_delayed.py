"""Gradients that come late: the hook gives the optimizer those of earlier steps, and none at first."""

import pytest
import torch

from fastps.bench.integrations.delayed import Delay


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_each_step_gets_the_gradient_of_so_many_steps_before(steps: int) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.register_step_pre_hook(Delay(steps))
    given = [1.0, 10.0, 100.0, 1000.0, 10000.0]
    for number, value in enumerate(given):
        weight.grad = torch.tensor([value])
        optimizer.step()
        assert weight.item() == -sum(given[: max(0, number + 1 - steps)])
