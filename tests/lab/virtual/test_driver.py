"""The driver of virtual time: each discipline's weights are those of a NumPy loop over the same events, to the last bit."""

import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise, product
from math import sqrt
from typing import Any

import numpy as np
import pytest

from fastps import SGD, Policy, Store, parse_policy
from fastps.kernels.protocol.lane import BAD_DESCRIPTOR, DONE, KIND_PUSH, Lane
from fastps.kernels.update import fold as folding
from fastps.lab.virtual.compute_texts import parse_compute
from fastps.lab.virtual.driver import BEGIN, DROP, PULL, RECEIVE, Listener
from fastps.lab.virtual.hosting import Hosting
from fastps.lab.virtual.script import _Run
from fastps.lab.virtual.training import _updates
from fastps.processes.options import JobOptions
from fastps.simulation.simulate import Simulation, simulate
from fastps.store.worker import Worker
from fastps.system.clock import SYSTEM_CLOCK
from tests.support.folds import fold_reference as reference

Arrays = dict[str, np.ndarray]

WORKERS, STEPS, SAMPLES = 3, 12, 16
FIRST = {name: np.linspace(-1, 1, 5, dtype=np.float32) + index for index, name in enumerate("abcd")}
ROWS = "pqrstu"  # of the table, each with a name of its own
TABLE = np.linspace(-2, 2, 5 * len(ROWS), dtype=np.float32).reshape(-1, 5)
DISCIPLINES = (
    "bsp", "asp", "ssp:3", "dssp:3,15", "softsync:2", "backup:1", "psp:2,0.75", "psp:3,0.75,push_timeout=0.01", "r2sp:0.8",
    "hardsync:64", "adv:1,groups=2", "adv*:1,groups=2", "ssp:1,shards=2", "asp,combine=true", "dssp:1,4,shards=2,combine=true",
)  # fmt: skip
NETWORKS: dict[str, dict[str, Any]] = {
    "instant": {},
    "late": {"model_bytes": 1e6, "bandwidth": 1e8, "latency_ns": 500_000, "late_pulls": (0.2, 60_000_000)},
    "late pushes": {"late_pushes": (0.1, 30_000_000)},
    "busy": {"service_ns": 2_000_000, "update_ns": 15_000_000},
}

CASES = [
    pytest.param(spec, network, False, marks=pytest.mark.sampled(4))
    for spec, network in product(DISCIPLINES, NETWORKS)
    if not (network == "late pushes" and spec.startswith("psp"))  # refused: a push could overtake another
]
CASES += [
    pytest.param(spec, network, True, id=f"{spec}-{network}-table")
    for spec, network in product(("bsp", "asp", "dssp:3,15", "softsync:2", "backup:1"), ("instant", "busy"))
]


def simulation_of(network: str, **options: Any) -> Simulation:
    compute = replace(parse_compute("lognormal:10ms,0.4"), factors={0: 2.5})
    return Simulation(workers=WORKERS, steps=STEPS, batch=SAMPLES, compute=compute, seed=5, **NETWORKS[network], **options)


def gradient(weights: np.ndarray, name: str, worker: int, step: int) -> np.ndarray:
    """Of half the squared distance to a point that moves."""
    target = np.random.default_rng([ord(name), worker, step]).standard_normal(weights.shape)
    return weights - target.astype(np.float32)


# -- the job -------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def virtual(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FASTPS_VIRTUAL", "1")
    before = threading.active_count()
    yield
    assert threading.active_count() <= before


def pushed_rows(worker: int, step: int) -> list[int]:
    """The rows of the table that a step reads and pushes."""
    return sorted({worker, (worker + step) % len(ROWS), step % len(ROWS)})


def work(worker: Worker, steps: int) -> None:
    with worker:
        for step in range(steps):
            time.sleep(random.random() * 0.004)
            for name, view in worker.gradients.items():
                view[...] = gradient(worker.weights[name], name, worker.rank, step)
            if worker.store.tables:
                rows, table = pushed_rows(worker.rank, step), worker.weights["t"]
                worker.put_rows("t", rows, [gradient(table[row], ROWS[row], worker.rank, step) for row in rows])
            worker.push(worker.store.hypers, samples=SAMPLES)
            worker.advance()
            worker.pull()


