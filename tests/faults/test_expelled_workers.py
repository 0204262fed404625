"""Fault case 23 with live workers: a lane whose words are damaged is expelled by name, and the others go on or the job ends.

Each case damages a real word of a real arena between two calls.
"""

import logging
import time
from typing import Any

import numpy as np
import pytest

import fastps
from fastps.kernels.protocol.lane import KIND_PUSH
from fastps.kernels.shm.arena import LANE_EXPELLED, LANE_LIVE
from tests.support import processes
from tests.support.damaged_lanes import DAMAGES, LaneWords

WEIGHTS = ONES = {"w": np.ones(8, np.float32), "v": np.ones(8, np.float32)}
SPECS = [
    "asp", "bsp", "ssp:1", "dssp:1,3", "backup:1", "softsync:1", "hardsync:64", "adv:1", "r2sp:0.8", "bsp,shards=2",
    "ssp:1,shards=2",
]  # fmt: skip
BAD = 1


def _store(sync: str, policy: str = "continue") -> fastps.Store:
    return fastps.Store.create(WEIGHTS, fastps.SGD(lr=1 / 64), sync=sync, workers=3, on_worker_loss=policy, timeout_s=20.0)


def _step_all(workers: list[fastps.Worker], rounds: int) -> None:
    """Each worker makes its steps as the discipline lets it: nobody waits in a call. R2SP grants by times."""
    left = {worker.rank: rounds for worker in workers}
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for worker in workers:
            if worker.lane.awaits and not worker.lane.advance(worker.store.clock.now_ns(), worker._goes_on_at_once):
                worker.try_combine()
                continue
            if left[worker.rank]:
                worker.pull()
                for view in worker.gradients.values():
                    view[...] = 1.0
                worker.push(worker.store.hypers, samples=16)
                left[worker.rank] -= 1
        if not any(left.values()):
            return
    raise AssertionError(f"steps that were not granted: {left}")


def _damaged(store: fastps.Store, what: str) -> tuple[list[fastps.Worker], dict[str, Any]]:
    """Three workers, each with two steps, of which one has damaged words, and a push where the damage needs one.

    Returns the counters of that one from before as well.
    """
    damage, has_posted, _ = DAMAGES[what]
    workers = [store.attach(rank) for rank in range(3)]
    _step_all(workers, 2)
    bad = workers[BAD]
    while bad.lane.awaits and not bad.lane.advance(store.clock.now_ns(), bad._goes_on_at_once):
        for worker in workers:
            worker.try_combine()
    before = store.arena.counters(BAD)
    if has_posted:
        assert bad.lane.post(KIND_PUSH, bad.steps, bad.slot, bad.version, store.clock.now_ns())
    damage(LaneWords(store.memory, BAD))
    return workers, before


def _end(*workers: fastps.Worker) -> None:
    for worker in workers:
        worker.leave()
    for worker in workers:
        worker.wait_for_others()
        worker.close()


@pytest.mark.parametrize("what", DAMAGES)
@pytest.mark.parametrize("sync", SPECS)
def test_a_worker_whose_words_are_damaged_is_expelled_by_name_and_the_others_go_on(
    sync: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    said = DAMAGES[what][2]
    with _store(sync) as store:
        workers, before = _damaged(store, what)
        good, bad = [workers[0], workers[2]], workers[BAD]
        with caplog.at_level(logging.WARNING):
            for worker in good:
                worker.try_combine()
            assert store.arena.lane_state(BAD) == LANE_EXPELLED
            for worker in good:
                worker.check_peers()
        assert f"worker {BAD} (process" in caplog.text and said in caplog.text and "the job goes on without it" in caplog.text
        _step_all(good, 6)
        with pytest.raises(fastps.ExpelledError, match=f"worker {BAD} .* was expelled: .*{said}") as raised:
            bad.push(store.hypers, samples=16)
            bad.advance()
        assert raised.value.worker == BAD
        bad.close(str(raised.value))
        after = store.arena.counters(BAD)
        assert after["folded"] <= before["folded"] + (before["posted"] - before["done"]) * store.arena.shards
        for worker in good:
            worker.leave()
        for worker in good:
            worker.wait_for_others()
            counters = store.arena.counters(worker.rank)
            assert counters["folded"] + counters["dropped"] == 8 * store.arena.shards, "each push once"
            assert counters["dropped"] == 0 or "backup" in sync
        total = sum(store.arena.counters(rank)["folded"] for rank in range(3))
        if sync in ("asp", "ssp:1", "dssp:1,3", "r2sp:0.8"):
            assert good[0].weights["w"].tolist() == [1 - total / 64] * 8, "the weights are those of the folded pushes"
        for worker in good:
            worker.close()


@pytest.mark.parametrize("what", DAMAGES)
@pytest.mark.parametrize("sync", ["asp", "bsp", "ssp:1,shards=2"])
def test_where_the_job_may_not_go_on_without_a_worker_it_ends_with_an_error_that_names_it(sync: str, what: str) -> None:
    with _store(sync, "stop") as store:
        workers, _ = _damaged(store, what)
        for rank in (0, 2):
            with pytest.raises(fastps.ProtocolError, match=f"worker {BAD} posted a push that it had no right to post"):
                workers[rank].try_combine()
        assert store.arena.lane_state(BAD) == LANE_LIVE
        for worker in workers:
            worker.close("the test ends")


@pytest.mark.parametrize("what", DAMAGES)
@pytest.mark.parametrize("sync", ["asp", "bsp", "bsp,shards=2", "softsync:1"])
def test_another_worker_takes_the_place_of_one_that_was_expelled_and_has_ended(sync: str, what: str) -> None:
    with _store(sync) as store:
        workers, _ = _damaged(store, what)
        workers[0].try_combine()
        workers[BAD].close("it was expelled")
        _step_all([workers[0], workers[2]], 1)
        again = store.attach(BAD)
        assert again.generation == 1 and store.arena.lane_state(BAD) == LANE_LIVE
        before = store.arena.counters(BAD)
        _step_all([workers[0], again, workers[2]], 4)
        _end(workers[0], again, workers[2])
        after = store.arena.counters(BAD)
        assert after["folded"] - before["folded"] == 4 * store.arena.shards


def test_a_worker_in_a_wait_that_is_expelled_ends_with_an_error_that_says_so() -> None:
    """Its process lives, and waits for a grant that never comes."""
    with _store("bsp") as store:
        good = [store.attach(0), store.attach(2)]

        def work() -> str:
            with store.attach(BAD) as worker:
                try:
                    worker.step(ONES)
                except fastps.ExpelledError as error:
                    return str(error)
            return "it was not expelled"

        child = processes.start(work)
        processes.wait_until(lambda: store.arena.counters(BAD)["posted"])
        store.clock.sleep_ns(20_000_000)
        DAMAGES["slot"][0](LaneWords(store.memory, BAD))  # of its push, which waits for the others'
        _step_all(good, 3)
        processes.finish([child], 20)
        assert "was expelled" in str(child.outcome) and f"slot {1 << 30}" in str(child.outcome)
        _end(*good)
