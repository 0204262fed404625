"""SIGSTOP a worker just before its n-th store to shared memory, and go on without it: for every n, nothing is held up or lost.

The others pass it by, push and fold meanwhile. Then it wakes, in the middle of whatever it did, and lives to its end. Each push
must be folded once, and no lock stay held.
"""

import os
import signal
from functools import partial

import pytest

hooks = pytest.importorskip("fastps.kernels.chaos.failpoints", reason="needs the failpoint build: make test-hooks")

import numpy as np  # noqa: E402

from fastps.kernels.protocol.lane import AWAITING, BUSY, DONE  # noqa: E402
from tests.crash.test_die_at_every_store import CASES, CLIPPED, EVERY_STORE, PUSHES, SHARDS, VICTIM, Case, Job, _begun, _stores  # noqa: E402  # noqa: E402
from tests.support.plain_arena import set_helping  # noqa: E402

BITS = ("adamw-bsp", "radam-bsp", "summing-bsp")  # where the order of the pushes has no influence
LINEAR = "sgd-asp"  # where it has nearly none
OTHERS_PUSHES = 4


def _live(job: Job) -> None:
    """The victim's life. It may find that another lane has taken its lock; then it tries again."""
    lane = job.lanes[VICTIM]
    assert job.arena.claim(VICTIM, os.getpid()) == 0
    for step in range(PUSHES):
        job.write_slot(VICTIM)
        outcome = lane.push(30 + 10 * step, CLIPPED, 8, False)
        while outcome == BUSY:
            outcome = lane.try_combine(30 + 10 * step)
        assert outcome == DONE
        job.posts[VICTIM] += 1
        lane.advance_late(35 + 10 * step)
    job.leave(VICTIM, 60)
    while (outcome := lane.try_combine(60)) == BUSY or lane.was_passed_by():
        pass
    assert outcome == DONE
    lane.unpin()
    job.arena.finish(VICTIM)


def _push_what_is_granted(job: Job, rounds: int, now_ns: int) -> None:
    for step in range(rounds):
        for index in (0, 2):
            lane = job.lanes[index]
            is_granted = min(lane.granted(0), lane.granted(1)) > job.posts[index] and lane.done() == lane.posted()
            if is_granted and job.posts[index] < OTHERS_PUSHES:
                job.push(index, now_ns + 10 * step + index)
                assert lane.try_combine(now_ns + 10 * step + index) == DONE


def _end(job: Job) -> None:
    assert job.lanes[0].try_combine(90) == DONE
    _push_what_is_granted(job, 2 * OTHERS_PUSHES, 100)
    for index in (0, 2):
        job.leave(index, 200 + index)
        assert job.lanes[index].try_combine(200 + index) == DONE


