"""A new optimizer for each epoch, over the same parameters: no push is lost, or the loss is refused by name."""

import logging
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastps
from fastps.store import jobs_of_process
from tests.support import processes
from tests.support.torch_optimizers import alone  # noqa: F401 - a fixture

EPOCHS, STEPS = 2, 5
End = Callable[[fastps.DistributedOptimizer], object]
ENDS: dict[str, End] = {
    "nothing": lambda optimizer: None,
    "unwrap": lambda optimizer: optimizer.unwrap(),
    "wait and close": lambda optimizer: (optimizer.wait_for_others(), optimizer.close()),
}


def _run(sync: str, end: End, timeout_s: int = 30) -> list[Any]:
    """Two workers, of which the second is slow, add 1 to a weight in each step of each epoch."""

    def work(rank: int) -> float:
        os.environ["FASTPS_TIMEOUT"] = str(timeout_s)
        jobs_of_process._next[0] = 0
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        for epoch in range(EPOCHS):
            optimizer = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), sync)
            for _ in range(STEPS):
                time.sleep(0.02 * rank)
                optimizer.zero_grad()
                (-model(torch.ones(1, 1))).sum().backward()
                optimizer.step()
            if epoch < EPOCHS - 1:
                end(optimizer)
        optimizer.wait_for_others()
        optimizer.close()
        return model.weight.item()

    children = processes.start_job(work, 2)
    processes.finish(children, 60)
    return [child.outcome for child in children]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("end", list(ENDS))
@pytest.mark.parametrize("sync", ["asp", "ssp:2"])
def test_every_push_of_every_epoch_counts(sync: str, end: str) -> None:
    assert _run(sync, ENDS[end]) == [2.0 * EPOCHS * STEPS] * 2


def test_close_before_the_next_wrap_is_exact_where_all_have_made_the_same_steps() -> None:
    assert _run("bsp", lambda optimizer: optimizer.close()) == [float(EPOCHS * STEPS)] * 2


@pytest.mark.slow
def test_pushes_that_came_after_worker_0_closed_are_refused_at_the_next_wrap() -> None:
    first, _ = _run("asp", lambda optimizer: optimizer.close(), timeout_s=2)  # the second waits for a job that nobody makes
    assert first[0] == "UsageError"
    assert "more after worker 0 closed" in first[1] and "call unwrap() in place of close()" in first[1]


@pytest.mark.parametrize("end", [fastps.DistributedOptimizer.close, lambda optimizer: optimizer._job.leave(None)])
def test_close_and_the_end_of_the_program_say_how_many_still_train(
    end: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    models = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
    job = f"close-{time.monotonic_ns()}"
    optimizers = [
        fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), "asp", job=job, rank=rank, workers=2)
        for rank, model in enumerate(models)
    ]
    with caplog.at_level(logging.WARNING, "fastps.torch"):
        end(optimizers[0])
        end(optimizers[1])
    (said,) = [record.getMessage() for record in caplog.records if "closes while" in record.getMessage()]
    assert said.startswith("worker 0 closes while others train (1 of them)")


def test_two_open_optimizers_that_share_some_parameters_are_refused_until_one_is_closed() -> None:
    trunk, one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    first = fastps.DistributedOptimizer(torch.optim.SGD([*trunk.parameters(), *one.parameters()], lr=0.1))
    second = torch.optim.SGD([*trunk.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(fastps.UsageError, match=r"two open optimizers cannot share parameters; give one optimizer all of them"):
        fastps.DistributedOptimizer(second)
    one(trunk(torch.ones(1, 2))).sum().backward()
    first.step()  # it is unharmed
    first.close()
    with fastps.DistributedOptimizer(second) as optimizer:
        other(trunk(torch.ones(1, 2))).sum().backward()
        optimizer.step()
    both = torch.optim.SGD([*trunk.parameters(), *one.parameters(), *other.parameters()], lr=0.1)
    with fastps.DistributedOptimizer(both) as optimizer:  # the cure
        for head in (one, other):
            optimizer.zero_grad()
            head(trunk(torch.ones(1, 2))).sum().backward()
            optimizer.step()


def test_the_same_torch_optimizer_wrapped_again_keeps_its_state() -> None:
    found = []
    for times in (1, 2):
        model = torch.nn.Linear(2, 1)
        torch.nn.init.ones_(model.weight)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(times):
            optimizer = fastps.DistributedOptimizer(inner)
            for _ in range(4 // times):
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        optimizer.close()
        found.append(model.weight.tolist())
    assert found[0] == found[1]


def test_other_parameters_of_the_same_process_are_left_alone() -> None:
    one, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    with fastps.DistributedOptimizer(torch.optim.SGD(one.parameters(), lr=1.0)) as first:
        with fastps.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=1.0)):
            one(torch.ones(1, 1)).sum().backward()
            first.step()
        assert first.version == 1
