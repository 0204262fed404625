"""Folds that several processes share: the same bits whoever folds what, and whoever of them is stopped or killed meanwhile."""

import contextlib
import ctypes
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastps.kernels.protocol import lane as codes
from fastps.kernels.protocol.lane import Lane
from fastps.kernels.update import fold
from tests.support import plain_arena, processes
from tests.support.sizes import sample_and_full

FLOATS = 1 << 22
LONG = 14 << 20  # floats of which a fold is longer than a core's time slice
SLICE_NS = 1_000_000


class Job(plain_arena.Job):
    """Lanes under asp, one parameter, SGD with momentum, in memory that forked processes share."""

    def __init__(self, lanes: int = 2, slots: int = 1, floats: int = FLOATS, rule: int = fold.RULE_SGD) -> None:
        super().__init__(lanes, plain_arena.ASP, slots=slots, floats=floats, rule=rule, state_planes=1, buffers=4)
        for lane in self.lanes:
            lane.share_folds(1)
        self.gradients = np.random.default_rng(0).standard_normal((4, min(floats, FLOATS))).astype(np.float32)

    def post_step(self, lane: int, step: int) -> None:
        """Post the step's gradient: one of four, in turn."""
        slot = step % self.slots
        self.gradient(lane, slot)[:] = np.resize(self.gradients[step % 4], self.floats)
        self.lanes[lane].set_hyper(slot, 0, 0.1, 0.9, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0)
        self.lanes[lane].set_presence(slot, (1).to_bytes(8, "little"))
        self.lanes[lane].set_versions(slot)
        assert self.lanes[lane].post(codes.KIND_PUSH, step, slot, self.arena.version, step + 1)

    def push(self, lane: int, step: int) -> int:
        """Post and take the shard lock, which nobody else takes here."""
        self.post_step(lane, step)
        return self.lanes[lane].try_combine()

    def help_for_ever(self) -> None:
        """A helper's life: it waits for what never comes."""
        while True:
            self.lanes[1].wait(1 << 40, 0, 1_000_000, SLICE_NS)

    def help_until(self, lane: int, version: int) -> int:
        """A helper's life until that version is there; returns how many chunks it has folded."""
        while self.arena.version < version:
            self.lanes[lane].wait(1 << 40, 0, 2_000, SLICE_NS)
        return self.lanes[lane].helped


@pytest.fixture(scope="module")
def expected() -> list[bytes]:
    """The bits of the first versions' last floats and of all, folded alone."""
    job = Job()
    found = []
    for step in range(40):
        found.append(_bits(job.weights()))
        assert job.push(0, step) == codes.DONE
    return found


def _bits(weights: npt.NDArray[np.float32]) -> bytes:
    return np.add.reduce(weights[:FLOATS].view(np.uint32).reshape(-1, 64).astype(np.uint64), axis=0).tobytes()


@pytest.fixture
def job() -> Job:
    return Job()


@contextlib.contextmanager
def _soon(child: processes.Child, number: signal.Signals, rng: random.Random) -> Iterator[None]:
    """Send the child a signal at a random moment within the fold that is made inside the block (which releases the GIL)."""
    timer = threading.Timer(rng.random() * 0.004, os.kill, (child.process_id, number))
    timer.start()
    yield
    timer.join()


@given(chunks=st.integers(1, 56), helpers=st.integers(0, 9))
def test_every_chunk_of_a_shared_fold_is_where_one_lane_begins(chunks: int, helpers: int) -> None:
    arena = Job(lanes=helpers + 1, floats=64).arena
    lanes = [Lane(arena, index) for index in range(helpers + 1)]
    begun = []
    for lane in lanes:
        lane.share_folds(helpers)
        begun += [chunk for chunk in range(64) if lane.begins_with(chunks) >> chunk & 1]
    assert sorted(begun) == list(range(chunks))


def test_where_workers_change_cores_a_lane_begins_with_the_part_of_its_core() -> None:
    lane = Lane(Job(lanes=2, floats=64).arena, 1)
    own = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(own)})
        for part, chunks in ((0, 0b111), (1, 0b1111000)):
            lane.share_folds(1, bytes([part]) * (max(own) + 1))
            assert lane.begins_with(7) == chunks
    finally:
        os.sched_setaffinity(0, own)


