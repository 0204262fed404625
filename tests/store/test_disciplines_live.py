"""Facts that the papers state, asserted on the live store with honest sleeps: workers are processes, time is the clock's.

Every discipline is a row of ROWS. Bounds leave room for a machine of two cores that does other work, never for another law.
"""

import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps
from fastps.job.specs import parse_policy
from fastps.lab.demo.delays import Delays, delay
from fastps.simulation.simulate import ComputeModel
from fastps.system.clock import SYSTEM_CLOCK
from fastps.tracing.file import read
from tests.support import processes
from tests.support.virtual_runs import played, row_of, times

AMOUNT = np.float32(1.0 / 1024)


@dataclass(frozen=True)
class Run:
    """What a run of one discipline showed; times in seconds, one entry a worker."""

    seconds: float
    version: int
    dropped: int
    counters: list[dict[str, Any]]
    histograms: dict[str, Any]

    @property
    def steps(self) -> int:
        return sum(counters["steps"] for counters in self.counters)

    def staleness(self) -> Counter[int]:
        return Counter(dict(self.histograms["staleness"]))


def run(
    sync: str,
    workers: int,
    *,
    step_s: float = 0.004,
    seconds: float = 2.0,
    factors: dict[int, float] | None = None,
    per_sample: bool = False,
    delays: Delays | None = None,
    parameters: int = 4,
) -> Run:
    """Let workers push for so long; each sleeps `step_s` a step, times its factor, times its batch / 8 where `per_sample`."""
    weights = {f"w{index}": np.ones(100, np.float32) for index in range(parameters)}

    def work(rank: int) -> float:
        with store.attach(rank) as worker:
            if delays is not None:
                delay(worker, delays)
            worker.wait_for_start()
            began = time.monotonic()
            while time.monotonic() - began < seconds:
                batch = worker.batch_size or 8
                time.sleep(step_s * (factors or {}).get(rank, 1.0) * (batch / 8 if per_sample else 1.0))
                for view in worker.gradients.values():
                    view[:] = AMOUNT
                worker.push(store.hypers, samples=batch)
                worker.advance()
                worker.pull()
            return time.monotonic() - began

    with fastps.Store.create(weights, fastps.SGD(lr=1.0), sync=sync, workers=workers) as store:
        took_s = processes.results(processes.start_each(work, workers), 40)
        counters: list[dict[str, Any]] = [dict(store.arena.counters(rank)) for rank in range(workers)]
        posted = sum(row["posted"] for row in counters) - workers  # each one's last is LEAVE
        shards = store.arena.shards
        assert sum(row["folded"] + row["dropped"] for row in counters) == posted * shards, "every push is folded or dropped"
        dropped = sum(row["dropped"] for row in counters)
        return Run(max(took_s), store.version, dropped, counters, dict(store.arena.histograms(0)))


