"""What a combiner makes of damaged lanes: whose damage it is, where the next owner begins, and what is counted."""

import struct

import pytest

from fastps.kernels.protocol import lane as codes
from fastps.kernels.protocol.lane import Lane
from fastps.kernels.shm.arena import LANE_DEAD, LANE_EXPELLED, LANE_JOINING
from fastps.kernels.shm.offsets import OFFSETS
from tests.kernels.shm.test_damage import POLICIES, Job
from tests.support.damaged_lanes import DAMAGES, LaneWords

BAD = 1


def _job(policy: str, shards: int = 1) -> Job:
    job = Job(3, POLICIES[policy], shards=shards)
    for rank in range(3):
        assert job.arena.claim(rank, 1) == 0
    return job


def _words(job: Job) -> LaneWords:
    return LaneWords(job.memory, BAD)


def _damage(job: Job, what: str) -> None:
    DAMAGES[what][0](_words(job))


def _push(job: Job, rank: int, now_ns: int) -> None:
    job.lanes[rank].pull()
    job.post(rank, 0.25, now_ns)


def _combine(job: Job, rank: int = 0, now_ns: int = 1_000_000) -> None:
    """Combine as a worker does: expel whom the combiner finds damaged, and go on."""
    for _ in range(8):
        outcome = job.lanes[rank].try_combine(now_ns)
        if outcome != codes.BAD_DESCRIPTOR:
            assert outcome == codes.DONE
            return
        job.arena.expel(job.lanes[rank].bad_lane, job.lanes[rank].damage)
    raise AssertionError("the same damage is found again and again")


def _round(job: Job, now_ns: int) -> int:
    """Each worker makes a push; returns the time."""
    for rank in range(3):
        _push(job, rank, now_ns + rank)
    _combine(job)
    return now_ns + 10


def _replace(job: Job) -> None:
    """Another process takes the damaged lane, while its own death or expulsion may not have been seen by anyone."""
    assert job.arena.claim(BAD, 1, True) == job.arena.generation(BAD)
    job.lanes[BAD] = Lane(job.arena, BAD)


@pytest.mark.parametrize("what", DAMAGES)
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("policy", ["asp", "bsp", "ssp", "softsync", "adv"])
def test_damage_that_is_found_after_the_lane_has_another_owner_is_not_blamed_on_that_one(
    policy: str, shards: int, what: str
) -> None:
    job = _job(policy, shards)
    now_ns = _round(job, 10)
    _push(job, BAD, now_ns)
    _damage(job, what)
    _replace(job)  # the first owner died, and nobody has combined since
    assert job.lanes[0].try_combine(now_ns) == codes.DONE, "nobody is blamed"
    assert job.arena.lane_state(BAD) == LANE_JOINING and job.arena.has_joined(BAD)
    assert job.arena.counters(BAD)["posted"] == job.arena.counters(BAD)["done"], "nobody waits for what is left of the first"
    job.arena.joined(BAD)
    before = job.arena.counters(BAD)
    for _ in range(3):
        now_ns = _round(job, now_ns + 10)
    after = job.arena.counters(BAD)
    assert after["folded"] - before["folded"] == 3 * shards, "what the second owner posts is folded, each push once"
    assert [job.arena.counters(rank)["folded"] for rank in (0, 2)] == [4 * shards] * 2


def test_sound_pushes_of_a_dead_owner_are_folded_before_its_damaged_one_and_the_rest_is_counted_as_dropped() -> None:
    job = _job("asp")
    for step in range(4):
        _push(job, BAD, 10 + step)
    _words(job).write("kind", 99, 2)
    _replace(job)
    _combine(job)
    counters = job.arena.counters(BAD)
    assert (counters["folded"], counters["dropped"], counters["done"]) == (2, 2, 4)
    assert job.arena.has_joined(BAD)


@pytest.mark.parametrize("policy", ["bsp", "softsync"])
def test_a_kept_push_of_a_dead_owner_whose_slot_is_damaged_is_dropped_from_its_sum(policy: str) -> None:
    job = Job(4, POLICIES[policy])
    for rank in range(4):
        job.arena.claim(rank, 1)
    _push(job, BAD, 10)
    _combine(job)
    assert job.arena.counters(BAD)["done"] == 0, "its sum is not complete"
    _damage(job, "slot")
    _replace(job)
    for rank in (0, 2, 3):
        _push(job, rank, 20 + rank)
    assert job.lanes[0].try_combine(100) == codes.DONE
    assert job.arena.has_joined(BAD) and job.arena.counters(BAD)["dropped"] == 1
    assert sum(job.arena.counters(rank)["folded"] for rank in (0, 2, 3)) == 3


def _expelled(shards: int, what: str) -> Job:
    """A job whose worker BAD has made one step, and was expelled for what was damaged in the next."""
    job = _job("asp", shards)
    now_ns = _round(job, 10)
    _push(job, BAD, now_ns)
    _damage(job, what)
    _combine(job)
    assert job.arena.lane_state(BAD) == LANE_EXPELLED
    return job


