"""A worker's own lane on plain memory: each call does what the calls of a bare lane do, and the tally counts it."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastps.kernels.protocol import lane as codes
from fastps.kernels.protocol.lane import EARLY, FULL, Lane
from tests.support.plain_arena import ASP, BSP, Job

RING_SIZE = 8  # Job's


class Steps:
    """Lane 0 of a job, as a worker drives it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.lane = Lane(job.arena, 0)
        self.lane.steps = self.lane.granted() - 1
        for slot in range(2):
            self.lane.set_hyper(slot, 0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0)
            self.lane.set_presence(slot, (1).to_bytes(8, "little"))

    def write(self, gradient: float) -> None:
        self.job.gradient(0, self.lane.slot)[:] = gradient

    def tally(self) -> tuple[int, ...]:
        lane = self.lane
        return lane.steps, lane.posts, lane.slot, lane.slot_free_at, lane.compute_ns, lane.wait_ns, lane.samples


def test_a_push_is_folded_granted_and_tallied() -> None:
    job = Job(2, ASP)
    steps = Steps(job)
    lane = steps.lane
    lane.loss, lane.granted_ns, lane.earlier_steps = 0.5, 100, 40
    steps.write(0.25)
    assert lane.push(130, 1.0, 16, False) == codes.DONE
    assert (job.arena.version, job.current(), job.arena.counters(0)["staleness_max"]) == (1, 0.75, 0)
    assert lane.advance(150, False)
    assert steps.tally() == (1, 1, 0, 1, 30, 0, 16)
    counters = job.arena.counters(0)
    found = [counters[name] for name in ("posted", "steps", "wait_ns", "compute_ns", "push_ns", "samples", "loss")]
    assert found == [1, 41, 0, 30, 20, 16, 0.5]


def test_a_mean_divides_by_the_gradients_that_its_pushes_are_sums_of() -> None:
    job = Job(2, BSP)
    steps = Steps(job)
    steps.lane.weight = 3
    steps.write(6.0)
    assert steps.lane.push(10, 1.0, 0, False) == codes.DONE
    job.post(1, 2.0, 30)
    assert job.lanes[1].try_combine() == codes.DONE
    assert (job.arena.version, job.current()) == (1, 1.0 - (6.0 + 2.0) / 4)


def test_a_step_begins_late_once_it_is_granted_and_the_wait_is_tallied() -> None:
    job = Job(2, BSP)
    steps = Steps(job)
    steps.write(0.5)
    assert steps.lane.push(10, 1.0, 0, False) == codes.DONE
    assert not steps.lane.advance(20, False)
    assert job.arena.counters(0)["steps"] == 0, "not before the step begins"
    job.post(1, 1.0, 30)
    assert job.lanes[1].try_combine() == codes.DONE
    steps.lane.advance_late(50)
    assert (steps.lane.wait_ns, job.arena.counters(0)["wait_ns"], job.arena.counters(0)["steps"]) == (30, 30, 1)
    assert steps.lane.advance(60, False), "and at once where nothing is left to wait for"
    assert steps.lane.push_ns == 10, "the push ended where its wait began, and is counted once"


def test_a_slot_that_is_still_read_is_waited_for_even_where_no_grant_is() -> None:
    job = Job(2, ASP)
    steps = Steps(job)
    assert job.lanes[1].hold()
    for now_ns in (1, 2):  # two slots
        steps.write(0.0)
        assert steps.lane.push(now_ns, 1.0, 0, False) == codes.BUSY
        assert steps.lane.advance(now_ns, True) == (now_ns == 1)
    assert (steps.lane.slot, steps.lane.slot_free_at) == (0, 1), "the one that is free first"
    assert job.lanes[1].release(False) == codes.DONE
    assert steps.lane.advance(3, True)


def test_a_worker_leaves_its_slot_only_while_a_fold_may_read_it() -> None:
    job = Job(2, ASP)
    steps = Steps(job)
    slots = []
    for now_ns, is_held in enumerate((False, True, False, False, True, False), 1):
        assert not is_held or job.lanes[1].hold()
        steps.write(1.0)
        assert steps.lane.push(now_ns, 1.0, 0, False) == (codes.BUSY if is_held else codes.DONE)
        assert steps.lane.advance(now_ns, True)
        slots.append(steps.lane.slot)
        assert not is_held or job.lanes[1].release(False) == codes.DONE
        assert steps.lane.advance(now_ns, True) and steps.lane.slot == slots[-1], "a slot that is being written stays the same"
    assert (slots, job.current()) == ([0, 1, 1, 1, 0, 0], 1.0 - 6.0)


