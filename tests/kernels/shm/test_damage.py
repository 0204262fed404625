"""Words that another process wrote over are named, or do nothing; and what no process wrote over is never called damaged."""

import random
import struct
from functools import partial
from typing import Any

import pytest

from fastps.kernels.protocol import lane as codes
from fastps.kernels.protocol.lane import Lane
from fastps.kernels.shm.arena import Arena
from fastps.kernels.shm.offsets import OFFSETS, SIZES
from fastps.kernels.update.fold import BFLOAT16, FLOAT64, RULE_USER
from tests.support import plain_arena
from tests.support.plain_arena import planned

POLICIES: dict[str, dict[str, Any]] = {
    "asp": {"fold": "each", "grant": "at-once"},
    "bsp": {"fold": "all", "grant": "next-version"},
    "ssp": {"fold": "each", "grant": "bounded", "low": 1, "high": 1},
    "dssp": {"fold": "each", "grant": "bounded", "low": 1, "high": 4},
    "backup": {"fold": "quorum", "grant": "next-version", "count": 2},
    "psp": {"fold": "quorum", "grant": "next-version", "count": 1, "timeout_ns": 40, "repeats": True, "scale": "linear"},
    "softsync": {"fold": "count", "grant": "at-once", "divisor": 2},
    "adv": {"fold": "count", "grant": "at-once", "divisor": 2, "groups": 2},
    "r2sp": {"fold": "in-order", "grant": "round-robin", "relax": 0.8, "tune": True, "scale": "batch"},
    "each in turn": {"fold": "each", "grant": "round-robin", "relax": 0.5},
    "sums in turn": {"fold": "count", "grant": "round-robin", "divisor": 1, "groups": 2, "relax": 0.1},
}


Job = partial(plain_arena.Job, slots=3)


def _scheduler(job: plain_arena.Job, copy: int) -> int:
    """Where a copy of the scheduler's state begins."""
    return job.header.scheduler_offset + copy * job.header.scheduler_bytes


# -- what nobody wrote over ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_no_history_is_called_damaged(name: str) -> None:
    """Pushes in any order, null pushes, workers that leave, die and join: the holder's look at its state finds nothing."""
    for seed in range(12):
        draw = random.Random(seed)
        count, shards = draw.randint(2, 6), 2 if "repeats" in POLICIES[name] else 1
        job = Job(count, POLICIES[name], started=draw.randint(2, count), shards=shards)
        for rank in range(count):
            job.arena.claim(rank, 1)
        now_ns = 1
        for _ in range(150):
            now_ns += draw.choice([0, 1, 5, 30])
            rank, act = draw.randrange(count), draw.random()
            live = job.arena.lane_state(rank) == 1
            if live and act < 0.8:
                ready = any(job.lanes[rank].granted(shard) > job.arena.clock(rank) for shard in range(shards))
                if ready and job.lanes[rank].posted() - job.lanes[rank].done() < 3:
                    job.lanes[rank].pull()
                    kind = codes.KIND_NULL if act < 0.1 else codes.KIND_PUSH
                    job.post(rank, 0.25, now_ns, kind=kind, samples=draw.randint(1, 9))
            elif live and act < 0.83 and job.lanes[rank].posted() - job.lanes[rank].done() < 7:
                job.lanes[rank].post(codes.KIND_LEAVE, 0, 0, 0, now_ns)
                job.arena.leave(rank)
                job.arena.finish(rank)
            elif act < 0.86:
                job.arena.mark_dead(rank, job.arena.generation(rank))
            elif act < 0.9 and not live:
                job.arena.claim(rank, 1, True)
            if job.arena.lane_state(rank) == 6 and job.arena.has_joined(rank):
                job.arena.joined(rank)
            taker = job.lanes[draw.randrange(count)]
            assert taker.try_combine(now_ns) == codes.DONE, f"seed {seed}"
        assert job.arena.version > 0


# -- the scheduler's state -------------------------------------------------------------------------------