@contextmanager
def driven(job: str, spec: str, play: Callable[..., Any]) -> Iterator[threading.Thread]:
    """The thread in which a job of this name is played, and raises what ended it."""
    listener, hosting = Listener(job), Hosting([], WORKERS, spec, JobOptions(), play)
    driver = threading.Thread(target=hosting.drive, args=(listener,), daemon=True)
    driver.start()
    try:
        yield driver
    finally:
        listener.close()
        driver.join(60)
        listener.free()
        hosting.free()
    if hosting.error is not None:
        raise hosting.error


def trained(
    spec: str, simulation: Simulation, steps: tuple[int, ...] = (STEPS,) * WORKERS, tables: Arrays | None = None
) -> tuple[Arrays, dict[str, Any]]:
    """The final weights of a job whose workers are threads here, and the run's row."""
    first, options = FIRST | (tables or {}), {"sync": spec, "workers": WORKERS, "server": "process"}
    job = f"virtual-{spec.replace(',', '-')}-{os.getpid()}"
    run, rule = _Run(parse_policy(spec), simulation, SYSTEM_CLOCK), SGD(lr=0.1, momentum=0.0 if tables else 0.5)
    with driven(job, spec, run.play) as driver:
        with Store.create(first, rule, job=job, tables=tables or (), **options) as store:
            threads = [driver] + [
                threading.Thread(target=lambda rank=rank: work(store.attach(rank), steps[rank]), daemon=True)
                for rank in range(WORKERS)
            ]
            for thread in threads[1:]:
                thread.start()
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive()
            found = store.weight_views(store.committed()[0])
            weights = {name: view.copy() for name, view in zip(first, found, strict=True)}
    return weights, run.row


# -- the oracle ----------------------------------------------------------------------------------------


class Loop:
    """A plain loop over a simulation's events: NumPy's gradients, and the fold's reference.

    Rows of a table are parameters here, of which a step reads the newest when it begins, and pushes some.
    """

    def __init__(self, policy: Policy, rows: Arrays | None = None) -> None:
        self.policy, first, self.rows = policy, FIRST | (rows or {}), rows or {}
        names = sorted(first)
        bounds = np.linspace(0, len(names), policy.shards + 1).astype(int)
        self.names = [names[first:last] for first, last in pairwise(bounds)]
        self.kept = [[{name: first[name] for name in own}] for own in self.names]  # by shard and version
        self.state = {name: (np.zeros((1, 5), np.float32), np.zeros(1, np.int64)) for name in names}
        self.reads = [dict.fromkeys(range(policy.shards), 0) for _ in range(WORKERS)]
        self.begun = [0] * WORKERS
        self.made = [[deque[Arrays]() for _ in self.names] for _ in range(WORKERS)]
        self.received = [[deque[Arrays]() for _ in self.names] for _ in range(WORKERS)]

    def play(self, trace: Any) -> Arrays:
        for update, line in _updates(trace):
            worker, shard, kind = line["worker"], line["shard"], line["kind"]
            if update:
                self.fold(update)
            elif kind == PULL:
                self.reads[worker][shard] = line["version"]
            elif kind == BEGIN:
                if self.policy.overlap:
                    self.reads[worker][0] = line["version"]
                for number, own in enumerate(self.names):
                    weights = dict(self.kept[number][self.reads[worker][number]])
                    weights |= {name: self.kept[number][-1][name] for name in own if name in self.rows}
                    step = self.begun[worker]
                    pushed = {*FIRST, *(ROWS[row] for row in pushed_rows(worker, step))}.intersection(own)
                    self.made[worker][number].append({name: gradient(weights[name], name, worker, step) for name in pushed})
                self.begun[worker] += 1
            elif kind == RECEIVE:
                self.received[worker][shard].append(self.made[worker][shard].popleft())
            elif kind == DROP:
                self.received[worker][shard].pop()
        return {name: weights for versions in self.kept for name, weights in versions[-1].items()}

    def fold(self, update: list[dict[str, int]]) -> None:
        shard, policy = update[0]["shard"], self.policy
        pushes = [self.received[line["worker"]][shard].popleft() for line in sorted(update, key=lambda line: line["worker"])]
        count, hyper = len(pushes), reference.Hyper(0.1, 0.0 if self.rows else 0.5, 0, 0, 0, 0, 0)
        rates = {"linear": count, "square-root": sqrt(count * SAMPLES / 64), "divisor": 1 / (policy.divisor or 1)}
        mode, scale = folding.FOLD_SUM if policy.is_sum else folding.FOLD_EACH, 1.0 / count if policy.is_mean else 1.0
        rate_scale, made = rates.get(policy.scale, 1.0), {}
        for name, weights in self.kept[shard][-1].items():
            if name in self.rows:
                pushed = [push[name] for push in pushes if name in push]
                made[name] = weights
                for each in [sum(pushed[1:], pushed[0])] if policy.is_sum and pushed else pushed:
                    made[name] = made[name] + np.float32(-0.1 * rate_scale) * (each * np.float32(scale))
                continue
            made_of = [reference.Push(push[name], [hyper], [True], 1.0) for push in pushes]
            job = (folding.RULE_SGD, mode, [(0, 5, 0)], made_of, weights, *self.state[name])
            made[name], *self.state[name] = reference.fold(*job, scale=scale, rate_scale=rate_scale)
        self.kept[shard].append(made)


