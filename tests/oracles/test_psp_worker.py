"""The worker's part of PSP-SGD's Algorithm 1: by hand, and beside the simulator's workers."""

import pytest

from fastps.job.specs import parse_policy
from fastps.simulation.simulate import TRACE_KINDS, ComputeModel, Simulation, simulate
from tests.oracles.psp_worker import PspWorker

MS = 1_000_000


def test_half_of_the_blocks_are_enough_and_the_rest_are_of_the_last_step() -> None:
    """Line 15: "until ... after b% blocks have been received"; line 4: "W_t <- W_t-1"."""
    worker = PspWorker(4, 0.5, 0)
    assert worker.compute() == [0, 0, 0, 0]
    assert worker.receive(2, 1, 10) is None
    assert worker.receive(0, 1, 20) == 20
    assert (worker.compute(), worker.stale) == ([1, 0, 1, 0], 2)


def test_a_late_block_of_an_older_step_is_dropped() -> None:
    """Lines 10 and 11: "if t' < t then drop"."""
    worker = PspWorker(2, 0.5, 0)
    worker.compute()
    assert worker.receive(0, 1, 10) == 10
    worker.compute()
    assert worker.receive(1, 1, 20) is None, "block 1 of step 1 comes in step 2"
    assert worker.receive(1, 2, 30) == 30
    assert (worker.compute(), worker.stale) == ([1, 2], 2)


def test_a_block_of_a_later_step_is_taken() -> None:
    """Lines 12 and 13: "else". A worker whose gradient was dropped is behind the servers."""
    worker = PspWorker(1, 1.0, 0)
    worker.compute()
    assert worker.receive(0, 5, 10) == 10
    assert worker.compute() == [5]


def test_the_timeout_begins_with_the_share_and_ends_with_the_last_block() -> None:
    """Line 15: "until Timeout tau2 after b% blocks have been received or all servers have responded"."""
    worker = PspWorker(3, 0.5, 100)
    worker.compute()
    assert (worker.receive(0, 1, 10), worker.receive(1, 1, 20)) == (None, None)
    assert (worker.advance(120), worker.advance(121)) == (None, 120)
    assert worker.receive(2, 1, 50) == 50, "all have responded before the timeout"
    assert (worker.compute(), worker.stale) == ([1, 1, 1], 0)


def test_a_share_that_is_not_whole_is_rounded_up() -> None:
    """Section 3: "at least b% of the blocks are guaranteed to be pulled"."""
    worker = PspWorker(4, 0.6, 0)
    worker.compute()
    assert [worker.receive(block, 1, 10 * block) for block in range(3)] == [None, None, 20]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "spec", ["psp:3,0.5,shards=4", "psp:2,0.75,shards=5", "psp:4,0.5,shards=6,pull_timeout=0.02", "psp:4,1,shards=4"]
)
def test_the_simulators_workers_begin_and_read_as_the_oracles_do(spec: str, seed: int) -> None:
    policy = parse_policy(spec)
    compute = ComputeModel("lognormal", 100 * MS, 0.3)
    simulation = Simulation(workers=4, steps=40, compute=compute, late_pulls=(0.2, 60 * MS), seed=seed)
    played = simulate(policy, simulation, trace=True)
    assert played.trace is not None
    tau2_ns = round(policy.pull_timeout * 1e9)
    oracles = [PspWorker(policy.shards, policy.pull, tau2_ns) for _ in range(4)]
    due: dict[int, int] = {}
    begun = [0] * 4
    for line in played.trace:
        worker, now_ns, kind = int(line["worker"]), int(line["time_ns"]), TRACE_KINDS[line["kind"]]
        oracle = oracles[worker]
        if kind == "pull":
            begins_ns = oracle.receive(int(line["shard"]), int(line["version"]), now_ns)
            if begins_ns is not None:
                due.setdefault(worker, begins_ns)
        elif kind == "begin":
            if begun[worker]:
                timed_out_ns = oracle.advance(now_ns + 1)
                assert now_ns == due.pop(worker, timed_out_ns), (worker, begun[worker])
            oracle.compute()
            assert int(line["version"]) == oracle.timestamp, (worker, begun[worker])
            begun[worker] += 1
    assert min(begun) >= 30
    assert sum(oracle.stale for oracle in oracles) == played.row["stale_blocks"]
    assert (played.row["stale_blocks"] > 0) == (policy.pull < 1)