LINKS_OFFSET = OFFSETS["scheduler.links_offset"]
WORKERS_OFFSET = -(-SIZES["scheduler"] // 64) * 64
STATE_WOUNDS = {
    "the policy's fold": (OFFSETS["scheduler.policy"], "<i", 9),
    "where the links lie": (LINKS_OFFSET, "<q", 1 << 40),
    "where the lists lie": (OFFSETS["scheduler.lists_offset"], "<q", -64),
    "the number of workers": (OFFSETS["scheduler.n_workers"], "<i", 1000),
    "how many live": (OFFSETS["scheduler.n_live"], "<i", 0),
    "how many arrived": (OFFSETS["scheduler.n_arrived"], "<i", 4000),
    "whose fold is next": (OFFSETS["scheduler.fold_next"], "<i", -5),
    "whose grant is next": (OFFSETS["scheduler.grant_next"], "<i", 2),
    "the first bucket": (OFFSETS["scheduler.first_bucket"], "<i", 99),
    "the last bucket": (OFFSETS["scheduler.last_bucket"], "<i", 1),
    "the free bucket": (OFFSETS["scheduler.free_bucket"], "<i", 7000),
    "the frontier": (OFFSETS["scheduler.frontier"], "<i", 1 << 20),
    "the first that waits": (OFFSETS["scheduler.first_waiting"], "<i", 1 << 20),
    "how many workers changed": (OFFSETS["scheduler.n_dirty_workers"], "<i", 1 << 30),
    "how many links changed": (OFFSETS["scheduler.n_dirty_links"], "<i", -1),
    "a worker's place in the ring of the living": (WORKERS_OFFSET + OFFSETS["worker.next_live"], "<i", 77),
    "a worker's cursor": (WORKERS_OFFSET + OFFSETS["worker.cursor"], "<q", 50),
    "how a worker waits": (WORKERS_OFFSET + OFFSETS["worker.waiting"], "<b", 5),
}


@pytest.mark.parametrize("name", STATE_WOUNDS)
def test_a_damaged_state_is_refused_and_its_lock_released(name: str) -> None:
    offset, form, value = STATE_WOUNDS[name]
    job = Job(2, POLICIES["bsp"])
    job.post(0, 0.25, 10)
    job.write(_scheduler(job, 0) + offset, form, value)
    for lane in job.lanes:
        assert lane.try_combine(20) == codes.BAD_STATE
        assert lane.owner() == -1
    assert job.arena.version == 0


def test_a_fold_passes_a_frozen_parameter_by_until_it_thaws_and_one_with_a_damaged_length_for_ever() -> None:
    for length, changed in (0, False), (16, True), (1 << 40, False), (-16, False):
        job = plain_arena.Job(1, POLICIES["bsp"], floats=32, segments=[(0, 16, 0), (16, 0, 0)])
        job.arena.thaw(1, length)
        job.post(0, 0.25, 10)
        assert job.lanes[0].try_combine(10) == codes.DONE
        weights = job.weights()
        assert set(weights[:16].tolist()) == {0.75}
        assert set(weights[16:].tolist()) == {0.75 if changed else 0.0}, length


def test_a_ring_of_workers_that_wait_is_refused() -> None:
    job = Job(2, POLICIES["bsp"])
    job.post(0, 0.25, 10)
    assert job.lanes[0].try_combine(10) == codes.DONE
    for copy in range(2):
        (links,) = struct.unpack_from("<q", job.memory, _scheduler(job, copy) + LINKS_OFFSET)
        job.write(_scheduler(job, copy) + links + OFFSETS["link.next_waiting"], "<i", 0)  # who waits behind worker 0: worker 0
    job.post(1, 0.25, 20)
    assert job.lanes[1].try_combine(20) == codes.BAD_STATE


def test_a_worker_that_waits_in_two_buckets_is_refused() -> None:
    """Worker 0 waits in the bucket of clock 2, and that of clock 1 names it, too; worker 2 says that it waits, in no list."""
    job = Job(3, {**POLICIES["ssp"], "release": "printed"})
    for rank, now_ns in (0, 10), (0, 20), (1, 30):
        job.post(rank, 0.25, now_ns)
        assert job.lanes[rank].try_combine(now_ns) == codes.DONE
    for copy in range(2):
        state = _scheduler(job, copy)
        (buckets,) = struct.unpack_from("<q", job.memory, state + OFFSETS["scheduler.buckets_offset"])
        waiting = [state + buckets + index * SIZES["bucket"] + OFFSETS["bucket.waiting"] for index in range(4)]
        assert [struct.unpack_from("<iii", job.memory, place) for place in waiting[1:3]] == [(-1, -1, 0), (0, 0, 1)]
        job.write(waiting[1], "<iii", 0, 0, 1)
        job.write(state + WORKERS_OFFSET + 2 * SIZES["worker"] + OFFSETS["worker.waiting"], "<b", 2)
    job.post(2, 0.25, 40)
    assert job.lanes[2].try_combine(40) == codes.BAD_STATE


def test_a_damaged_policy_lets_nobody_attach() -> None:
    job = Job(2, POLICIES["bsp"])
    job.write(_scheduler(job, 0), "<i", 9)
    with pytest.raises(ValueError, match="expected a fold, a grant and a scale by their numbers, found 9"):
        Lane(job.arena, 0)


# -- descriptors, the commit word, orders ----------------------------------------------------------------


def test_a_buffer_that_the_arena_has_not_is_not_read() -> None:
    job = Job(2, POLICIES["asp"])
    commit = job.header.shard_headers_offset + OFFSETS["shard_header.commit"]
    job.write(commit, "<Q", 100 << 2)  # version 0, buffer 100
    assert (job.lanes[0].pull(), job.lanes[0].pull_all([7]), job.lanes[0].prefetch()) == (-1, 0, (-1, 0))
    with pytest.raises(ValueError, match="buffer 0 to 5 and state buffer 0 to 3, found 100 and 0: the arena is damaged"):
        job.arena.committed()
    with pytest.raises(ValueError, match="found 100 and 0"):
        job.arena.pin_version(0, 0)


def test_a_state_buffer_that_the_arena_has_not_is_not_folded_from() -> None:
    job = Job(2, POLICIES["asp"])
    job.write(job.header.shard_headers_offset + OFFSETS["shard_header.records"] + OFFSETS["record.state_buffer"], "<I", 9)
    with pytest.raises(ValueError, match="found 0 and 9"):
        job.arena.committed()
    job.post(0, 0.25, 10)
    assert job.lanes[0].try_combine(10) == codes.BAD_FOLD


@pytest.mark.parametrize(("chunks", "chunk_floats"), [(255, 1024), (56, 0), (3, 7), (3, -1024), (3, 1 << 62)])
def test_who_waits_helps_with_no_order_that_makes_no_sense(chunks: int, chunk_floats: int) -> None:
    """The helper takes nothing, or leaves what it took to the holder; its own pushes go on."""
    job = Job(2, POLICIES["asp"])
    job.lanes[0].share_folds(1)
    work = job.header.work_offset
    job.write(work + OFFSETS["work.chunk_floats"], "<q", chunk_floats)
    order = 0, 1, 0, 1, 0, 1, 1  # a mode, streaming, buffers, and one push
    struct.pack_into("<iiIIIII", job.memory, work + OFFSETS["work.mode"], *order)
    job.write(work, "<Q", (chunks << 56) | ((1 << min(chunks, 56)) - 1))
    assert not job.lanes[0].wait(100, 0, 0, 1_000_000)
    assert job.lanes[0].helped == 0
    job.post(0, 0.25, 10)
    assert job.lanes[0].try_combine(10) == codes.DONE
    assert job.arena.version == 1


# -- measures and places -----------------------------------------------------------------------------------


def test_measures_that_are_written_over_are_not_read_again() -> None:
    job = Job(2, POLICIES["asp"])
    segments = job.header.segments_offset
    shard = job.header.shard_headers_offset
    for offset in (*range(8, 272, 8), segments, segments + 8, shard + 320, shard + 328):
        job.write(offset, "<Q", 1 << 40)
    job.post(0, 0.25, 10)
    assert job.lanes[0].try_combine(10) == codes.DONE
    assert job.arena.version == 1


@pytest.mark.parametrize(("place", "value"), [("offset", 1 << 40), ("offset", 3), ("length", -1), ("length", 33), ("group", 1)])
def test_a_parameter_outside_of_the_buffers_lets_nobody_attach(place: str, value: int) -> None:
    job = Job(2, POLICIES["asp"])
    offset = {"offset": 0, "length": 8, "group": 16}[place]
    job.write(job.header.segments_offset + offset, "<i" if place == "group" else "<q", value)
    with pytest.raises(ValueError, match="expected parameter 0 within 32 floats and 1 groups"):
        Arena(job.memory)


def test_measures_whose_size_wraps_around_let_nobody_attach() -> None:
    with pytest.raises(ValueError, match="expected an arena of at most 2\\^56 bytes"):
        planned(buffer_floats=1 << 62)


@pytest.mark.parametrize(("length", "is_whole"), [(30, True), (31, False)])
def test_a_parameter_of_half_a_double_lets_nobody_attach(length: int, is_whole: bool) -> None:
    job = Job(2, POLICIES["asp"], segments=[(0, 30, 0)], gradient_type=FLOAT64)
    job.write(job.header.segments_offset + 8, "<q", length)
    if is_whole:
        assert Arena(job.memory).is_double
    else:
        with pytest.raises(ValueError, match="expected parameter 0 within 32 floats"):
            Arena(job.memory)


@pytest.mark.parametrize("other", [{"rule": RULE_USER}, {"shown_type": BFLOAT16}, {"tables": [(5, 2, 0, 0, 0)]}])
def test_doubles_with_what_has_no_loops_in_double_have_no_plan(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected doubles with a rule of fastps, without halves and without tables"):
        planned(gradient_type=FLOAT64, **other)