@pytest.mark.parametrize(("spec", "network", "has_table"), CASES)
@pytest.mark.sampled(6)
def test_weights_are_those_of_a_plain_loop_over_the_same_events_however_long_workers_really_compute(
    spec: str, network: str, has_table: bool
) -> None:
    """A step reads the rows of a table of the moment when it begins."""
    policy, rows = parse_policy(spec), dict(zip(ROWS, TABLE, strict=True)) if has_table else {}
    weights, row = trained(spec, simulation_of(network), tables={"t": TABLE} if has_table else None)
    outcome = simulate(policy, simulation_of(network, leave=True), trace=True)
    expected = Loop(policy, rows).play(outcome.trace)
    if has_table:
        weights |= dict(zip(ROWS, weights["t"].reshape(TABLE.shape), strict=True))
    for name in FIRST | rows:
        np.testing.assert_array_equal(weights[name], expected[name])
    for key in ("seconds", "updates", "staleness", "dropped", "stale_blocks", "wait_share", "events"):
        assert row[key] == outcome.row[key]


@pytest.mark.parametrize("spec", ["bsp", "softsync:2", "psp:2,0.75"])
def test_the_others_go_on_without_a_worker_that_leaves(spec: str) -> None:
    _, row = trained(spec, simulation_of("instant"), steps=(STEPS, 0, 5))
    assert row["steps"] == STEPS + 5
    assert row["updates"] >= STEPS


def test_a_push_that_is_not_played_waits_in_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's lane takes the named lanes' pushes in the given order, and no other."""
    monkeypatch.delenv("FASTPS_VIRTUAL")
    with Store.create(FIRST, SGD(lr=1.0), sync="asp", workers=3) as store:
        lanes, combiner = [Lane(store.arena, rank) for rank in range(3)], Lane(store.arena, 0)
        for rank, lane in enumerate(lanes):
            lane.set_hyper(0, 0, 1.0, 0, 0, 0, 0, 0, 0, 0, 0)
            lane.set_presence(0, (15).to_bytes(8, "little"))
            for view in store.gradient_views(rank, 0):
                view[:] = 10.0**rank
            assert lane.post(KIND_PUSH, 0, 0, 0, 1_000 - rank)
        assert [combiner.play(0, [(rank, 2_000)]) for rank in (2, 0)] == [DONE, DONE]
        assert [lane.done() for lane in lanes] == [1, 0, 1] and store.version == 2
        np.testing.assert_array_equal(store.weight_views(store.committed()[0])[0], FIRST["a"] - 101)
        assert combiner.play(0, [(-1, 3_000)]) == DONE and store.version == 2, "no timer is due"
        assert combiner.play(0, [(0, 3_000)]) == BAD_DESCRIPTOR and combiner.bad_lane == 0, "it has posted no more"
        with pytest.raises(IndexError):
            combiner.play(0, [(7, 3_000)])
