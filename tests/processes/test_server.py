"""A server of the job's own, with real processes: the same results, no turns for the workers, and everybody's death."""

import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import psutil
import pytest

import fastps
from fastps.device.plan import handle_table_bytes
from fastps.device.store import DeviceStore
from fastps.job.layout import Layout, place
from fastps.job.specs import parse_policy
from fastps.kernels.shm.arena import LANE_DEAD
from fastps.lab.gpus.cuda_on_host import HostDevice, host_devices
from fastps.processes.options import JobOptions
from fastps.store import core_sharing as cores
from tests.device.test_device import store_of
from tests.support import processes
from tests.support.processes import runs, wait_until
from tests.support.torch_optimizers import mean_square, steps_on

AMOUNT = np.float32(1.0 / 1024)
SIZE = 1000
# With constant gradients of 1/1024 and a rate of 1 all sums are exact, so that the order of arrival does not show.
EXACT = ["asp,shards=2", "dssp:1,4", "r2sp:0.5"]


def _store(sync: str, workers: int, update: fastps.job.update_rules.Update | None = None, **options: Any) -> fastps.Store:
    weights = {"a": np.ones(SIZE, np.float32), "b": np.ones((3, 5), np.float32)}
    settings = {"server": "process", "timeout_s": 20.0, **options}
    return fastps.Store.create(weights, update or fastps.SGD(lr=1.0), sync=sync, workers=workers, **settings)


def _constant(_rank: int, _step: int) -> dict[str, Any]:
    return {"a": np.full(SIZE, AMOUNT), "b": np.full((3, 5), AMOUNT)}


def _random(rank: int, step: int) -> dict[str, Any]:
    numbers = np.random.default_rng([rank, step])
    return {"a": numbers.standard_normal(SIZE, np.float32), "b": numbers.standard_normal((3, 5), np.float32)}


def _steps(store: fastps.Store, rank: int, steps: int, make: Callable[[int, int], dict[str, Any]], pause_s: float = 0.0) -> Any:
    """Take steps; returns the final weights, and what was logged."""
    told = _Told()
    with store.attach(rank) as worker:
        worker.wait_for_start()  # or a fast one would be done, and see itself alone, before a slow one has come
        for step in range(steps):
            for name, values in make(rank, step).items():
                worker.gradients[name][...] = values
            worker.push(store.hypers, samples=4)
            worker.advance()
            worker.pull()
            time.sleep(pause_s)
        worker.wait_for_others()
        return {name: np.array(values) for name, values in worker.weights.items()}, told.texts


class _Told(logging.Handler):
    """What this process logs about members."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("fastps.membership").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _run(store: fastps.Store, workers: int, steps: int, make: Callable[[int, int], dict[str, Any]]) -> list[dict[str, Any]]:
    children = processes.start_each(lambda rank: _steps(store, rank, steps, make), workers)
    return [weights for weights, _ in processes.results(children, 40)]


def _server_of(store: fastps.Store) -> int:
    assert store.server is not None
    return store.server.process_id


# -- the same results --------------------------------------------------------------------------------------------------


def _own_rule() -> fastps.job.update_rules.Update:
    """A rule of the user's own, which the server compiles again."""
    factor = 0.5

    @fastps.rule(state=("speed",), hyper=("learning_rate", "drag"))
    def dragged(weight, gradient, speed, learning_rate, drag):  # type: ignore[no-untyped-def]
        moved = speed * drag + gradient * factor
        return weight - learning_rate * moved, moved

    return dragged(learning_rate=0.1, drag=0.3)


def _assert_all_equal(found: list[dict[str, Any]]) -> None:
    for weights in found[1:]:
        for name, values in weights.items():
            assert np.array_equal(values, found[0][name]), name


