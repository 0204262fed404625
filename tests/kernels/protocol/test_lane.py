"""Shard locks on plain memory: commits, grants, pins, order of events, locks of the dead, and two threads at once."""

import mmap
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from fastps.kernels.protocol import lane as codes
from fastps.kernels.protocol.lane import Lane
from fastps.kernels.shm.arena import Arena
from tests.support.plain_arena import ASP, BSP, Job

COMBINED = {**ASP, "combine": True}


def test_asp_folds_each_push_grants_at_once_and_its_worker_pulls_what_came_of_it() -> None:
    job = Job(2, ASP)
    lane, buffers = job.lanes[0], [-1]
    job.post(0, 0.25, 10)
    assert lane.try_combine() == codes.DONE
    assert (job.arena.version, job.current(), lane.granted(), lane.done()) == (1, 0.75, 2, 1)
    assert lane.pull_all(buffers) == -1 and lane.version == 1
    assert job.weights(buffers[0])[0] == job.current() == 0.75
    with pytest.raises(ValueError, match="expected a list of 1 buffers, found 2"):
        lane.pull_all([0, 0])


def test_pushes_of_one_drain_are_one_sum_with_their_mean_learning_rate() -> None:
    job = Job(3, COMBINED)
    job.post(2, 0.25, 10, learning_rate=1.0)
    job.post(0, 0.5, 11, learning_rate=0.5)
    job.post(2, 0.125, 12, learning_rate=0.75)
    assert job.lanes[1].try_combine() == codes.DONE
    assert (job.arena.version, job.current()) == (1, 1 - 0.75 * (0.25 + 0.5 + 0.125))
    assert [lane.granted() for lane in job.lanes] == [2, 1, 3]
    assert [lane.done() for lane in job.lanes] == [1, 0, 2]


def test_staleness_counts_sums_and_not_the_pushes_in_them() -> None:
    job = Job(3, COMBINED)
    for drain in range(3):
        for lane in (0, 2):
            job.lanes[lane].pull()
            job.post(lane, 0.0, 10 * drain + lane)
        assert job.lanes[0].try_combine() == codes.DONE
    job.post(1, 0.0, 40)  # computed with version 0
    job.lanes[0].pull()
    job.post(0, 0.0, 41)
    assert job.lanes[1].try_combine() == codes.DONE
    counters = [job.arena.counters(lane) for lane in range(3)]
    assert [row["folded"] for row in counters] == [4, 1, 3]
    assert [row["staleness_sum"] for row in counters] == [0, 3, 0]
    histograms = job.arena.histograms(0)
    assert dict(histograms["staleness"]) == {0: 7, 3: 1}
    assert histograms["average_staleness"] == pytest.approx((0 + 0 + 0 + 1.5) / 4)
    assert sum(count for _, count in histograms["gaps_ns"]) == 7, "eight pushes, the later of each sum without a gap"


@pytest.mark.parametrize(("policy", "versions"), [(ASP, 2), (COMBINED, 1)], ids=["each", "the drain"])
def test_null_pushes_count_and_change_nothing_beside_who_leaves(policy: dict[str, Any], versions: int) -> None:
    job = Job(2, policy)
    assert job.lanes[0].post(codes.KIND_NULL, 0, 0, 0, 5)
    assert job.lanes[1].post(codes.KIND_NULL, 0, 0, 0, 6)
    assert job.lanes[1].post(codes.KIND_LEAVE, 1, 0, 0, 7)
    assert job.lanes[0].try_combine() == codes.DONE
    assert (job.arena.version, job.current()) == (versions, 1.0)
    assert job.lanes[0].granted() == 2
    assert [lane.done() for lane in job.lanes] == [1, 2]


