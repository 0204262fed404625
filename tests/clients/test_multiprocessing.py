"""torch's Hogwild example and process pools, in processes that the program starts itself."""

import concurrent.futures
import copy
import multiprocessing
import os
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

import fastps
from tests.clients import digits


def hogwild(rank: int, model: torch.nn.Module) -> None:
    """The function that each process of the example runs; only the wrapped optimizer is new."""
    optimizer = fastps.DistributedOptimizer(digits.make_sgd(model), sync="asp")
    digits.train(model, optimizer, rank, 2)


def hogwild_as_it_stood(rank: int, model: torch.nn.Module, told: Any) -> None:
    """The same under mp.Process; reports the error that it meets."""
    try:
        hogwild(rank, model)
        told.put("trained")
    except fastps.Error as error:
        told.put(str(error))


def hogwild_that_says_who_it_is(rank: int, shared: torch.nn.Module, told: Any, job: str) -> None:
    """The same with a copy of the model, and with job, rank and number of workers given."""
    model = copy.deepcopy(shared)
    optimizer = fastps.DistributedOptimizer(digits.make_sgd(model), sync="asp", job=job, rank=rank, workers=2)
    digits.train(model, optimizer, rank, 2)
    if rank == 0:
        optimizer.wait_for_others()
        told.put(digits.accuracy(model))
    optimizer.close()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_hogwild_by_processes_of_its_own_is_refused_in_one_sentence(method: str) -> None:
    model = digits.make_model()
    model.share_memory()
    context = mp.get_context(method)
    told = context.SimpleQueue()
    children = [context.Process(target=hogwild_as_it_stood, args=(rank, model, told)) for rank in range(2)]
    for child in children:
        child.start()
    found = [told.get(), told.get()]
    for child in children:
        child.join()
    assert all("fastps.spawn(fn, args, workers=N)" in text for text in found), found


def test_hogwild_by_spawn_learns_what_the_plain_program_learns() -> None:
    model = digits.make_model()
    fastps.spawn(hogwild, (model,), workers=2, model=model)
    assert digits.accuracy(model) >= digits.least_accuracy()


def test_hogwild_that_says_who_it_is_learns_what_the_plain_program_learns() -> None:
    model = digits.make_model()
    model.share_memory()
    context = mp.get_context("spawn")
    told = context.SimpleQueue()
    job = f"hogwild-{os.getpid()}"
    children = [context.Process(target=hogwild_that_says_who_it_is, args=(rank, model, told, job)) for rank in range(2)]
    for child in children:
        child.start()
    found = told.get()
    for child in children:
        child.join()
    assert found >= digits.least_accuracy()


def lose_a_worker(rank: int) -> None:
    """Worker 1 dies; worker 0 gets an error."""
    model = digits.make_model()
    optimizer = fastps.DistributedOptimizer(
        digits.make_sgd(model), sync="bsp", job=f"pool-{os.getppid()}", rank=rank, workers=2
    )
    optimizer.wait_for_start()
    if rank == 1:
        optimizer.close("it had to")
        return
    digits.train(model, optimizer)


def test_pools_are_given_back_the_error_of_a_lost_worker() -> None:
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as executor:
        futures = [executor.submit(lose_a_worker, rank) for rank in range(2)]
        with pytest.raises(fastps.WorkerDiedError, match="it had to") as caught:
            futures[0].result(timeout=100)
        assert caught.value.worker == 1
    with context.Pool(2) as pool:
        waiting = [pool.apply_async(lose_a_worker, (rank,)) for rank in range(2)]
        with pytest.raises(fastps.WorkerDiedError, match="it had to"):
            waiting[0].get(timeout=100)
        pool.close()
        pool.join()
