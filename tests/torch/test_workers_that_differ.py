"""Scripts whose workers do not do the same: what goes wrong is said by name, and a slow worker that lives is waited for."""

import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastps
from tests.support import processes
from tests.support.said import listen


def _outcomes(work: Callable[[int], Any], workers: int = 2) -> list[Any]:
    children = processes.start_job(work, workers)
    processes.finish(children, 90.0)
    return [child.outcome for child in children]


def _step(model: torch.nn.Module, optimizer: Any, rank: int = 0) -> None:
    optimizer.zero_grad()
    model(torch.full((2, 3), 1.0 + rank)).sum().backward()
    optimizer.step()


def _model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1)


def test_a_second_step_after_one_backward_is_told_of_where_it_has_nothing_to_push() -> None:
    said, model = listen(), _model()
    with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), "asp") as optimizer:
        for _ in range(3):
            _step(model, optimizer)
            optimizer.step()
        found = [each for each in said if "pushes no gradient" in each]
        assert len(found) == 1 and "took those of 2 parameters" in found[0]
    plain, model = _model(), _model()
    inner, expected = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    with fastps.DistributedOptimizer(inner, "bsp") as optimizer:  # as in torch
        for each, of in ((optimizer, model), (expected, plain)):
            _step(of, each)
            each.step()
        assert torch.equal(model.weight, plain.weight)


@pytest.mark.parametrize("clear", ["optimizer", "model"])
def test_steps_with_a_backward_each_are_not_told_of(clear: str) -> None:
    said, model = listen(), _model()
    with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), "asp") as optimizer:
        for _ in range(4):
            (optimizer if clear == "optimizer" else model).zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        optimizer.step()  # a step without a gradient, as it is in torch
    assert not [each for each in said if "pushes no gradient" in each]


CHILD = "import torch, fastps; m = torch.nn.Linear(3, 1); fastps.DistributedOptimizer(torch.optim.SGD(m.parameters(), 0.1))"


def _told(rank: int, workers: int) -> None:
    os.environ.update({"FASTPS_RANK": str(rank), "FASTPS_WORKERS": str(workers), "FASTPS_JOB": f"told-{os.getppid()}"})


def _wraps(**options: Any) -> str:
    try:
        fastps.DistributedOptimizer(torch.optim.SGD(_model().parameters(), lr=0.1), **options).close()
    except fastps.UsageError as error:
        return str(error)
    return ""


def _in_child(queue: Any, options: dict[str, Any]) -> None:
    queue.put(_wraps(**options))


@pytest.mark.slow
def test_a_program_that_a_worker_starts_is_told_whose_rank_it_has_inherited() -> None:
    def work(rank: int) -> list[str]:
        _told(rank, 2)
        model, found = _model(), []
        with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), timeout_s=60) as optimizer:
            _step(model, optimizer)
            if rank == 1:
                program = [sys.executable, "-c", CHILD]
                found.append(subprocess.run(program, capture_output=True, text=True, check=False).stderr)
                for options_of_child in ({}, {"workers": 1}):
                    queue = multiprocessing.get_context("fork").SimpleQueue()
                    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(queue, options_of_child))
                    child.start()
                    found.append(queue.get())
                    child.join()
            _step(model, optimizer)
        return found

    _, (exec_same, fork_same, fork_alone) = _outcomes(work)
    for said in (exec_same, fork_same):
        assert "this process was started by worker 1 (process " in said and "workers=1" in said
    assert fork_alone == ""


@pytest.mark.slow
def test_a_worker_that_lives_is_waited_for_beyond_the_timeout_and_one_that_is_stopped_is_not() -> None:
    def work(rank: int) -> tuple[int, list[str]]:
        said, model = listen(), _model()
        with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), timeout_s=1) as optimizer:
            optimizer.wait_for_start()
            for _ in range(2):
                _step(model, optimizer, rank)
                if rank == 0:
                    time.sleep(3)  # an evaluation
        return optimizer.version, [each for each in said if "goes on waiting" in each]

    (_, zero), (version, one) = _outcomes(work)
    assert version == 2 and not zero
    assert one and one[0].startswith("worker 1 has waited 1 s at step 2 for worker 0 (at step 1), and goes on waiting")