def _stop(case: Case, store: int) -> tuple[Job, bool]:
    """Run a job whose victim stops at this store; return it, and whether the victim held anything up then."""
    job = _begun(case)
    child = os.fork()
    if child == 0:
        hooks.stop_at(store)
        _live(job)
        os._exit(0)
    _, status = os.waitpid(child, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        is_passed = job.lanes[0].pass_by(VICTIM, 50) != BUSY
        _push_what_is_granted(job, 1, 52)
        os.kill(child, signal.SIGCONT)
        _, status = os.waitpid(child, 0)
    else:
        is_passed = False
    assert os.waitstatus_to_exitcode(status) == 0, f"stopped at store {store}"
    return job, is_passed


def _check_stops(case: Case, every: int) -> None:
    plain = _begun(case)
    stores = _stores(partial(_live, plain))
    _end(plain)
    plain.push_log()
    passed = 0
    for store in range(1, stores + 1, every):
        job, is_passed = _stop(case, store)
        passed += is_passed
        _end(job)
        job.push_log()
        if case.name in BITS:
            assert job.bits() == plain.bits(), f"stopped at store {store}: other bits"
        if case.name == LINEAR:
            weights = [run.numbers(run.arena.weights_offset(run.arena.committed(0)[1])) for run in (job, plain)]
            assert np.allclose(weights[0][:96], weights[1][:96], atol=1e-3), f"stopped at store {store}: other weights"
        for shard in range(SHARDS):
            assert job.lanes[0].owner(shard) == -1, f"stopped at store {store}: the lock of shard {shard} is held"
    assert passed > stores / every / 3, "the victim was hardly ever passed by"


@pytest.mark.parametrize("case", [case for case in CASES if not case.tables], ids=lambda case: case.name)
def test_a_stop_at_some_stores_holds_nobody_up_and_loses_and_doubles_nothing(case: Case) -> None:
    _check_stops(case, every=31)


@pytest.mark.slow
@pytest.mark.timeout(600)  # some 400 processes
@pytest.mark.parametrize("case", [case for case in EVERY_STORE if not case.tables], ids=lambda case: case.name)
def test_a_stop_at_every_store_holds_nobody_up_and_loses_and_doubles_nothing(case: Case) -> None:
    _check_stops(case, every=1)


# -- a helper that stays away --------------------------------------------------------------------------------------------


def _await_helper() -> Job:
    """A job in which lane 0 holds the lock of shard 0 and waits for a chunk of its fold that lane 2 has."""
    job = Job(next(case for case in CASES if case.name == LINEAR))
    set_helping(job.memory, 2, 1)  # shard 0, workspace 0
    job.push(0, 10)
    assert job.lanes[0].try_combine(10) == AWAITING
    return job


def test_a_combiner_goes_on_without_a_helper_that_has_stopped() -> None:
    job = _await_helper()
    assert job.lanes[0].holders()[0][0] == 2
    assert job.lanes[0].pass_by(2, 20) == DONE
    assert (job.arena.shard_version(0), job.lanes[0].owner(0)) == (1, -1)
    assert job.lanes[0].holders()[0] is None
    job.push(0, 30)
    assert job.lanes[0].try_combine(30) == DONE
    assert job.arena.shard_version(0) == 2


@pytest.mark.parametrize("mutant", [None, "back-early"])
def test_a_workspace_is_used_again_only_when_its_helpers_have_gone(mutant: str | None) -> None:
    job = _await_helper()
    assert job.lanes[VICTIM].pass_by(0, 20) == DONE
    assert job.lanes[0].was_passed_by()
    hooks.switch_on(mutant)
    try:
        assert job.lanes[0].try_combine(30) == DONE
    finally:
        hooks.switch_on(None)
    assert job.lanes[0].was_passed_by() == (mutant is None), "the helper may still write there"
    set_helping(job.memory, 2, 0)
    assert job.lanes[0].try_combine(40) == DONE
    assert not job.lanes[0].was_passed_by()


def test_who_writes_by_hand_is_not_passed_by() -> None:
    job = Job(CASES[0])
    assert job.lanes[0].hold(0)
    assert job.lanes[2].pass_by(0, 10) == BUSY
    job.lanes[0].release(False, 0)


# -- a stop, and then a death ----------------------------------------------------------------------------------------------


def _weights(job: Job) -> list[bytes]:
    """The published weights of each shard."""
    return [job.numbers(job.arena.weights_offset(job.arena.committed(shard)[1])).tobytes() for shard in range(SHARDS)]


@pytest.mark.slow
@pytest.mark.parametrize("deaths_after", [1, 3])
def test_what_one_that_woke_late_and_died_left_begun_is_helped_with_by_nobody(deaths_after: int) -> None:
    """It may die with a ticket issued, for chunks of buffers that are published again later."""
    case = next(case for case in CASES if case.name == LINEAR)
    died = 0
    for store in range(1, _stores(partial(_live, _begun(case)))):
        job = _begun(case)
        child = os.fork()
        if child == 0:
            hooks.stop_at(store)
            hooks.die_at(store + deaths_after)
            _live(job)
            os._exit(0)
        _, status = os.waitpid(child, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            job.lanes[0].pass_by(VICTIM, 50)
            os.kill(child, signal.SIGCONT)
            _, status = os.waitpid(child, 0)
        died += os.WIFSIGNALED(status)
        job.lanes[0].recover_lock(VICTIM, 60)
        job.arena.mark_dead(VICTIM, 0)
        assert job.lanes[0].try_combine(61) == DONE
        for step in range(3 * OTHERS_PUSHES):  # until every buffer was published again
            job.push(0, 100 + 10 * step)
            assert job.lanes[0].try_combine(100 + 10 * step) == DONE
            before = _weights(job)
            job.lanes[2].wait(1 << 39, 0, 0, 1)  # it waits for a grant, and helps with what it finds
            assert _weights(job) == before, f"stopped at store {store}"
    assert died > 20