def test_a_full_ring_is_told_and_nothing_is_done() -> None:
    job = Job(2, ASP)
    steps = Steps(job)
    assert job.lanes[1].hold()
    for now_ns in range(RING_SIZE):
        assert steps.lane.push(now_ns, 1.0, 1, True) == codes.BUSY
        before = steps.tally()
        assert (steps.lane.push(now_ns, 1.0, 1, True), steps.tally()) == (EARLY, before), "its step has not begun"
        assert steps.lane.advance(now_ns, True)
    before = steps.tally()
    assert steps.lane.push(99, 1.0, 1, True) == FULL
    assert (steps.tally(), steps.lane.posted()) == (before, RING_SIZE)
    assert job.lanes[1].release(False) == codes.DONE
    assert steps.lane.push(100, 1.0, 1, True) == codes.DONE
    assert (job.current(), job.arena.counters(0)["folded"], steps.lane.posts) == (1.0, RING_SIZE + 1, RING_SIZE + 1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.sampled_from([0.5, 1.0])), max_size=12))
def test_a_push_in_parts_is_the_same_push(pushes: list[tuple[bool, int, float]]) -> None:
    whole, parts = Steps(Job(2, ASP)), Steps(Job(2, ASP))
    for now_ns, (null, samples, scale) in enumerate(pushes, 1):
        for steps in (whole, parts):
            steps.write(0.25 * samples)
        assert whole.lane.push(10 * now_ns, scale, samples, null) == codes.DONE
        step, slot, version = parts.lane.begin_push(10 * now_ns, samples, null)
        kind = codes.KIND_NULL if null else codes.KIND_PUSH
        assert parts.lane.post(kind, step, slot, version, 10 * now_ns, scale, parts.lane.loss, samples)
        assert parts.lane.try_combine(10 * now_ns) == codes.DONE
        for steps in (whole, parts):
            assert steps.lane.advance(10 * now_ns + 1, False)
            assert steps.lane.pull_all([0]) == -1
    assert whole.tally() == parts.tally()
    assert whole.job.current() == parts.job.current()
    assert whole.job.arena.histograms(0) == parts.job.arena.histograms(0)
    ours, theirs = whole.job.arena.counters(0), parts.job.arena.counters(0)
    assert {**ours, "loss": None} == {**theirs, "loss": None}  # no loss was told: NaN in both


def test_lanes_that_there_are_not_are_refused() -> None:
    with pytest.raises(IndexError, match="expected a lane of 0 to 1, found 2"):
        Lane(Job(2, ASP).arena, 2)


def _assert_refused(job: Job, calls: list[Callable[[int], object]], number: int, message: str) -> None:
    before = bytes(job.memory)
    for call in calls:
        with pytest.raises(IndexError, match=f"expected a {message}, found {number}"):
            call(number)
    assert bytes(job.memory) == before


def test_slots_shards_and_words_of_lanes_that_there_are_not_are_refused() -> None:
    job = Job(2, ASP)
    lane, arena = job.lanes[0], job.arena
    of_slots = [lambda slot: lane.set_presence(slot, bytes(8)), lane.set_versions]
    of_slots += [lambda slot: lane.set_hyper(slot, 0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0)]
    of_shards = [lane.hold, lane.spare, lane.granted, lane.owner, lane.shard_version, lane.pull]
    of_shards += [lambda shard: lane.release(True, shard)]
    of_shards += [lambda shard: arena.pin_version(0, shard), lambda shard: arena.unpin_version(0, shard)]
    of_lanes = [lambda lane: arena.claim(lane, 1), arena.joined, arena.finish, arena.leave, lane.recover_lock]
    of_lanes += [lambda lane: arena.mark_dead(lane, 0), lambda lane: arena.pin_version(lane, 0)]
    of_lanes += [lambda lane: arena.set_cores(lane, 0, 1)]
    _assert_refused(job, of_slots, 2, "slot of 0 to 1")
    _assert_refused(job, of_shards, 1, "shard of 0 to 0")
    _assert_refused(job, of_lanes, 2, "lane of 0 to 1")
