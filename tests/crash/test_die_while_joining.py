"""SIGKILL a joiner of a job with two shards just before its n-th store: the next joiner gets each shard's own clock.

The joiner's process also combines: it retires the lane's last owner, folds what the others have posted, and admits itself.
It may die in any of these. Then the others go on, another process joins, and every push is folded once.
"""

import os
from typing import Any

import pytest

hooks = pytest.importorskip("fastps.kernels.chaos.failpoints", reason="needs the failpoint build: make test-hooks")

from fastps.kernels.protocol.lane import DONE, KIND_LEAVE, Lane  # noqa: E402
from fastps.kernels.shm.arena import LANE_JOINING, LANE_LIVE  # noqa: E402
from tests.crash.test_die_at_every_store import ASP, BACKUP, BSP, DSSP, R2SP, SSP, _stores, dies_at  # noqa: E402
from tests.support import plain_arena  # noqa: E402

SHARDS, LANES = 2, 3
JOINER = 1
POLICIES = {"asp": ASP, "bsp": BSP, "ssp": SSP, "dssp": DSSP, "backup": BACKUP, "r2sp": R2SP}


class Job(plain_arena.Job):
    """Three lanes in memory shared with a forked joiner."""

    def __init__(self, policy: dict[str, Any]) -> None:
        super().__init__(LANES, policy, shards=SHARDS)
        self.steps = [0] * LANES
        self.generation = 0
        for index in range(LANES):
            assert self.arena.claim(index, os.getpid()) == 0

    def push(self, index: int, now_ns: int) -> None:
        """Pull each shard, and post a push of ones."""
        for shard in range(SHARDS):
            self.lanes[index].pull(shard)
        self.post(index, 1.0, now_ns, samples=1, step=self.steps[index])
        self.steps[index] += 1

    def may_push(self, index: int) -> bool:
        lane = self.lanes[index]
        free = lane.posted() - lane.done() < 2
        return free and min(lane.granted(shard) for shard in range(SHARDS)) > self.steps[index]

    def begin(self) -> None:
        """Some steps; then the lane's first owner is dead, and the shards have not received the others' last pushes."""
        for now_ns in (10, 20, 30):
            for index in range(LANES):
                if self.may_push(index):
                    self.push(index, now_ns + index)
            assert self.lanes[0].try_combine(now_ns + 5) == DONE
        assert self.arena.mark_dead(JOINER, 0)
        for index in (0, 2):
            if self.may_push(index):
                self.push(index, 40 + index)

    def join(self) -> None:
        """All that a joiner does until it may push, and its first push."""
        generation = self.arena.claim(JOINER, os.getpid(), True)
        assert generation > 0
        self.lanes[JOINER] = lane = Lane(self.arena, JOINER)
        lane.recover_lock(JOINER, 50, generation - 1)
        for _ in range(2):  # another shard admits it once the first one has
            assert lane.try_combine(50) == DONE
        assert self.arena.has_joined(JOINER)
        self.arena.joined(JOINER)
        self.steps[JOINER] = lane.begin_steps()
        clocks = [[self.arena.clock(index, shard) for index in range(LANES)] for shard in range(SHARDS)]
        for shard in range(SHARDS):
            assert clocks[shard][JOINER] == min(clocks[shard]), "each shard's own slowest clock"
            assert lane.granted(shard) == self.steps[JOINER] + 1, "its first step is granted, as it counts"
        self.posts[JOINER] = lane.posted()
        self.push(JOINER, 60)
        assert lane.try_combine(60) == DONE

    def play(self, indices: tuple[int, ...], now_ns: int, rounds: int) -> None:
        for _ in range(rounds):
            for index in indices:
                if self.may_push(index):
                    self.push(index, now_ns)
            for index in indices:
                assert self.lanes[index].try_combine(now_ns) == DONE

    def end(self) -> None:
        for index in range(LANES):
            assert self.lanes[index].post(KIND_LEAVE, self.steps[index], 0, 0, 200 + index)
            self.arena.leave(index)
            assert self.lanes[index].try_combine(200 + index) == DONE


def _check(policy: dict[str, Any], store: int) -> int:
    """A joiner that dies at this store (0: never), then the rest of the job. Returns the joiner's stores."""
    job = Job(policy)
    job.begin()
    if store == 0:
        return _stores(job.join)
    assert dies_at(store, job.join), f"at store {store}"
    for index in (0, 2):
        job.posts[index] = job.lanes[index].posted()
        job.lanes[index].begin_steps()
        job.steps[index] = job.posts[index]
    generation = job.arena.generation(JOINER)
    job.lanes[0].recover_lock(JOINER, 70, generation)
    job.arena.mark_dead(JOINER, generation)
    job.play((0, 2), 80, 3)
    assert job.arena.lane_state(JOINER) not in (LANE_JOINING, LANE_LIVE)
    job.join()
    job.play((0, JOINER, 2), 100, 6)
    assert job.posts[JOINER] >= 4, f"died at store {store}: the next joiner does not go on"
    job.end()
    for index in range(LANES):
        counters = job.arena.counters(index)
        posted = counters["posted"] - 1
        assert counters["done"] == counters["posted"], f"died at store {store}: a push is lost"
        assert counters["folded"] + counters["dropped"] == SHARDS * posted, f"died at store {store}: lost or doubled"
    for shard in range(SHARDS):
        assert job.lanes[0].owner(shard) == -1
    return 0


@pytest.mark.parametrize("name", POLICIES)
def test_a_joiners_death_at_some_stores_changes_nothing_for_the_next(name: str) -> None:
    stores = _check(POLICIES[name], 0)
    assert stores > 100
    for store in range(1, stores + 1, 23):
        _check(POLICIES[name], store)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["bsp", "dssp", "backup", "r2sp"])  # the grants of asp and ssp have fewer branches
def test_a_joiners_death_at_every_store_changes_nothing_for_the_next(name: str) -> None:
    for store in range(1, _check(POLICIES[name], 0) + 1):
        _check(POLICIES[name], store)