def test_a_shared_fold_has_the_bits_of_one_that_is_not(job: Job, expected: list[bytes]) -> None:
    child = processes.start(partial(job.help_until, 1, 30))
    for step in range(30):
        outcome = job.push(0, step)
        while outcome == codes.AWAITING:  # on a busy machine a helper may be away for long
            outcome = job.lanes[0].try_combine()
        assert outcome == codes.DONE
        assert _bits(job.weights()) == expected[step + 1]
    processes.results([child], 30)
    assert child.outcome > 0, "nothing was shared"


def test_folds_that_are_not_shared_are_not_helped_with(job: Job) -> None:
    job.lanes[0].share_folds(0)
    child = processes.start(job.help_for_ever)
    for step in range(5):
        assert job.push(0, step) == codes.DONE
    processes.kill(child)
    assert job.arena.version == 5


@pytest.mark.slow
def test_a_wait_for_helpers_on_a_busy_core_ends_before_it_has_yielded_its_last_time(job: Job) -> None:
    job.post_step(0, 0)
    plain_arena.set_helping(job.memory, 1, 1)  # lane 1 says that it helps with this fold of shard 0
    with processes.busy_core():
        began = time.monotonic()
        assert job.lanes[0].try_combine() == codes.AWAITING
        assert time.monotonic() - began < 2.0, "0.2 s, most of it for the fold; a thousand yields take 6 s"


@pytest.mark.parametrize("floats", [FLOATS, LONG], ids=["short", "long"])
def test_only_a_long_fold_has_no_more_helpers_than_there_are_cores_for(floats: int) -> None:
    job = Job(lanes=3, floats=floats)  # with a core for one helper
    child = processes.start(partial(job.help_until, 2, 8))
    for step in range(8):
        job.post_step(0, step)
        plain_arena.set_helping(job.memory, 1, 1)  # so lane 1 says that it helps with this fold of shard 0
        outcome = job.lanes[0].try_combine()
        assert outcome == codes.AWAITING, "lane 1 was not seen to help"
        while outcome == codes.AWAITING:
            outcome = _resolved(job, outcome)
        assert outcome == codes.DONE
    processes.results([child], 30)
    assert (child.outcome == 0) == (floats == LONG)


def _resolved(job: Job, outcome: int) -> int:
    """What a worker does whose fold is in the hands of lane 1, which was proved dead."""
    if outcome == codes.AWAITING:
        job.lanes[0].recover_lock(1)
        outcome = job.lanes[0].try_combine()
    return outcome


def _fold_while_helpers_die(expected: list[bytes], rng: random.Random) -> int:
    """A job's folds, each with a helper that is killed meanwhile; how many of them were helping just then."""
    job, awaited = Job(), 0
    for step in range(39):
        child = processes.start(job.help_for_ever)
        time.sleep(0.002)
        job.post_step(0, step)
        with _soon(child, signal.SIGKILL, rng):
            outcome = job.lanes[0].try_combine()
        processes.kill(child)
        awaited += outcome == codes.AWAITING
        assert _resolved(job, outcome) == codes.DONE
        assert _bits(job.weights()) == expected[step + 1]
        job.lanes[0].recover_lock(1)  # its `helping` is taken back, whatever it was doing
    return awaited


def _fold_while_a_helper_is_stopped(expected: list[bytes], rng: random.Random) -> int:
    """A job's folds, with a helper that is stopped in each and then goes on; how often it was helping just then."""
    job, awaited = Job(), 0
    child = processes.start(job.help_for_ever)
    try:
        for step in range(39):
            job.post_step(0, step)
            with _soon(child, signal.SIGSTOP, rng):
                outcome = job.lanes[0].try_combine()
            processes.await_stop(child.process_id)
            if outcome == codes.AWAITING and plain_arena.helps(job.memory, 1):
                awaited += 1
                assert job.lanes[0].try_combine() == codes.AWAITING, "a helper that lives may still write"
                assert job.arena.version == step
            os.kill(child.process_id, signal.SIGCONT)
            while outcome == codes.AWAITING:
                outcome = job.lanes[0].try_combine()
            assert outcome == codes.DONE
            assert _bits(job.weights()) == expected[step + 1]
            time.sleep(0.002)
    finally:
        processes.kill(child)
    return awaited


