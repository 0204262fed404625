"""Workers that leave and join again: the compiled scheduler stays consistent, and decides as the oracles, in both records."""

import contextlib
import random

import pytest

from fastps.job.specs import parse_policy
from fastps.kernels.scheduling.scheduler import Scheduler
from tests.oracles.table import Play, play
from tests.support.sizes import sample_and_full


def test_a_joiner_in_a_bound_waits_and_is_waited_for() -> None:
    ssp = Scheduler(2, fold="each", grant="bounded", low=1, high=1, release="printed")
    ssp.leave(1, 1)
    for step in range(5):
        assert ssp.push(0, 10 + step)[1] == [0], "alone nobody is waited for"
    ssp.join(1, 20)
    assert ssp.clock(1) == 5
    ssp.push(0, 30)
    assert ssp.push(0, 31) == ([0], []), "two ahead of the joiner: it waits"
    assert ssp.push(1, 32) == ([1], [0, 1])


def test_who_lives_or_has_a_push_waiting_may_not_join() -> None:
    scheduler = Scheduler(2, fold="count", grant="at-once", scale="divisor", divisor=2)
    with pytest.raises(ValueError, match="it lives"):
        scheduler.join(0, 1)


@pytest.mark.parametrize("alternate", [False, True])
@pytest.mark.parametrize("spec", [
    "bsp", "asp", "ssp:2", "dssp:1,3", "dssp:1,4,hard_bound=true", "backup:1", "psp:2,0.5", "softsync:2", "hardsync:64",
    "adv:2", "r2sp:0.5", "r2sp:0.8", "r2sp:0",
])  # fmt: skip
@sample_and_full(20, 100, "seeds")
def test_with_leaves_and_joins_at_any_moment_and_once_there_are_no_more_everyone_goes_on(
    spec: str, alternate: bool, seeds: int
) -> None:
    """As long as anyone waits, somebody may push or a timer is due, in time or late.

    Under r2sp the order of folds and that of grants must not come to wait for each other.
    """
    for seed in range(seeds):
        rng = random.Random(f"{spec} {seed}")
        workers = rng.choice((2, 3, 4, 5))
        scheduler = Scheduler(workers, alternate=alternate, **parse_policy(spec).values(workers))
        live, pushed, now_ns, faults = set(range(workers)), dict.fromkeys(range(workers), 0), 0, rng.choice((20, 60, 400))
        folded = pushes = 0
        is_punctual = rng.random() < 0.5
        for step in range(faults + 60):
            now_ns += rng.choice((0, 0, 1, 1, 60))
            while is_punctual and (due_ns := scheduler.due_ns()) is not None and due_ns <= now_ns:
                folded += len(scheduler.fire()[0])
            able = [worker for worker in sorted(live) if scheduler.granted(worker) > pushed[worker]]
            gone = sorted(set(range(workers)) - live)
            chance = rng.random() if step < faults else 1.0
            if chance < 0.1 and len(live) > 1:
                leaver = rng.choice(sorted(live))
                folded += len(scheduler.leave(leaver, now_ns)[0])
                live.discard(leaver)
            elif chance < 0.35 and gone:
                joiner = rng.choice(gone)
                with contextlib.suppress(ValueError):  # a push of its last owner is not folded yet
                    scheduler.join(joiner, now_ns)
                    live.add(joiner)
                    pushed[joiner] = scheduler.clock(joiner)
                    assert pushed[joiner] == min(scheduler.clock(worker) for worker in live), f"seed {seed}"
                    assert scheduler.granted(joiner) == (0 if scheduler.waiting(joiner) else pushed[joiner] + 1)
            elif able:
                worker = rng.choice(able)
                folded += len(scheduler.push(worker, now_ns, samples=1)[0])
                pushed[worker] += 1
                pushes += 1
            else:
                due_ns = scheduler.due_ns()
                assert due_ns is not None, f"seed {seed}: {sorted(live)} wait for ever"
                now_ns = max(now_ns, due_ns)
                folded += len(scheduler.fire()[0])
            slowest = scheduler.slowest()
            assert scheduler.clock(slowest) == min(scheduler.clock(worker) for worker in live), f"seed {seed}"
        assert folded > pushes // 4, f"seed {seed}"


JOINED = ["bsp", "asp", "ssp:0", "ssp:2", "backup:0", "backup:1", "backup:2", "psp:2,0.5", "softsync:1", "softsync:2"]
JOINED += ["r2sp:0", "r2sp:0.8", "r2sp:1,tune=true", "bsp,tune=true", "softsync:2,stagger=0.8"]


def _first_difference(played: Play, scheduler: Scheduler, seed: str, events: int) -> str:
    """Give the oracle and the scheduler the same pushes, leaves and joins. "": both answer all alike."""
    rng, oracle, now_ns = random.Random(seed), played.oracle(4), 0
    read = dict.fromkeys(range(4), 0)
    for number in range(events):
        now_ns += rng.choice((0, 1, 1, 60))
        while (due_ns := scheduler.due_ns()) is not None and due_ns <= now_ns:
            found, expected = scheduler.fire(), oracle.fire()
            if found != expected:
                return f"event {number}, {seed}: fire answers {found}, the oracle {expected}"
        able, gone = sorted(set(oracle.t) - oracle.waiting), sorted(set(range(4)) - set(oracle.t))
        chance = rng.random()
        if chance < 0.08 and len(oracle.t) > 1:
            kind, arguments = "leave", (rng.choice(sorted(oracle.t)), now_ns)
        elif chance < 0.25 and gone:
            kind, arguments = "join", (gone[0], now_ns)
        elif able:
            kind, worker = "push", rng.choice(able)
            arguments = (worker, now_ns, read[worker], rng.choice((8, 16)))
        else:
            now_ns = max(now_ns, oracle.due_ns() or 0)
            continue
        try:
            found = getattr(scheduler, kind)(*arguments)
        except ValueError:  # a push of the lane's last owner is not folded yet
            continue
        expected = getattr(oracle, kind)(*(arguments if played.plays.timed else arguments[:2]))
        if (found, scheduler.due_ns()) != (expected, oracle.due_ns()):
            return f"event {number}, {seed}: {kind}{arguments} answers {found}, the oracle {expected}"
        read |= dict.fromkeys(found[1], scheduler.version)
    return ""


@pytest.mark.parametrize("spec", JOINED)
@sample_and_full(20, 200, "seeds")
def test_leaves_and_joins_are_decided_as_the_oracle_decides_them(spec: str, seeds: int) -> None:
    for seed in range(seeds):
        played = play(spec, "staggered" if "stagger" in spec else "level" if spec.startswith("bsp,") else "")
        assert _first_difference(played, played.scheduler(4), f"{spec} {seed}", 200) == ""


@pytest.mark.parametrize("spec", ["backup:1", "backup:2", "psp:3,0.5", "psp:2,0.5,push_timeout=5e-9"])
def test_a_quorum_that_does_not_follow_the_live_workers_is_found(spec: str) -> None:
    """A mutant: N as it was at the start."""
    played = play(spec)
    values = dict(played.policy(4).values(4))
    values |= {"count": 4 - values["backups"], "backups": 0}
    assert any(_first_difference(played, Scheduler(4, **values), f"mutant {seed}", 200) for seed in range(20))
