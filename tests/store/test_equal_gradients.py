"""Workers that all push the same gradients are told so, once, and others are not."""

import logging
import time
from collections.abc import Callable

import pytest
import torch

import fastps
from tests.support import processes


def _warnings(sync: str, inputs: Callable[[int, int], torch.Tensor], steps: int = 6, workers: int = 2) -> list[list[str]]:
    def work(rank: int) -> list[str]:
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("fastps.torch").addHandler(handler)
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        with fastps.DistributedOptimizer(inner, sync, timeout_s=30) as optimizer:
            optimizer.wait_for_start()
            for step in range(steps):
                time.sleep(0.5 if step < 2 else 0.05)  # all have the first weights, and the first gradients stay for a while
                optimizer.zero_grad()
                model(inputs(rank, step)).square().mean().backward()
                optimizer.step()
            optimizer.wait_for_others()
        return [each for each in said if "the same gradients" in each]

    return processes.results(processes.start_job(work, workers), 60)


def _drawn(seed: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sync", ["bsp", "asp", "ssp:1"])
@pytest.mark.sampled(3)
def test_workers_with_one_seed_are_warned_of(sync: str) -> None:
    found = _warnings(sync, lambda rank, step: _drawn(step), workers=3 if sync == "bsp" else 2)
    said = [each for of_worker in found for each in of_worker]
    assert said, "nobody is told"
    assert all(len(of_worker) <= 1 for of_worker in found)
    assert said[0].startswith(f"all {len(found)} workers push the same gradients, bit for bit: expected other samples")


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_workers_with_data_of_their_own_are_not(sync: str) -> None:
    assert _warnings(sync, lambda rank, step: _drawn(10 * step + rank)) == [[], []]


@pytest.mark.slow
def test_one_equal_batch_and_gradients_of_zero_are_no_reason() -> None:
    assert _warnings("bsp", lambda rank, step: _drawn(0 if step == 0 else 10 * step + rank)) == [[], []]
    assert _warnings("bsp", lambda rank, step: torch.zeros(4, 3) * float(rank), steps=1) == [[], []]
