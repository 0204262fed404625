"""Workers that leave and join again: the compiled scheduler stays consistent, and decides as the oracles, in both records."""

import contextlib
import random
from typing import Any

import pytest

from fastps.job.specs import parse_policy
from fastps.kernels.scheduling.scheduler import Scheduler
from tests.oracles.table import Play, play
from tests.support.sizes import sample_and_full

POLICIES: dict[str, dict[str, Any]] = {
    "bsp": {"fold": "all", "grant": "next-version", "scale": "mean"},
    "asp": {"fold": "each", "grant": "at-once", "scale": "one"},
    "ssp": {"fold": "each", "grant": "bounded", "scale": "one", "low": 2, "high": 2},
    "dssp": {"fold": "each", "grant": "bounded", "scale": "one", "low": 1, "high": 4, "hard_bound": True},
    "backup": {"fold": "quorum", "grant": "next-version", "scale": "mean", "count": 3},
    "softsync": {"fold": "count", "grant": "at-once", "scale": "divisor", "divisor": 2},
    "r2sp": {"fold": "in-order", "grant": "round-robin", "scale": "one", "relax": 0.5},
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("alternate", [False, True])
@sample_and_full(3, 12, "seeds")
def test_pushes_leaves_and_joins_in_any_order_never_stop_the_job(name: str, alternate: bool, seeds: int) -> None:
    """Whatever came before: a round in which everyone who may push does so makes progress."""
    for seed in range(seeds):
        generator = random.Random(seed)
        workers = 5
        scheduler = Scheduler(workers, alternate=alternate, **POLICIES[name])
        live, now_ns, folded, pushed = set(range(workers)), 0, 0, 0
        for _ in range(600):
            now_ns += generator.randrange(1, 1000)
            while (due := scheduler.due_ns()) is not None and due <= now_ns:
                folded += len(scheduler.fire()[0])
            draw = generator.random()
            if draw < 0.03 and len(live) > 1:
                worker = generator.choice(sorted(live))
                live.discard(worker)
                folded += len(scheduler.leave(worker, now_ns)[0])
            elif draw < 0.08 and len(live) < workers:
                worker = generator.choice(sorted(set(range(workers)) - live))
                try:
                    scheduler.join(worker, now_ns)
                except ValueError:  # a push of its last owner is not folded yet
                    continue
                live.add(worker)
                clocks = [scheduler.clock(other) for other in live]
                assert scheduler.clock(worker) == min(clocks), f"seed {seed}"
                assert scheduler.granted(worker) == (0 if scheduler.waiting(worker) else scheduler.clock(worker) + 1)
            else:
                ready = [worker for worker in sorted(live) if scheduler.granted(worker) > scheduler.clock(worker)]
                if not ready:
                    assert scheduler.due_ns() is not None, f"seed {seed}: nobody may push and no timer is set"
                    now_ns = max(now_ns, scheduler.due_ns() or 0)
                    continue
                pushed += 1
                folded += len(scheduler.push(generator.choice(ready), now_ns)[0])
            slowest = scheduler.slowest()
            assert scheduler.clock(slowest) == min(scheduler.clock(worker) for worker in live), f"seed {seed}"
        assert folded > pushed // 4, f"seed {seed}"


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


def test_a_joiner_with_a_lower_clock_than_all_releases_those_who_waited_when_it_catches_up() -> None:
    ssp = Scheduler(3, fold="each", grant="bounded", low=1, high=1, release="printed")
    ssp.leave(2, 1)
    for step in range(4):
        ssp.push(0, 10 + 2 * step)
        ssp.push(1, 11 + 2 * step)
    ssp.join(2, 30, 1)  # as a shard that is ahead lets a worker join at another shard's clock
    assert ssp.push(0, 31) == ([0], []), "four ahead"
    granted: list[int] = []
    for step in range(5):
        granted += ssp.push(2, 40 + step)[1]
    assert 0 in granted


def test_who_lives_or_has_a_push_waiting_may_not_join() -> None:
    scheduler = Scheduler(2, **POLICIES["softsync"])
    with pytest.raises(ValueError, match="it lives"):
        scheduler.join(0, 1)


@pytest.mark.parametrize(
    "spec", ["bsp", "asp", "ssp:2", "dssp:1,3", "backup:1", "softsync:2", "hardsync:64", "adv:2", "r2sp:0.8", "r2sp:0"]
)
@sample_and_full(30, 150, "seeds")
def test_once_workers_leave_and_join_no_more_everyone_goes_on(spec: str, seeds: int) -> None:
    """Leaves and joins at any moment, then none: as long as anyone waits, somebody may push or a timer is due.

    Under r2sp the order of folds and that of grants must not come to wait for each other.
    """
    for seed in range(seeds):
        rng = random.Random(f"{spec} {seed}")
        workers = rng.choice((2, 3, 4))
        scheduler = Scheduler(workers, **parse_policy(spec).values(workers))
        live, pushed, now_ns, faults = set(range(workers)), dict.fromkeys(range(workers), 0), 0, rng.choice((20, 60))
        for step in range(faults + 60):
            now_ns += rng.choice((0, 0, 1, 1, 60))
            able = [worker for worker in sorted(live) if scheduler.granted(worker) > pushed[worker]]
            gone = sorted(set(range(workers)) - live)
            chance = rng.random() if step < faults else 1.0
            if chance < 0.1 and len(live) > 1:
                leaver = rng.choice(sorted(live))
                scheduler.leave(leaver, now_ns)
                live.discard(leaver)
            elif chance < 0.35 and gone:
                with contextlib.suppress(ValueError):  # a push of its last owner is not folded yet
                    scheduler.join(gone[0], now_ns)
                    live.add(gone[0])
                    pushed[gone[0]] = scheduler.clock(gone[0])
            elif able:
                worker = rng.choice(able)
                scheduler.push(worker, now_ns, samples=1)
                pushed[worker] += 1
            else:
                due_ns = scheduler.due_ns()
                assert due_ns is not None, f"seed {seed}: {sorted(live)} wait for ever"
                now_ns = max(now_ns, due_ns)
                scheduler.fire()


JOINED = ["bsp", "asp", "ssp:0", "ssp:2", "backup:0", "backup:1", "backup:2", "psp:2,0.5", "softsync:1", "softsync:2"]
JOINED += ["r2sp:0", "r2sp:0.8", "r2sp:1,tune=true", "softsync:2,stagger=0.8"]


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
        played = play(spec, "staggered" if "stagger" in spec else "")
        assert _first_difference(played, played.scheduler(4), f"{spec} {seed}", 200) == ""


@pytest.mark.parametrize("backups", [1, 2])
def test_a_quorum_that_does_not_follow_the_live_workers_is_found(backups: int) -> None:
    """A mutant: N as it was at the start."""
    played = play(f"backup:{backups}")
    values = {**played.policy(4).values(4), "backups": 0, "count": 4 - backups}
    assert any(_first_difference(played, Scheduler(4, **values), f"mutant {seed}", 200) for seed in range(20))
