"""The scheduler with many workers: whatever has happened, its answers stay those of the oracles.

Small oracles cannot show a list that is cut, a match of a tournament that is forgotten, or a bucket that is passed too early
among thousands. Here many workers share few clocks, wait in thousands, and leave. Speed is not tested: see the benchmark.
"""

import random
from typing import Any

import pytest

from tests.oracles.table import play

WORKERS = 400  # four levels of a tournament of sevens


def both_sides(spec: str, oracle: str = "") -> tuple[Any, Any]:
    return play(spec, oracle).oracle(WORKERS), play(spec, oracle).scheduler(WORKERS)


MORE = [pytest.param(spec, marks=pytest.mark.slow) for spec in ("ssp:0", "ssp:2", "dssp:1,3", "dssp:1,3,release=printed")]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("spec", ["dssp:1,3,hard_bound=true", *MORE])
def test_half_of_the_workers_wait_for_the_other_half_as_the_oracle_says(spec: str) -> None:
    """The fast half runs to its bound and waits; then the slow half, in random order and with leaves, lets it go on."""
    rng = random.Random(spec)
    sides = both_sides(spec)
    able, now_ns = set(range(WORKERS)), 0
    for _ in range(3):
        for half in (range(WORKERS // 2), range(WORKERS // 2, WORKERS)):
            for _ in range(WORKERS):
                choices = [worker for worker in half if worker in able]
                if not choices:
                    break
                worker = rng.choice(choices)
                now_ns += rng.randint(0, 3)
                leaves = rng.random() < 0.005
                expected, found = [side.leave(worker, now_ns) if leaves else side.push(worker, now_ns) for side in sides]
                assert found == expected, (spec, worker, now_ns)
                able.discard(worker)
                able.update(expected[1])
    assert sides[1].version > 2 * WORKERS


@pytest.mark.slow
@pytest.mark.parametrize("tune", [False, True])
@pytest.mark.sampled(2)
def test_the_slowest_of_many_round_robin_workers_is_found_whoever_leaves(tune: bool) -> None:
    """Times fall and rise by large factors, so that the slowest changes at every level of the tournament."""
    rng = random.Random(tune)
    oracle, scheduler = both_sides(f"r2sp:0.8{',tune=true' if tune else ''}")
    now_ns = 0
    for _ in range(6):
        order = list(oracle.t)
        rng.shuffle(order)
        for worker in order:
            now_ns += rng.choice((1, 1_000, 1_000_000))
            while oracle.due_ns() is not None and oracle.due_ns() <= now_ns:
                assert scheduler.due_ns() == oracle.due_ns()
                assert scheduler.fire() == oracle.fire()
            if worker in oracle.waiting or rng.random() < 0.02:
                if worker not in oracle.waiting:
                    assert scheduler.leave(worker, now_ns) == oracle.leave(worker, now_ns)
                continue
            samples = rng.choice((8, 16, 64))
            found = scheduler.push(worker, now_ns, oracle.version, samples)
            assert found == oracle.push(worker, now_ns, oracle.version, samples)
            assert scheduler.due_ns() == oracle.due_ns()
            if tune:
                for granted in found[1]:
                    assert scheduler.batch(granted) == oracle.batch[granted]
    assert oracle.version > 2 * WORKERS


def test_a_leaf_whose_workers_have_nearly_all_left_passes_on_what_it_holds() -> None:
    oracle, scheduler = both_sides("adv:4,groups=3", "tree")
    rng = random.Random(3)
    for worker in rng.sample(range(WORKERS), WORKERS - 9):
        assert scheduler.push(worker, 1) == oracle.push(worker, 1, 0)
        assert scheduler.leave(worker, 1) == oracle.leave(worker, 1)
    for now_ns in range(2, 600):
        worker = rng.choice(list(oracle.t))
        assert scheduler.push(worker, now_ns) == oracle.push(worker, now_ns, 0)