@pytest.mark.parametrize(("sync", "make"), [
    pytest.param("bsp,ema=0.9", lambda: fastps.Adam(lr=0.01), id="adam-average"),
    pytest.param("hardsync:8,shards=2", lambda: fastps.SGD(lr=0.1, momentum=0.9), id="two-shards"),
    pytest.param("bsp", _own_rule, id="own-rule", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_sum_of_all_has_the_bits_of_the_workers_own_turns(sync: str, make: Callable[[], Any]) -> None:
    found, update = [], make()
    for server in ("workers", "process"):
        with _store(sync, 2, update, server=server) as store:
            found += _run(store, 2, 30, _random)
            assert store.version == 30
    _assert_all_equal(found)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sync", EXACT)
def test_every_push_is_folded_exactly_once_by_the_server(sync: str) -> None:
    workers, steps = 3, 40
    with _store(sync, workers) as store:
        for weights in _run(store, workers, steps, _constant):
            assert all(set(values.reshape(-1).tolist()) == {1.0 - workers * steps / 1024} for values in weights.values())


def test_timers_of_a_quorum_are_the_servers() -> None:
    """Two workers wait for the timer while the third is too slow for it; whoever had to fire it would not be the server."""
    workers, steps = 3, 20
    with _store("psp:2,1,push_timeout=0.002,shards=1", workers) as store:
        pauses_s = (0.0, 0.0, 0.01)
        work = lambda rank: _steps(store, rank, steps, _constant, pauses_s[rank])  # noqa: E731
        weights = processes.results(processes.start_each(work, workers), 40)[0][0]
        counters = [store.arena.counters(rank) for rank in range(workers)]
        folded = sum(counter["folded"] for counter in counters)
        dropped = [counter["dropped"] for counter in counters]
        assert (folded + sum(dropped), sum(dropped[:2]) < dropped[2]) == (workers * steps, True)
        assert set(weights["a"].tolist()) == {1.0 - folded / 1024}, "a quorum's mean times its count is its sum"


# -- who takes the turns -----------------------------------------------------------------------------------------------


def test_workers_take_no_turn_while_there_is_a_server_and_an_observer_sees_workers_only() -> None:
    with _store("asp", 1, timeout_s=60) as store, store.attach(0) as worker:
        for _ in range(3):
            worker.step(_constant(0, 0))
        wait_until(lambda: store.version == 3)
        with processes.stopped(_server_of(store)):
            worker.push(store.hypers)
            for _ in range(20):
                worker.try_combine()
                time.sleep(0.005)
            assert (store.version, worker.lane.posted(), worker.lane.done()) == (3, 4, 3), "posted, and nobody folds it"
            observer = fastps.observe(store.job)
            assert [row.rank for row in observer.look().workers] == [0]
            observer.close()
        wait_until(lambda: store.version == 4)


def test_a_wait_for_a_stopped_server_names_it_as_stopped_and_goes_on_when_it_wakes() -> None:
    with _store("bsp", 1, timeout_s=0.5) as store, store.attach(0) as worker:
        server = _server_of(store)
        with processes.stopped(server):
            worker.push(store.hypers)
            stopped = rf"process {server}, the job's server, is stopped: wake it \(kill -CONT {server}\), or end it"
            with pytest.raises(fastps.TimeoutExceededError, match=stopped):
                worker.advance()
        worker.advance()


def test_a_stopped_worker_that_is_waited_for_is_named_as_stopped() -> None:
    def train() -> None:
        with store.attach(1):
            signal.pause()

    with _store("asp", 2, server="workers", on_worker_loss="continue") as store, store.attach(0) as worker:
        child = processes.start(train)
        try:
            worker.wait_for_start()
            worker.step(_constant(0, 0))
            with processes.stopped(child.process_id):
                assert worker._membership.waited_for() == ["worker 1 (at step 0, stopped)"]
            assert worker._membership.waited_for() == ["worker 1 (at step 0)"]
        finally:
            os.kill(child.process_id, signal.SIGKILL)
            processes.finish([child], 20)


@pytest.mark.slow
def test_an_optimizer_of_torch_has_the_same_bits_with_a_server_that_a_launched_job_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    found = []
    for server in ("workers", "process"):
        for name, value in JobOptions(server=server).environment().items():
            monkeypatch.setenv(name, value)
        torch.manual_seed(1)
        model = torch.nn.Linear(8, 4)
        with fastps.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), sync="bsp") as optimizer:
            assert (optimizer.worker.store.server is not None) == (server == "process")
            for _ in range(10):
                steps_on(model, optimizer, torch.randn(3, 8), loss=mean_square)
            state = optimizer.state_dict()["state"]
            found.append([parameter.detach().clone() for parameter in model.parameters()] + [state[0]["exp_avg"]])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_who_holds_the_turns_by_hand_gives_them_back_to_the_server() -> None:
    with _store("asp", 2) as store, store.attach(0) as first, store.attach(1) as second:
        first.lock_shards()
        second.push(store.hypers)
        time.sleep(0.05)
        assert store.version == 0
        buffer, _ = first.lane.spare()
        for view in store.weight_views(buffer):
            view[:] = 5.0
        first.unlock_shards(True)
        wait_until(lambda: store.version == 1)
        second.pull()
        assert second.weights["a"][0] == 5.0 - second.gradients["a"][0]


# -- deaths ------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("sync", "loss"), [("bsp", "stop"), ("dssp:1,4", "continue"), ("r2sp:0.5", "stop")])
def test_the_servers_death_loses_nothing_and_is_told_once(sync: str, loss: str) -> None:
    workers, steps = 3, 150
    with _store(sync, workers, on_worker_loss=loss) as store:
        children = processes.start_each(lambda rank: _steps(store, rank, steps, _constant, 0.001), workers)
        wait_until(lambda: store.version >= 20)
        os.kill(_server_of(store), signal.SIGKILL)
        processes.results(children, 40)
        pushes = steps * workers
        for child in children:
            assert set(child.outcome[0]["a"].tolist()) == {1.0 - (steps if sync == "bsp" else pushes) / 1024}
        told = [text for child in children for text in child.outcome[1]]
        assert len(told) == 1 and f"the server (process {_server_of(store)}) died" in told[0], told
        assert store.arena.lane_state(store.arena.server_lane) == LANE_DEAD


def test_the_server_shares_the_workers_cores_until_it_dies() -> None:
    with _store("asp", 2) as store, store.attach(0) as worker:
        assert worker.cores.takers == 3
        os.kill(_server_of(store), signal.SIGKILL)
        wait_until(lambda: worker.step({"a": np.zeros(SIZE), "b": np.zeros((3, 5))}) is None and not store.arena.is_served())
        worker.try_combine()
        assert worker.cores.takers == 2
        assert worker.cores.spins == cores.spins(2, len(os.sched_getaffinity(0)))


def test_a_server_that_rests_for_long_sleeps() -> None:
    """It yields the core before it sleeps, where it shares one: for a millisecond at most, and not again after a long rest."""
    with _store("asp", os.cpu_count() or 1) as store, store.attach(0) as worker:
        server = psutil.Process(_server_of(store))
        for _ in range(20):
            worker.step({"a": np.zeros(SIZE), "b": np.zeros((3, 5))})
        before_s = sum(server.cpu_times()[:2])
        time.sleep(1.0)
        assert sum(server.cpu_times()[:2]) - before_s < 0.3


@pytest.mark.slow
def test_the_turn_of_a_server_that_dies_in_a_fold_is_broken() -> None:
    """Four million parameters: nearly all of the server's time is the fold's."""
    weights = {"w": np.ones(1 << 22, np.float32)}
    with fastps.Store.create(weights, fastps.SGD(lr=1.0), sync="asp", workers=1, server="process") as store:
        with store.attach(0) as worker:
            worker.gradients["w"][:] = AMOUNT
            is_alive, steps = True, 0
            while is_alive or steps < 12:
                assert steps < 100, "the server was never seen with the turn"  # a busy machine may let this look too late
                worker.push(store.hypers)
                while is_alive and steps >= 5 and not worker.push_folded:
                    if worker.lane.owner() == store.arena.server_lane:
                        os.kill(_server_of(store), signal.SIGKILL)
                        is_alive = False
                worker.advance()
                worker.gradients["w"][:] = AMOUNT
                steps += 1
            worker.wait_for_others()
            assert (store.version, set(worker.weights["w"].tolist())) == (steps, {1.0 - steps / 1024})


def test_a_killed_worker_is_buried_by_the_server_and_another_joins_in_its_place() -> None:
    with _store("ssp:2", 2, on_worker_loss="continue") as store:
        children = processes.start_each(lambda rank: _steps(store, rank, 60, _constant, 0.002), 2)
        wait_until(lambda: store.version >= 10)
        os.kill(children[1].process_id, signal.SIGKILL)
        children.append(processes.start(lambda: _steps(store, 1, 20, _constant, 0.002)))
        processes.finish(children, 40)
        assert [child.exit_code for child in children] == [0, -signal.SIGKILL, 0], [child.outcome for child in children]
        assert store.weight_views(store.committed()[0])[0][0] == 1.0 - store.version / 1024


def test_a_killed_worker_ends_the_job_with_its_name_where_losses_do() -> None:
    with _store("bsp", 3) as store:
        children = processes.start_each(lambda rank: _steps(store, rank, 10**6, _constant), 3)
        wait_until(lambda: store.version >= 5)
        os.kill(children[1].process_id, signal.SIGKILL)
        processes.finish(children, 20)
        for rank in (0, 2):
            assert children[rank].outcome[0] == "WorkerDiedError", children[rank].outcome
        assert any("worker 1 (" in children[rank].outcome[1] for rank in (0, 2))


# -- the end -----------------------------------------------------------------------------------------------------------


def _creator(job: str, steps: int) -> None:
    """Make a job of two workers, and be the first of them."""
    with _store("asp", 2, job=job, on_worker_loss="continue") as store:
        _steps(store, 0, steps, _constant, 0.001)


def _found(job: str) -> fastps.Store:
    policy, update = parse_policy("asp"), fastps.SGD(lr=1.0)
    rows = [("a", (SIZE,), (1,), 0), ("b", (3, 5), (5, 1), 0)]
    faults = fastps.job.fault_policy.FaultPolicy(on_worker_loss="continue")
    layout = Layout(place(rows), 1, update.rule, policy, 2, faults=faults, server="process")
    return fastps.Store.connect(job, layout, [update.hyper], timeout_s=20)


def test_the_server_outlives_its_creator_and_ends_with_the_last_worker() -> None:
    job = f"server-{os.getpid()}"
    creator = processes.start(lambda: _creator(job, 10**6))
    with _found(job) as store:
        server = store.arena.process_id(store.arena.server_lane)
        with store.attach(1) as worker:
            wait_until(lambda: store.version >= 5)
            os.kill(creator.process_id, signal.SIGKILL)
            processes.finish([creator], 10)
            for step in range(100):
                worker.step(_constant(1, step))
                time.sleep(0.002)
            assert worker.lane.served and runs(server)  # type: ignore[attr-defined]
        wait_until(lambda: not runs(server), 2.0)


def test_no_server_outlives_workers_that_were_all_killed() -> None:
    job = f"killed-{os.getpid()}"
    children = [processes.start(lambda: _creator(job, 10**6))]
    with _found(job) as store:
        children.append(processes.start(lambda: _steps(store, 1, 10**6, _constant)))
        wait_until(lambda: store.version >= 5 and store.arena.counters(1)["posted"] > 0)
        server = store.arena.process_id(store.arena.server_lane)
    for child in children:
        os.kill(child.process_id, signal.SIGKILL)
    processes.finish(children, 10)
    wait_until(lambda: not runs(server), 2.0)


def test_a_store_that_nobody_joined_takes_its_server_with_it() -> None:
    with _store("bsp", 2) as store:
        server = _server_of(store)
        assert runs(server)
    assert not psutil.pid_exists(server), "ended, and reaped"


def test_a_second_job_of_a_running_jobs_name_is_refused_as_without_a_server() -> None:
    with _store("bsp", 1, job=f"twice-{os.getpid()}") as store, pytest.raises(fastps.AttachError, match="choose another"):
        _store("bsp", 1, job=store.job)


def test_workers_that_disagree_about_the_server_are_told_so() -> None:
    update = fastps.SGD(lr=1.0)
    with _store("bsp", 2) as store, pytest.raises(fastps.LayoutError, match="server"):
        fastps.Store.connect(store.job, replace(store.layout, server="workers"), [update.hyper])


# -- devices -----------------------------------------------------------------------------------------------------------


def _device_store(sync: str, workers: int, update: fastps.job.update_rules.Update) -> DeviceStore:
    policy = parse_policy(sync)
    parameters = place([("a", (SIZE,), (1,), 0), ("b", (3, 5), (5, 1), 0)], policy.shards)
    layout = Layout(parameters, 1, update.rule, policy, workers, server="process")
    shards = len(layout.shards)
    layout = replace(layout, owner_lanes=(layout.lanes,) * shards, extra_bytes=handle_table_bytes(shards))

    return store_of(layout, update, [1.0, 1.0], timeout_s=20, server_devices=partial(host_devices, ["one"], 0.002))


def _device_steps(store: DeviceStore, rank: int, steps: int, make: Callable[[int, int], dict[str, Any]]) -> Any:
    with store.use(HostDevice("one", 0.002)), store.attach(rank) as worker:
        for step in range(steps):
            worker.step(make(rank, step))
        worker.wait_for_others()
        assert store.devices is not None and store.devices.folds == 0, "workers fold nothing"
        return {name: np.array(values) for name, values in worker.weights.items()}


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("sync", ["bsp", "psp:2,0.5,shards=2"])
def test_a_server_that_owns_a_devices_memory_has_the_bits_of_the_cpu(sync: str) -> None:
    update = fastps.Adam(lr=0.01)
    with _store(sync, 2, update, server="workers") as on_cpu:
        found = _run(on_cpu, 2, 12, _random)
    with _device_store(sync, 2, update) as store:
        found += processes.results(processes.start_each(lambda rank: _device_steps(store, rank, 12, _random), 2), 40)
    _assert_all_equal(found)


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("victim", [-1, 0, 1], ids=["server", "creator's worker", "worker"])
def test_a_death_on_a_device_is_named_within_two_seconds_and_the_others_end(victim: int) -> None:
    with _device_store("bsp", 3, fastps.SGD(lr=0.01)) as store:
        children = processes.start_each(lambda rank: _device_steps(store, rank, 10**6, _random), 3)
        wait_until(lambda: store.version >= 5)
        if victim >= 0:
            processes.kill_one(children, victim)
        else:
            os.kill(_server_of(store), signal.SIGKILL)
            processes.finish(children, 4)
            # A worker that waits for the server's GPU work itself waits for ever, as on CUDA: the launcher ends it.
            assert all(child.exit_code in (1, -signal.SIGKILL) for child in children)
            told = [child.outcome for child in children if child.exit_code == 1]
            assert all("WorkerDiedError" in kind for kind, _ in told), told
            assert not told or any("the memory on devices is gone with it" in text for _, text in told), told
