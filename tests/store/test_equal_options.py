"""Workers that push with other options than the others are told so, once, by the options' names."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastps
from tests.support import processes
from tests.support.said import listen


def _options_said(
    options: Callable[[int, int], dict[str, Any]], sync: str = "bsp", steps: int = 6, workers: int = 2
) -> list[list[str]]:
    def work(rank: int) -> list[str]:
        torch.manual_seed(0)
        said, model = listen(), torch.nn.Linear(3, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with fastps.DistributedOptimizer(inner, sync, timeout_s=30) as optimizer:
            for step in range(steps):
                optimizer.param_groups[0].update(options(rank, step))
                optimizer.zero_grad()
                model(torch.full((2, 3), 1.0 + rank)).sum().backward()
                optimizer.step()
            optimizer.wait_for_others()
        return [each for each in said if "other options" in each]

    return processes.results(processes.start_job(work, workers), 60)


@pytest.mark.parametrize(("options", "what"), [
    (lambda rank, step: {"lr": 0.1 * (1 + rank)}, "learning_rate 0.1 and 0.2"),
    (lambda rank, step: {"weight_decay": 0.01 * rank}, "weight_decay 0 and 0.01"),
    (lambda rank, step: {"maximize": rank == 1}, "switches 0 and "),
    (lambda rank, step: {"lr": 0.05 if rank == 0 and step > 2 else 0.1}, "learning_rate 0.05 and 0.1"),
])  # fmt: skip
def test_options_that_differ_by_rank_are_told_of_once_by_name(options: Callable[[int, int], dict[str, Any]], what: str) -> None:
    zero, one = _options_said(options)
    assert len(zero) == 1 and what in zero[0] and zero[0].startswith("workers 0 and 1 push with other options ("), zero
    assert len(one) <= 1


def test_a_push_without_a_gradient_has_no_options_to_compare() -> None:
    """A GradScaler skips a step that overflows, in one worker."""

    def work(rank: int) -> list[str]:
        torch.manual_seed(0)
        said, model = listen(), torch.nn.Linear(3, 1)
        inner = torch.optim.AdamW(model.parameters(), lr=0.1)
        with fastps.DistributedOptimizer(inner, timeout_s=30) as optimizer:
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            for step in range(8):
                optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
                optimizer.zero_grad()
                scaler.scale(model(torch.full((2, 3), 1.0 + rank)).sum()).backward()
                if rank == step % 2 and step % 3 == 0:
                    model.weight.grad[0, 0] = float("inf")
                scaler.step(optimizer)
                scaler.update()
            optimizer.wait_for_others()
        return [each for each in said if "other options" in each]

    assert processes.results(processes.start_job(work, 2), 60) == [[], []]


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_a_schedule_that_all_follow_is_not_told_of(sync: str) -> None:
    assert not any(_options_said(lambda rank, step: {"lr": 0.1 / (1 + step)}, sync, steps=20, workers=3))
