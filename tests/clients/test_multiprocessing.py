"""torch's Hogwild example and process pools, in processes that the program starts itself."""

import concurrent.futures
import multiprocessing
import os

import pytest
import torch

import fastps
from tests.clients import digits


def hogwild(rank: int, model: torch.nn.Module) -> None:
    """The function that each process of the example runs; only the wrapped optimizer is new."""
    optimizer = fastps.DistributedOptimizer(digits.make_sgd(model), sync="asp")
    digits.train(model, optimizer, rank, 2)


def test_hogwild_by_spawn_learns_what_the_plain_program_learns() -> None:
    model = digits.make_model()
    fastps.spawn(hogwild, (model,), workers=2, model=model)
    assert digits.accuracy(model) >= digits.least_accuracy()


def test_pools_are_given_back_the_error_of_a_lost_worker() -> None:
    context, job = multiprocessing.get_context("spawn"), f"pool-{os.getpid()}"
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as executor:
        futures = [executor.submit(digits.lose_a_worker, job, rank) for rank in range(2)]
        with pytest.raises(fastps.WorkerDiedError, match="it had to") as caught:
            futures[0].result(timeout=100)
        assert caught.value.worker == 1
    with context.Pool(2) as pool:
        waiting = [pool.apply_async(digits.lose_a_worker, (job, rank)) for rank in range(2)]
        with pytest.raises(fastps.WorkerDiedError, match="it had to"):
            waiting[0].get(timeout=100)
        pool.close()
        pool.join()