@pytest.mark.slow
@pytest.mark.parametrize("fold_all", [_fold_while_helpers_die, _fold_while_a_helper_is_stopped])
def test_what_a_helper_that_is_killed_or_stopped_left_undone_is_folded(
    expected: list[bytes], fold_all: Callable[[list[bytes], random.Random], int]
) -> None:
    rng = random.Random(1)
    assert any(fold_all(expected, rng) for _ in range(8)), "nobody was hit while it helped"  # a busy machine lets few help


@pytest.mark.slow
@sample_and_full(4, 12, "kills")
def test_when_the_holder_of_a_shared_fold_is_killed_its_helpers_are_waited_for(expected: list[bytes], kills: int) -> None:
    rng = random.Random(2)
    for _ in range(kills):
        job = Job()

        def push_for_ever(job: Job = job) -> None:
            for step in range(38):
                outcome = job.push(0, step)
                while outcome == codes.AWAITING:  # the slot is read until then
                    outcome = job.lanes[0].try_combine()

        child = processes.start(push_for_ever)
        kill_at = time.monotonic() + 0.01 + 0.3 * rng.random()
        while time.monotonic() < kill_at:
            job.lanes[1].wait(1 << 40, 0, 2_000, SLICE_NS)
        processes.kill(child)
        job.lanes[1].recover_lock(0)
        step = job.arena.version
        assert _bits(job.weights()) == expected[step]
        if job.arena.counters(0)["posted"] == job.arena.counters(0)["done"]:
            assert job.push(1, step) == codes.DONE
            assert _bits(job.weights()) == expected[step + 1]


@pytest.mark.slow
def test_a_holder_of_long_folds_hands_the_lock_to_a_lane_that_waits_and_goes_on_itself() -> None:
    job = Job(lanes=4, slots=2)

    def push_when_a_slot_is_free(lane: int, step: int) -> int:
        """Returns how many versions this lane made meanwhile."""
        ran = 0
        while not job.lanes[lane].wait(0, step - 1, 2_000, 50 * SLICE_NS):
            before = job.arena.version
            if job.lanes[lane].try_combine() == codes.DONE:
                ran = max(ran, job.arena.version - before)
        assert job.lanes[lane].post(codes.KIND_PUSH, step, step % 2, job.arena.version, step + 1)
        before = job.arena.version
        return max(ran, job.arena.version - before if job.lanes[lane].try_combine() == codes.DONE else 0)

    def push_for_ever(lane: int) -> None:
        for step in itertools.count(2):
            push_when_a_slot_is_free(lane, step)

    for lane in range(4):
        assert job.arena.claim(lane, os.getpid()) == 0
        for step in range(2):
            job.post_step(lane, step)
    children = [processes.start(lambda lane=lane: push_for_ever(lane)) for lane in range(1, 4)]
    try:
        ran: list[int] = []
        for step in itertools.count(2):  # on a busy machine this lane may find the lock taken for a while
            ran += [versions] if (versions := push_when_a_slot_is_free(0, step)) else []
            if step > 100 and ran:
                break
    finally:
        processes.kill(*children)
    # A fold has 8 pushes at most; a holder that stayed for as long as others push would make some 20 versions before it let go.
    assert 0 < sum(ran) <= 10 * len(ran), ran


@pytest.mark.parametrize("slots", [2, 3])
def test_a_holder_lets_go_after_a_fold_that_another_waited_for_and_not_where_nobody_did(slots: int) -> None:
    job = Job(slots=slots, floats=1 << 17, rule=fold.RULE_USER)

    @ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, *[ctypes.c_void_p] * 6, ctypes.c_int64)
    def rule(*_ignored: object) -> None:
        if job.lanes[1].posted() == 1:
            job.post_step(1, 1)

    address = ctypes.cast(rule, ctypes.c_void_p).value
    assert address
    for lane in range(2):
        assert job.arena.claim(lane, os.getpid()) == 0
        job.lanes[lane].set_user_rule(address)
        job.post_step(lane, 0)
    assert job.lanes[0].try_combine() == codes.DONE
    waited = slots == 2  # the second push of lane 1, while its first was folded, was into its last slot
    assert (job.lanes[0].done(), job.lanes[1].done()) == (1, 1 if waited else 2)
    assert job.lanes[0].owner() == -1
    assert job.lanes[1].try_combine() == codes.DONE
    assert job.lanes[1].done() == 2