def test_bsp_folds_the_mean_when_the_last_worker_pushed() -> None:
    job = Job(2, BSP)
    job.post(0, 0.5, 10)
    assert job.lanes[0].try_combine() == codes.DONE
    assert (job.arena.version, job.current(), job.lanes[0].granted()) == (0, 1.0, 1)
    assert job.lanes[0].done() == 0, "a kept push still needs its slot"
    job.post(1, 1.0, 20)
    assert job.lanes[1].try_combine() == codes.DONE
    assert (job.arena.version, job.current()) == (1, 0.25)
    assert [lane.granted() for lane in job.lanes] == [2, 2]
    assert [lane.done() for lane in job.lanes] == [1, 1]


def test_events_are_decided_in_order_of_their_times_whatever_the_lane() -> None:
    job = Job(3, {"fold": "each", "grant": "bounded", "low": 0, "high": 0})
    job.post(2, 0.0, 30)
    job.post(0, 0.0, 20)
    job.post(1, 0.0, 10)
    assert job.lanes[2].try_combine() == codes.DONE
    # Worker 1 pushed first and waited; all are level after the last of them, so all are granted.
    assert [lane.granted() for lane in job.lanes] == [2, 2, 2]


def test_staleness_counts_versions_between_read_and_fold() -> None:
    job = Job(2, ASP)
    for now_ns in range(3):
        job.post(0, 0.0, now_ns)
        job.lanes[0].try_combine()
    job.post(1, 0.0, 9)  # computed with version 0
    job.lanes[1].try_combine()
    counters = job.arena.counters(1)
    assert (counters["folded"], counters["staleness_sum"], counters["staleness_max"]) == (1, 3, 3)


def test_a_pinned_buffer_is_never_written() -> None:
    job = Job(2, ASP)
    pinned = job.lanes[1].pull()
    before = job.weights(pinned).copy()
    for now_ns in range(20):
        job.post(0, 0.125, now_ns)
        job.lanes[0].try_combine()
        job.lanes[0].pull()
    assert np.array_equal(job.weights(pinned), before)
    assert job.lanes[1].pull() != pinned
    assert job.lanes[1].version == 20


def test_every_worker_may_pin_another_buffer_and_a_fold_still_finds_one() -> None:
    job = Job(4, ASP)
    pinned = []
    for reader in range(4):
        pinned.append(job.lanes[reader].pull())
        job.post(0, 0.125, reader)
        assert job.lanes[0].try_combine() == codes.DONE
    assert len(set(pinned)) == 4
    job.post(0, 0.125, 10)
    assert job.lanes[0].try_combine() == codes.DONE


def test_a_worker_that_leaves_lets_the_others_go_on() -> None:
    job = Job(2, BSP)
    job.post(0, 0.5, 10)
    job.lanes[0].try_combine()
    assert job.lanes[1].post(codes.KIND_LEAVE, 0, 0, 0, 20)
    assert job.lanes[1].try_combine() == codes.DONE
    assert (job.arena.version, job.current(), job.lanes[0].granted()) == (1, 0.5, 2)


@pytest.mark.parametrize(("kind", "slot"), [(codes.KIND_PUSH, 7), (99, 0)], ids=["a slot", "a kind"])
def test_a_descriptor_of_what_does_not_exist_is_named_and_nothing_is_committed(kind: int, slot: int) -> None:
    job = Job(2, ASP)
    assert job.lanes[1].post(kind, 0, slot, 0, 1)
    assert job.lanes[0].try_combine() == codes.BAD_DESCRIPTOR
    assert job.lanes[0].bad_lane == 1
    assert (job.arena.version, job.lanes[0].owner()) == (0, -1)


@pytest.mark.slow
def test_a_wait_without_sleep_ends_with_the_grant_or_its_looks() -> None:
    job = Job(2, BSP)
    first, second = job.lanes
    assert first.wait_awake(1, 0, 1)
    assert not first.wait_awake(2, 0, 1000)
    for lane in (0, 1):
        job.post(lane, 0.25, 10 + lane)
    assert second.try_combine() == codes.DONE
    assert first.wait_awake(2, 1, 1) and not first.wait_awake(2, 2, 1)