def test_workers_that_wait_for_each_other_in_two_jobs_are_told_both() -> None:
    def work(rank: int) -> str:
        one, other = _model(), _model()
        jobs = []
        for model, name in ((one, "first"), (other, "second")):
            inner, job = torch.optim.SGD(model.parameters(), lr=0.1), f"{name}-{os.getppid()}"
            jobs.append(fastps.DistributedOptimizer(inner, timeout_s=2, job=job, rank=rank, workers=2))
        try:
            for _ in range(3 + rank):
                _step(one, jobs[0], rank)
            _step(other, jobs[1], rank)
        except (fastps.TimeoutExceededError, fastps.WorkerDiedError) as error:
            for each in jobs:
                each.close("they differ")
            return str(error)
        return ""

    said = [each for each in _outcomes(work) if "let all workers make the same number of steps in each job" in each]
    assert said and any(f"in job '{name}-" in said[0] for name in ("first", "second")), said


@pytest.mark.parametrize("ends", ["wait_for_others", "unwrap", "close"])
@pytest.mark.parametrize(
    ("kind", "sync"),  # folded by all, and run by worker 0
    [(torch.optim.SGD, "bsp"), (torch.optim.SGD, "backup:1"), (torch.optim.SGD, "ssp:1"), (torch.optim.Adafactor, "bsp")],
)
@pytest.mark.sampled(3)
def test_two_optimizers_of_uneven_loops_end_one_after_the_other(kind: Any, sync: str, ends: str) -> None:
    def work(rank: int) -> Any:
        models, jobs = [_model(), _model()], []
        for number, model in enumerate(models):
            inner, job = kind(model.parameters(), lr=0.1), f"{number}-{os.getppid()}"
            jobs.append(fastps.DistributedOptimizer(inner, sync, timeout_s=20, job=job, rank=rank, workers=3))
        for _ in range(3 + 4 * rank):
            for model, job in zip(models, jobs, strict=True):
                _step(model, job, rank)
        for job in jobs:
            getattr(job, ends)()
        for job in jobs:
            job.close()
        return [model.weight.tolist() for model in models]

    found = _outcomes(work, 3)
    if ends == "wait_for_others":
        assert found[0] == found[1] == found[2], "all have the job's last weights"
    assert all(isinstance(weights, list) for weights in found), found


def test_two_optimizers_whose_step_numbers_jump_end_one_after_the_other() -> None:
    def work(rank: int) -> Any:
        models, jobs, draws = [_model(), _model()], [], random.Random(rank)
        for number, model in enumerate(models):
            inner, job = torch.optim.SGD(model.parameters(), lr=0.1), f"{number}-{os.getppid()}"
            jobs.append(fastps.DistributedOptimizer(inner, "backup:1", timeout_s=20, job=job, rank=rank, workers=4))
        for _ in range(30):  # a late push is dropped, and its worker goes on at the newest step
            time.sleep(draws.random() * 0.005)
            for model, job in zip(models, jobs, strict=True):
                _step(model, job, rank)
        for job in jobs:
            job.wait_for_others()
        for job in jobs:
            job.close()
        return [model.weight.tolist() for model in models]

    found = _outcomes(work, 4)
    assert all(weights == found[0] and isinstance(weights, list) for weights in found), found


def test_a_job_goes_on_where_another_one_of_the_same_workers_ends_after_the_same_step() -> None:
    def work(rank: int) -> Any:
        models = [_model(), _model()]
        jobs: list[Any] = [
            fastps.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), job=f"{number}-{os.getppid()}", rank=rank, workers=3
            )
            for number, model in enumerate(models)
        ]
        for step in range(6):
            if step == 3:
                jobs[0].wait_for_others()
            time.sleep(0.05 * rank)
            for model, job in list(zip(models, jobs, strict=True))[step >= 3 :]:
                _step(model, job, rank)
        for job in jobs:
            job.close()
        return models[1].weight.tolist()

    found = _outcomes(work, 3)
    assert found[0] == found[1] == found[2] and isinstance(found[0], list), found
