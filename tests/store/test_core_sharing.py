"""The cores of a job, also where each worker has its own: who spins, who helps with a fold, and where everyone begins."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Set

import numpy as np
import pytest

import fastps
from fastps.job import limits as config
from fastps.kernels.protocol.wait import SHORT_WAIT
from fastps.store import core_sharing as cores

_OWN = os.sched_getaffinity(0)


@contextlib.contextmanager
def _job() -> Iterator[fastps.Store]:
    """A job of two workers; afterwards this process may run everywhere again."""
    with fastps.Store.create({"w": np.ones(64, np.float32)}, fastps.SGD(lr=1.0), workers=2) as store:
        try:
            yield store
        finally:
            os.sched_setaffinity(0, _OWN)


def _attach(store: fastps.Store, rank: int, own: Set[int]) -> fastps.Worker:
    os.sched_setaffinity(0, own)
    return store.attach(rank)


def _stays_awake(worker: fastps.Worker) -> bool:
    """Whether the next wait for a grant begins without sleep."""
    now_ns = time.monotonic_ns()
    worker.step_wait.begin_step(99, 0, now_ns)
    worker.step_wait.want(now_ns)
    return worker.step_wait.is_awake


@pytest.mark.skipif(len(_OWN) < 2, reason="needs two cores")
def test_workers_with_a_core_each_spin_and_keep_it_and_share_their_folds() -> None:
    with _job() as store, _attach(store, 0, {min(_OWN)}) as first, _attach(store, 1, {max(_OWN)}) as second:
        assert first.cores.spins == 0  # it was alone, and one of two workers
        first.cores.check()
        assert first.cores.spins == second.cores.spins == config.SPINS
        assert (first.lane.begins_with(2), second.lane.begins_with(2)) == (0b01, 0b10)
        assert not _stays_awake(first)


def test_workers_that_share_a_core_fold_alone_and_stay_awake_for_short_waits_only() -> None:
    with _job() as store, _attach(store, 0, {min(_OWN)}) as first, _attach(store, 1, {min(_OWN)}) as second:
        first.cores.check()
        assert first.cores.spins == second.cores.spins == 0
        assert first.lane.begins_with(2) == second.lane.begins_with(2) == 0b11
        assert _stays_awake(first)
        for takers in (2, 8):  # on one core, or on two: 1 ms for each worker on a core
            first.cores.share_among(takers)
            short_ns = SHORT_WAIT * takers
            first.step_wait.last_wait_ns = short_ns
            assert not _stays_awake(first)
            first.step_wait.last_wait_ns = short_ns - 1
            assert _stays_awake(first)


def test_a_long_wait_of_workers_on_one_core_ends_asleep() -> None:
    with _job() as store, _attach(store, 0, {min(_OWN)}) as first, _attach(store, 1, {min(_OWN)}) as second:
        late = threading.Timer(0.3, second.step)
        late.start()
        began_ns = time.process_time_ns()
        first.step()
        spent_ns = time.process_time_ns() - began_ns
        late.join()
        assert spent_ns < 100_000_000, "a wait of 300 ms that never slept"
        assert not _stays_awake(first)


def test_the_cores_of_who_has_left_count_no_more() -> None:
    with _job() as store, _attach(store, 0, {min(_OWN)}) as worker:
        with _attach(store, 1, {max(_OWN)}):
            assert store.arena.cores() == len({min(_OWN), max(_OWN)})
        assert store.arena.cores() == 1
        worker.cores.check()
        assert worker.cores.spins == 0


@pytest.mark.parametrize("count", [-(1 << 62), 0, 1 << 62])
def test_a_number_of_cores_that_makes_no_sense_is_bounded(count: int) -> None:
    with _job() as store, store.attach(0) as worker, store.attach(1):
        store.arena.set_cores(1, 0, count)
        assert store.arena.cores() == len(_OWN) + count
        worker.cores.check()
        cores_at_most = len(_OWN) if count <= 0 else os.cpu_count() or 1
        assert worker.cores.spins == cores.spins(2, cores_at_most)


@pytest.mark.parametrize(("takers", "count", "own", "table"), [
    (2, 3, [2, 5, 6], b""),  # each has a core, and a part by the number of its lane
    (4, 3, [2, 5, 6], bytes([0, 0, 0, 0, 0, 1, 2])),
    (4, 4, [0, 1], b""),  # others have other cores
])  # fmt: skip
def test_workers_that_outnumber_the_cores_begin_a_fold_where_their_core_did(
    takers: int, count: int, own: list[int], table: bytes
) -> None:
    assert cores.parts(takers, count, own) == table
