"""Jobs on a device that go on without a lost worker: the server owns the memory, and a push counts once it is computed."""

import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import fastps
from fastps.device.plan import handle_table_bytes
from fastps.device.store import DeviceStore
from fastps.job.fault_policy import FaultPolicy
from fastps.job.layout import Layout, place
from fastps.job.specs import parse_policy
from fastps.kernels.shm.arena import LANE_DEAD
from fastps.lab.gpus.cuda_on_host import Faults, HostDevice, host_devices
from tests.device.test_device import store_of
from tests.support import processes

AMOUNT = np.float32(1 / 1024)
SIZE = 4097
STEPS = 12


def make_store(sync: str, workers: int, server: str = "process") -> DeviceStore:
    policy, update = parse_policy(sync), fastps.SGD(lr=1.0)
    faults = FaultPolicy(on_worker_loss="continue", nonfinite="allow")
    layout = Layout(place([("a", (SIZE,), (1,), 0)], 1), 1, update.rule, policy, workers, faults=faults, server=server)
    layout = replace(layout, owner_lanes=(layout.lanes if layout.has_server else 0,), extra_bytes=handle_table_bytes(1))
    make = partial(host_devices, ["one"], 0.001) if layout.has_server else None
    return store_of(layout, update, [1.0], timeout_s=20, server_devices=make)


def steps_of(store: DeviceStore, rank: int, dies_at: int = 0, pause: Callable[[int], None] = lambda step: None) -> Any:
    """Take steps whose gradients are queued and slow; returns the final weights, and the lane's generation."""
    device = HostDevice("one", 0.001, computes_at_once=False, faults=Faults(seed=rank, delay_s=0.002, dies_at=dies_at))
    try:
        with store.use(device).attach(rank) as worker:
            if not worker.generation:
                worker.wait_for_start()
            gradient, zeros = device.host_memory(4 * SIZE), device.host_memory(4 * SIZE)
            gradient.view(np.float32)[:] = AMOUNT
            stream = device.compute_stream()
            for step in range(worker.steps, worker.steps + STEPS):
                pause(step)
                address = store.arena_on_devices().gradient_address(rank, worker.slot, 0)
                # What was in the slot is overwritten twice: a fold that comes too early sees the zeros.
                device.copy(address, zeros.ctypes.data, 4 * SIZE, stream)
                device.copy(address, gradient.ctypes.data, 4 * SIZE, stream)
                worker.push(store.hypers, samples=1)
                worker.advance()
                worker.pull()
            worker.wait_for_others()
            device.synchronize(stream)
            return np.array(worker.weights["a"]), worker.generation
    finally:
        store.close()


@pytest.mark.slow
@pytest.mark.parametrize(("sync", "operation"), [
    *(("asp", operation) for operation in (37, 45, 61, 72, 80, 93)),
    ("ssp:2", 61),
    ("ssp:2", 90),
    ("bsp", 45),
    ("bsp", 93),
])  # fmt: skip
def test_the_others_go_on_and_every_push_that_was_posted_counts(sync: str, operation: int) -> None:
    with make_store(sync, 3) as store:
        children = [processes.start(partial(steps_of, store, rank, operation * (rank == 1))) for rank in range(3)]
        processes.finish(children, 60)
        assert [child.exit_code for child in children] == [0, -signal.SIGKILL, 0], [child.outcome for child in children]
        assert store.arena.lane_state(1) == LANE_DEAD
        posted = store.arena.counters(1)["posted"]
        (first, _), (second, _) = children[0].outcome, children[2].outcome
        assert np.array_equal(first, second)
        assert np.unique(first).size == 1, "no fold read a slot before its gradient was there"
        if sync != "bsp":
            assert (1 - first[0]) / AMOUNT == 2 * STEPS + posted
        else:
            assert (1 - first[0]) / AMOUNT == pytest.approx(STEPS, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_another_process_takes_the_lost_workers_lane(victim: int) -> None:
    with make_store("asp", 2) as store:

        def wait_for_the_joiner(step: int) -> None:
            deadline = time.monotonic() + 20
            while step == STEPS - 1 and store.arena.generation(victim) == 0 and time.monotonic() < deadline:
                time.sleep(0.002)

        other = processes.start(lambda: steps_of(store, 1 - victim, pause=wait_for_the_joiner))
        lost = processes.start(lambda: steps_of(store, victim, 80))
        processes.finish([lost], 30)
        assert lost.exit_code == -signal.SIGKILL
        joiner = processes.start(lambda: steps_of(store, victim))
        processes.results([other, joiner], 40)
        assert joiner.outcome[1] == 1
        assert np.array_equal(other.outcome[0], joiner.outcome[0]) and np.unique(other.outcome[0]).size == 1
        assert (1 - other.outcome[0][0]) / AMOUNT >= 2 * STEPS


def test_without_a_server_it_is_refused_by_name() -> None:
    with make_store("asp", 2, "workers") as store:
        store.use(HostDevice("one"))
        with pytest.raises(fastps.UnsupportedError, match="only if a server owns the memory"):
            store.attach(0)
