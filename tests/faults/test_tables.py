"""Jobs with tables while workers are killed, under a server process, and when memory is short: each push counts once."""

import os
import random
import signal
import time
from functools import partial

import numpy as np
import pytest

import fastps
from tests.support import processes

ROWS, WIDTH, WORKERS = 2_000, 8, 3


def _weights() -> dict[str, np.ndarray]:
    return {"d": np.zeros(16, np.float32), "t": np.zeros((ROWS, WIDTH), np.float32)}


def _push(worker: fastps.Worker, rank: int) -> None:
    """Push 1 for a row of the worker's own, for a row of all, and for 500 others that all push."""
    numbers = np.concatenate([[rank, WORKERS], np.arange(10, 510)])
    worker.put_rows("t", numbers, np.ones((len(numbers), WIDTH), np.float32))
    worker.step({"d": np.ones(16)})


def _work(store: fastps.Store, steps: list[int], rank: int) -> np.ndarray:
    """Push so many times; the table once all have."""
    with store.attach(rank) as worker:
        worker.wait_for_start()
        for _ in range(steps[rank]):
            _push(worker, rank)
        worker.wait_for_others()
        return worker.weights["t"].copy()


def _check(store: fastps.Store, table: np.ndarray) -> None:
    """Own rows tell how often each worker's pushes were folded, and the counters agree."""
    folded = [store.arena.counters(lane)["folded"] for lane in range(WORKERS)]
    assert np.array_equal(-table[:WORKERS], np.repeat(np.array(folded, np.float32)[:, None], WIDTH, 1))
    assert np.array_equal(-table[WORKERS], np.full(WIDTH, sum(folded), np.float32))
    assert (table[10:510] == table[WORKERS]).all() and not table[510:].any() and not table[WORKERS + 1 : 10].any()


@pytest.mark.parametrize("seed", range(4))
def test_a_worker_that_is_killed_at_any_moment_leaves_the_rows_of_whole_pushes(seed: int) -> None:
    rng = random.Random(seed)
    store = fastps.Store.create(
        _weights(), fastps.SGD(lr=1.0), sync="asp", workers=WORKERS, tables=["t"], on_worker_loss="continue"
    )
    with store:
        children = processes.start_each(partial(_work, store, [150, 1_000_000, 150]), WORKERS)
        while store.arena.counters(1)["posted"] < rng.randint(1, 60):
            time.sleep(0.0002)
        os.kill(children[1].process_id, signal.SIGKILL)
        processes.finish(children, 60)
        assert [child.exit_code for child in children] == [0, -signal.SIGKILL, 0], f"seed {seed}: {children}"
        _check(store, children[0].outcome)
        assert store.arena.counters(1)["done"] == store.arena.counters(1)["posted"]


def test_a_server_process_folds_rows() -> None:
    store = fastps.Store.create(_weights(), fastps.SGD(lr=1.0), sync="asp", workers=WORKERS, tables=["t"], server="process")
    with store:
        _check(store, processes.results(processes.start_each(partial(_work, store, [20] * WORKERS), WORKERS), 60)[0])


def test_a_table_beyond_the_memory_is_refused_in_one_sentence() -> None:
    huge = np.broadcast_to(np.float32(0), (2_000_000_000, 64))
    with pytest.raises(fastps.ArenaError, match=r"the arena needs [\d.]+ GiB for 128,000,000,000 parameters .* free"):
        fastps.Store.create({"t": huge}, fastps.SGD(lr=1.0), tables=["t"])