@pytest.mark.parametrize("what", DAMAGES)
@pytest.mark.parametrize("shards", [1, 2])
def test_a_joiner_that_dies_before_any_shard_admits_it_leaves_nothing_undecided(shards: int, what: str) -> None:
    """The others end once every lane's posts are done with."""
    job = _expelled(shards, what)
    _replace(job)
    assert job.arena.mark_dead(BAD, 1)
    _combine(job)
    counters = job.arena.counters(BAD)
    assert job.arena.lane_state(BAD) == LANE_DEAD and counters["done"] == counters["posted"]


@pytest.mark.parametrize("what", ["kind", "slot"])
@pytest.mark.parametrize("policy", ["asp", "bsp"])
@pytest.mark.parametrize("shards", [1, 2])
def test_every_push_of_an_expelled_worker_is_folded_or_dropped_and_counted_once(shards: int, policy: str, what: str) -> None:
    job = _job(policy, shards)
    now_ns = _round(job, 10)
    _push(job, BAD, now_ns)
    if policy == "bsp":
        _combine(job)  # the push is kept for its sum, and damaged there
    _damage(job, what)
    for rank in (0, 2):
        _push(job, rank, now_ns + 5)
    _combine(job)
    folded = job.arena.counters(BAD)["folded"]
    assert folded == shards, "its first push; the damaged one is not"
    _check_counts(job, shards)
    # The worker had looked at its lane's state before it was expelled, and posts once more.
    _words(job).set_tail(_words(job).tail() + 1)
    job.posts[BAD] += 1
    _combine(job)
    _check_counts(job, shards)
    _replace(job)
    _combine(job)
    _check_counts(job, shards)
    assert job.arena.counters(BAD)["folded"] == folded and job.arena.has_joined(BAD)


def _check_counts(job: Job, shards: int) -> None:
    counters = job.arena.counters(BAD)
    assert counters["folded"] + counters["dropped"] == job.posts[BAD] * shards
    assert counters["done"] == job.posts[BAD]


@pytest.mark.parametrize("what", ["far tail", "lower tail"])
@pytest.mark.parametrize("shards", [1, 2])
def test_where_the_count_of_posts_is_damaged_nothing_is_counted_as_dropped_that_may_not_have_been_posted(
    shards: int, what: str
) -> None:
    job = _expelled(shards, what)
    _replace(job)
    _combine(job)
    counters = job.arena.counters(BAD)
    assert job.arena.has_joined(BAD)
    assert (counters["folded"], counters["dropped"]) == (shards, 0)


def test_a_sum_of_more_pushes_than_a_fold_takes_drops_and_counts_the_rest_and_calls_nobody_damaged() -> None:
    """A tree's last leaf may bring more pushes than the root still needs: 1,024 workers in three leaves, each push thrice."""
    job = Job(1024, {"fold": "count", "grant": "at-once", "divisor": 1, "groups": 3}, ring_size=4, buffers=8)
    arena, leaf = job.arena, job.lanes[:342]
    for step in range(3):
        for lane in leaf:
            lane.set_presence(step, b"\xff" * 8)
            assert lane.post(codes.KIND_PUSH, step, step, 0, step + 1)
    outcome = codes.BUSY
    for _ in range(64):
        outcome = leaf[0].try_combine(100)
        assert outcome == codes.DONE
    counted = [arena.counters(index) for index in range(342)]
    assert (sum(row["folded"] for row in counted), sum(row["dropped"] for row in counted)) == (1024, 2)
    assert {row["done"] for row in counted} == {3}


def test_a_worker_that_was_passed_by_and_expelled_holds_up_nobody_else_once_its_process_has_ended() -> None:
    """It left a workspace behind. Another one that stops can be passed by only when that is free."""
    job = _job("asp")
    lock = job.header.shard_headers_offset + OFFSETS["shard_header.lock"]

    def stop_with_the_lock(lane: int) -> None:
        free = struct.unpack_from("<Q", job.memory, lock)[0]
        job.write(lock, "<Q", free | (job.arena.generation(lane) & 0xFFFF) << 17 | (lane + 1) << 1)

    stop_with_the_lock(BAD)
    assert job.lanes[0].pass_by(BAD, 10) == codes.DONE
    assert job.arena.expel(BAD, 1 << 32)
    stop_with_the_lock(2)
    assert job.lanes[0].pass_by(2, 20) == codes.BUSY, "the expelled worker may still write where the others would go on"
    job.lanes[0].recover_lock(BAD, 30)  # its process is proved to have ended
    assert job.lanes[0].pass_by(2, 40) == codes.DONE
    _push(job, 0, 50)
    _combine(job)
    assert job.arena.counters(0)["folded"] == 1