# Every discipline runs live, and folds or drops each push exactly once: `run` asserts it.
ROWS = [
    *("bsp", "asp", "asp,combine=true", "ssp:3", "ssp:3,combine=true", "bsp,shards=4", "hardsync:32", "r2sp", "bsp,tune=true"),
    *("dssp:3,15", "dssp:3,15,release=printed", "dssp:3,15,hard_bound=true", "dssp:3,15,bound=push", "dssp:3,15,credit=prose"),
    *("dssp:1,3,release=printed,bound=push,credit=prose", "dssp:3,15,scale=1/sigma", "r2sp:0.8,tune=true", "r2sp:1"),
    *("backup:1", "backup:1,pull=0.75", "psp:3,0.75", "psp:2,0.5,push_timeout=0.002,pull_timeout=0.002"),
    *("softsync:1", "softsync:2", "softsync:4", "softsync:2,scale=1/sigma", "softsync:2,stagger=0.8"),
    *("adv:1", "adv:2,groups=4", "adv:1,relay=0.5", "adv*:1", "adv*:2"),
    "policy:fold=count,grant=bounded,divisor=2,low=3,high=3",
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("sync", ROWS)
def test_every_discipline_runs_live_and_folds_or_drops_each_push_once(sync: str) -> None:
    found = run(sync, 4, step_s=0.001, seconds=0.4)
    assert found.version > 10
    assert found.dropped == 0 or sync.startswith(("backup", "psp"))
    assert sync not in ("bsp", "hardsync:32", "backup:1") or set(found.staleness()) == {0}, "of pushes that wait for each other"


def _store(sync: str, names: str = "w", workers: int = 2, **options: Any) -> fastps.Store:
    """A job whose parameters have these names, and four floats each."""
    weights = {name: np.ones(4, np.float32) for name in names}
    return fastps.Store.create(weights, fastps.SGD(lr=1.0), sync=sync, workers=workers, **options)


RATES = (0.125, 0.25, 0.5)


def _gradient(rank: int, step: int) -> Any:
    return np.random.default_rng(1000 * rank + step).standard_normal(500).astype(np.float32)


def _push_with_momentum(store: fastps.Store, rank: int, steps: int) -> None:
    hyper = store.hypers[0]._replace(learning_rate=RATES[rank])
    with store.attach(rank) as worker:
        worker.wait_for_start()
        for step in range(steps):
            if rank == 0 and step % 8 == 0:
                while not worker.lane.hold():
                    time.sleep(0)
                time.sleep(0.003)  # so long the others' pushes wait for one drain
                worker.lane.release(False, now_ns=SYSTEM_CLOCK.now_ns())
            worker.gradients["w"][:] = _gradient(rank, step)
            worker.push([hyper])
            worker.advance()
            worker.pull()


@pytest.mark.parametrize("sync", ["asp,combine=true", "ssp:2,combine=true", "dssp:1,4,combine=true"])
def test_combined_pushes_are_numpys_sums_with_the_mean_learning_rate(sync: str, tmp_path: Path) -> None:
    """Which pushes a drain has found the ledger tells; what becomes of them is momentum's arithmetic, by NumPy."""
    steps, file = 120, tmp_path / "run.trace"
    with (
        fastps.trace(file),
        fastps.Store.create({"w": np.ones(500, np.float32)}, fastps.SGD(lr=1.0, momentum=0.5), sync=sync, workers=3) as store,
    ):
        processes.results(processes.start_each(lambda rank: _push_with_momentum(store, rank, steps), 3), 40)
        version, (buffers, _) = store.version, store.committed()
        found = store.weight_views(tuple(buffers))[0].copy()
    pushes = read(file).pushes
    assert len(pushes) == 3 * steps and set(pushes["version"].tolist()) == set(range(1, version + 1))
    assert version < 3 * steps, "some drain has found several"
    weights, buffer = np.ones(500, np.float32), np.zeros(500, np.float32)
    for number in range(1, version + 1):
        together = np.sort(pushes[pushes["version"] == number], order=("worker", "step"))
        total = sum((_gradient(line["worker"], line["step"]) for line in together), np.zeros(500, np.float32))
        rate = np.float32(np.mean([RATES[line["worker"]] for line in together]))
        buffer = total if number == 1 else np.float32(0.5) * buffer + total
        weights -= rate * buffer
    np.testing.assert_allclose(found, weights, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("n", "workers"), [(2, 8), (3, 5), pytest.param(1, 8, marks=pytest.mark.slow)])
@pytest.mark.timing
@pytest.mark.sampled(2)
def test_softsync_has_a_mean_staleness_near_n_and_hardly_ever_more_than_twice_that(n: int, workers: int) -> None:
    """Rudra, section 5.1: <sigma> = n, or (lambda - 1) / c, and sigma <= 2 <sigma> but for a share of 1e-4. 3 of 5 have 4."""
    found = run(f"softsync:{n}", workers, step_s=0.02, seconds=3.0)
    mean = (workers - 1) / (workers // n)
    assert found.histograms["average_staleness"] == pytest.approx(mean, rel=0.25)
    counted = found.staleness()
    beyond = sum(count for sigma, count in counted.items() if sigma > 2 * max(n, mean))
    assert beyond <= 0.01 * counted.total()


@pytest.mark.slow
@pytest.mark.timing
def test_r2sp_has_a_staleness_of_workers_less_one_and_fewer_zero_gaps_than_bsp() -> None:
    """R2SP, section III-C: each misses N - 1 updates; Figure 8: few zero gaps, where bsp has (N - 1) / N of them.

    Both figures assume equal workers, and are exact in virtual time. Busy cores make steps uneven: workers then miss fewer
    updates, and several wait for their turn at once, which gives zero gaps.
    """
    workers, step_s = 4, 0.04
    found, bsp = run("r2sp", workers, step_s=step_s, seconds=3.0), run("bsp", workers, step_s=step_s, seconds=1.0)
    counted = found.staleness()
    assert max(counted) == workers - 1
    assert counted[workers - 1] > 0.5 * counted.total()
    assert _zero_gaps(found, workers) < 0.5 * _zero_gaps(bsp, workers)
    assert _zero_gaps(bsp, workers) == pytest.approx((workers - 1) / workers, abs=0.02)


def _zero_gaps(found: Run, workers: int) -> float:
    """The share of gaps under 1 % of the mean iteration time."""
    limit_ns = 0.01 * found.seconds * workers / found.steps * 1e9
    gaps = found.histograms["gaps_ns"]
    return float(sum(count for gap_ns, count in gaps if gap_ns < limit_ns) / sum(count for _, count in gaps))


@pytest.mark.slow
@pytest.mark.timing
def test_batch_tuning_takes_the_fast_workers_blocking_away() -> None:
    """R2SP, section IV, under a straggler of factor 3: at least four fifths of the waiting of the fast."""
    plain = run("r2sp:0.8", 4, step_s=0.005, seconds=2.5, factors={0: 3.0}, per_sample=True)
    tuned = run("r2sp:0.8,tune=true", 4, step_s=0.005, seconds=2.5, factors={0: 3.0}, per_sample=True)

    def share(found: Run) -> float:
        fast = found.counters[1:]
        return float(sum(row["wait_ns"] for row in fast) / sum(row["wait_ns"] + row["compute_ns"] for row in fast))

    assert share(plain) > 0.4
    assert share(tuned) < 0.2 * share(plain), (share(plain), share(tuned))
    assert all(row["samples"] > 1.5 * tuned.counters[0]["samples"] for row in tuned.counters[1:])


def test_a_step_without_a_gradient_is_no_workers_first_batch() -> None:
    """R2SP, Algorithm 1, worker, line 5: the rate is that of the first batch, and a null push has none."""
    with _store("r2sp:0,tune=true", workers=1) as store, store.attach(0) as worker:
        worker.push_nothing()
        worker.advance()
        worker.pull()
        worker.gradients["w"][:] = 2.0
        worker.push(store.hypers, samples=32)
        worker.advance()
        worker.pull()
        assert (worker.weights["w"].tolist(), worker.batch_size) == ([-1.0] * 4, 32)


@pytest.mark.slow
@pytest.mark.timing
def test_one_backup_worker_doubles_the_speed_beside_a_straggler_of_factor_4() -> None:
    factors = {2: 4.0}
    bsp, backup = (run(sync, 4, step_s=0.005, seconds=1.5, factors=factors) for sync in ("bsp", "backup:1"))
    assert backup.version / backup.seconds >= 2 * bsp.version / bsp.seconds
    assert backup.dropped > 0


@pytest.mark.slow
@pytest.mark.timing
def test_partial_pull_keeps_the_speed_that_rare_large_delays_take_from_a_full_pull() -> None:
    """PSP-SGD, section 4: few responses come very late."""
    delays = Delays(late_share=0.02, late_s=0.15, seed=3)
    undisturbed = run("psp:3,0.75", 4, step_s=0.005, seconds=2.0)
    partial = run("psp:3,0.75", 4, step_s=0.005, seconds=2.0, delays=delays)
    full = run("psp:3,1", 4, step_s=0.005, seconds=2.0, delays=delays)
    rates = [found.steps / found.seconds for found in (undisturbed, partial, full)]
    assert rates[1] >= 0.9 * rates[0], rates
    assert rates[2] < 0.85 * rates[0], rates
    assert sum(row["stale_blocks"] for row in partial.counters) > 0


def test_a_late_response_is_late_from_the_grant_on() -> None:
    """PSP-SGD, section 4.2, delays the responses: a peer of 0.3 s and a delay of 0.15 s are 0.45 s, as in virtual time."""
    peer, delay_s = ComputeModel("replay", replay=[[1], [300_000_000]]), 0.15
    begun = times(played("bsp", workers=2, steps=3, compute=peer, late_pulls=(1.0, int(delay_s * 1e9))), "begin", 0)
    with _store("bsp") as store:

        def work(rank: int, step_s: float) -> float:
            with store.attach(rank) as worker:
                delay(worker, Delays(late_share=1.0, late_s=delay_s, seed=3))
                worker.wait_for_start()
                began = time.monotonic()
                for _ in range(2):
                    time.sleep(step_s)
                    worker.step({"w": np.zeros(4)})
                return time.monotonic() - began

        took_s, _ = processes.results(processes.start_each(lambda rank: work(rank, 0.3 * rank), 2), 30)
        assert begun[2] == 900_000_000
        assert -0.05 <= took_s - begun[2] / 1e9 < 1.0


@pytest.mark.slow
@pytest.mark.timing
def test_communication_overlaps_more_in_a_tree_and_wholly_in_the_background() -> None:
    """Rudra, Table 1: 11.52 % in base, 56.75 % in adv, 99.56 % in adv*, of compute / (compute + communication)."""

    def overlap(sync: str) -> float:
        found = run(sync, 4, step_s=0.02, seconds=2.0, delays=Delays(15.0))
        compute, wait = (sum(row[key] for row in found.counters) for key in ("compute_ns", "wait_ns"))
        return float(compute / (compute + wait))

    base, tree, background = (overlap(sync) for sync in ("softsync:1", "adv:1", "adv*:1"))
    assert base < tree < background
    assert base < 0.3
    assert background >= 0.95


@pytest.mark.timing
@pytest.mark.parametrize("transfer", [0.75, *(pytest.param(steps, marks=pytest.mark.slow) for steps in (0.1, 3))])
def test_the_staleness_of_background_pulls_is_that_of_virtual_time(transfer: float) -> None:
    """Rudra, section 3.3: received weights wait until the next step. `transfer`: in steps; each push is a version."""
    policy, step_s = parse_policy("adv*:2"), 0.03
    options: dict[str, Any] = {"workers": 2, "compute": ComputeModel("normal", step_s * 1e9, 0.05 * step_s * 1e9)}
    options |= {"model_bytes": 1.0, "bandwidth": 1 / (step_s * transfer)}
    tree, direct = (row_of(replace(policy, groups=groups), **options) for groups in (2, 0))  # live there is no tree
    found = run("adv*:2", 2, step_s=step_s, seconds=1.0 + transfer, delays=Delays(1000 * step_s * transfer))
    counted = found.staleness()
    mean = sum(staleness * count for staleness, count in counted.items()) / counted.total()
    assert 0.5 * direct["staleness_mean"] < mean < 1.25 * max(tree["staleness_mean"], direct["staleness_mean"]) + 0.5
    assert max(counted) <= max(tree["staleness_max"], direct["staleness_max"]) + 3


@pytest.mark.timing
def test_psps_timeout_waits_for_more_pushes_but_not_for_the_straggler() -> None:
    factors = {3: 20.0}
    found = run("psp:2,1,push_timeout=0.004", 4, step_s=0.004, seconds=1.5, factors=factors)
    folds = sum(row["folded"] for row in found.counters)
    updates = found.version * 4
    assert folds / updates > 2.5, "the third comes within the timeout"
    assert found.version / found.seconds > 3 / (0.004 * 20)


@pytest.mark.parametrize(("sync", "largest"), [
    *(("dssp:1,4,hard_bound=true", 4), ("dssp:1,4,bound=push,combine=true", 3), ("ssp:2,shards=2,scale=1/sigma", 2)),
    ("policy:fold=count,grant=bounded,low=2,high=2,release=printed,divisor=1", 2),
])  # fmt: skip
def test_a_bound_keeps_every_worker_within_it(sync: str, largest: int) -> None:
    """The lead of a worker that is granted its next step, whose push may lead by one more."""
    with _store(sync, "vw") as store:

        def work(rank: int, delay_s: float) -> int:
            lead = 0
            with store.attach(rank) as worker:
                for _ in range(20):
                    time.sleep(delay_s)
                    worker.step({"v": np.zeros(4), "w": np.zeros(4)})
                    lead = max(lead, worker.steps - store.arena.counters(1 - rank)["posted"])
            return lead

        lead, _ = processes.results(processes.start_each(lambda rank: work(rank, 0.01 * rank), 2), 30)
        assert 1 < lead <= largest


def test_pushes_of_an_earlier_version_are_dropped_and_change_nothing() -> None:
    with _store("backup:1") as store, store.attach(0) as fast, store.attach(1) as slow:
        fast.step({"w": np.full(4, 0.25)})
        assert fast.weights["w"].tolist() == [0.75] * 4
        slow.step({"w": np.full(4, 0.5)})  # computed with version 0
        assert slow.weights["w"].tolist() == [0.75] * 4
        assert [store.arena.counters(rank)["dropped"] for rank in range(2)] == [0, 1]


def test_backup_workers_are_so_many_of_those_that_live() -> None:
    """A version takes the pushes of all but one, whoever leaves and joins."""
    with _store("backup:1", max_workers=4) as store:
        one, two, three, four = (store.attach(rank) for rank in range(4))
        for worker, version in ((one, 0), (two, 0), (three, 1), (four, 1)):
            worker.gradients["w"][...] = 0.0
            worker.push(store.hypers)
            assert store.version == version, "three of four, and the fourth is dropped"
        for worker in (one, two, three, four):
            worker.advance()
            worker.pull()
        four.close()
        for worker, version in ((one, 1), (two, 2), (three, 2)):
            worker.push(store.hypers)
            assert store.version == version, "two of three"
        assert [store.arena.counters(rank)["dropped"] for rank in range(4)] == [0, 0, 1, 1]
        for worker in (one, two, three):
            worker.advance()
            worker.close()


def test_a_joiners_first_step_and_the_next_keep_the_gap_of_r2sp() -> None:
    """R2SP, section III-B: permissions are T / N apart, those of three workers 0.1 s."""
    with _store("r2sp:1", max_workers=3) as store, store.attach(0) as one, store.attach(1) as two:
        for pause_s in (0.0, 0.3):
            time.sleep(pause_s)
            granted = time.monotonic()
            for worker in (one, two):
                worker.push(store.hypers)
                if worker is one or not pause_s:
                    worker.advance()
        with store.attach(2) as joiner:
            assert time.monotonic() - granted >= 0.1
            two.advance()
            assert time.monotonic() - granted >= 0.2
            joiner.push(store.hypers)


def test_a_push_has_the_timestamp_of_the_oldest_shard_that_its_step_has_pulled() -> None:
    """PSP-SGD, server, line 7: what one shard has missed is dropped by all, not folded where it is stale."""
    store = _store("psp:2,1,shards=2", "ab", workers=3)
    with store, store.attach(0) as one, store.attach(1) as two, store.attach(2) as late:
        assert late.lane.hold(0)
        for worker in (one, two):
            worker.push(store.hypers)
        late.pull()
        assert [late.lane.shard_version(shard) for shard in range(2)] == [0, 1]
        late.lane.release(False, 0, SYSTEM_CLOCK.now_ns())
        assert [store.arena.shard_version(shard) for shard in range(2)] == [1, 1]
        for worker in (late, one):
            worker.push(store.hypers)
        assert store.arena.counters(2)["dropped"] == 2
        for worker in (late, one):
            worker.advance()


def test_the_linear_scale_counts_each_push_fully_and_the_mean_does_not() -> None:
    for scale, expected in (("linear", 1 - 2 * 0.25), ("mean", 1 - 0.25)):
        store = _store(f"psp:2,1,shards=2,scale={scale}", "ab")
        with store, store.attach(0) as one, store.attach(1) as other:
            for worker in (one, other):
                for view in worker.gradients.values():
                    view[:] = 0.25
                worker.push(store.hypers)
            for worker in (one, other):
                worker.advance()
                worker.pull()
                assert worker.weights["b"].tolist() == [expected] * 4


def test_the_moving_average_follows_the_weights() -> None:
    with _store("bsp,ema=0.5", workers=1) as store, store.attach(0) as worker:
        for _ in range(3):
            worker.step({"w": np.full(4, -1.0)})
        _, buffers = store.committed()
        # 1, then towards 2, 3 and 4 by halves: 1.5, 2.25, 3.125.
        assert store.plane_views(buffers, 0)[0].tolist() == [3.125] * 4