def test_a_push_without_a_grant_is_refused() -> None:
    job = Job(2, BSP)
    job.post(0, 0.5, 10)
    job.post(0, 0.5, 11)
    assert job.lanes[0].try_combine() == codes.BAD_DESCRIPTOR
    assert job.lanes[0].bad_lane == 0


def test_a_dead_owners_lock_is_recovered_and_its_work_done_again() -> None:
    job = Job(3, ASP)
    assert job.lanes[0].hold()  # dies here
    job.post(0, 0.25, 10)
    job.post(1, 0.25, 20)
    assert job.lanes[1].try_combine() == codes.BUSY
    assert job.lanes[1].recover_lock(2) == codes.BUSY, "only the owner's lock may be recovered"
    assert job.lanes[1].recover_lock(0) == codes.DONE
    assert (job.arena.version, job.current(), job.lanes[1].owner()) == (2, 0.5, -1)


def test_the_flip_of_a_late_owner_fails() -> None:
    job = Job(2, ASP)
    assert job.lanes[0].hold()
    job.lanes[0].spare()
    job.post(1, 0.25, 10)
    assert job.lanes[1].recover_lock(0) == codes.DONE
    assert job.lanes[0].release(True) == codes.FENCED
    assert (job.arena.version, job.current()) == (1, 0.75)
    assert job.lanes[1].hold() and job.lanes[1].release(False) == codes.DONE
    assert job.lanes[0].recover_lock(1, 0, generation=7) == codes.BUSY, "no owner of that generation holds it"


def test_publishing_by_hand_keeps_the_version() -> None:
    job = Job(2, ASP)
    assert job.lanes[0].hold()
    buffer, _ = job.lanes[0].spare()
    job.weights(buffer)[:] = 7.0
    assert job.lanes[0].release(True) == codes.DONE
    assert (job.arena.version, job.current()) == (0, 7.0)


def test_a_damaged_header_is_refused() -> None:
    job = Job(2, ASP)
    damaged = bytearray(job.memory[:4096])
    damaged[12] ^= 1  # the number of lanes
    memory = mmap.mmap(-1, len(job.memory))
    memory[:4096] = bytes(damaged)
    with pytest.raises(ValueError, match="damaged"):
        Arena(memory)
    with pytest.raises(ValueError, match="found other memory"):
        Arena(mmap.mmap(-1, 8192))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("policy", [BSP, ASP, COMBINED, {"fold": "each", "grant": "bounded", "low": 1, "high": 1}])
@pytest.mark.parametrize("awake", [False, True], ids=["asleep", "awake"])
def test_threads_on_lanes_of_one_process_lose_no_push(policy: dict[str, Any], awake: bool) -> None:
    """One process may attach twice: the same protocol between threads, every push folded exactly once."""
    workers, pushes = 4, 2_000
    job = Job(workers, policy)
    amount = 1.0 / 1024

    def work(index: int) -> None:
        lane = job.lanes[index]
        for step in range(pushes):
            # A slot may be written again when its push of two steps ago is done with.
            assert _wait_for(lane, step + 1 if policy["grant"] != "at-once" else 0, max(0, step - 1), awake)
            job.post(index, amount, step)
            lane.try_combine()
            lane.pull()
        assert _wait_for(lane, 0, pushes, awake)

    with ThreadPoolExecutor(workers) as threads:
        list(threads.map(work, range(workers)))
    total = pushes if policy is BSP else workers * pushes
    assert job.arena.version == total or (policy is COMBINED and pushes <= job.arena.version <= total)
    assert sum(job.arena.counters(index)["folded"] for index in range(workers)) == workers * pushes
    assert job.current() == 1.0 - total * amount, "sums of multiples of 1/1024 are exact"


def _wait_for(lane: Lane, granted: int, done: int, awake: bool) -> bool:
    for _ in range(2_000):
        if (awake and lane.wait_awake(granted, done, 4)) or lane.wait(granted, done, 0 if awake else 100, 5_000_000):
            return True
        lane.try_combine()
    return False
