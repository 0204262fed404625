"""A server that owns the memory on one or several devices: workers map what they need, and go on without those that die.

Gradients are queued, and slow: a push counts once it is computed.
"""

import pickle
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps
from fastps.device.cuda import CudaDevice
from fastps.device.interface import DeviceError
from fastps.device.plan import placed_on
from fastps.device.store import DeviceStore
from fastps.job.fault_policy import FaultPolicy
from fastps.job.specs import parse_policy
from fastps.job.update_rules import Update
from fastps.kernels.shm.arena import LANE_DEAD
from fastps.lab.gpus.cuda_calls import RecordedCuda, merged
from fastps.lab.gpus.cuda_on_host import Faults, HostCuda, HostDevice, host_devices
from fastps.lab.gpus.cuda_rules import check_record
from tests.device import test_device as jobs
from tests.device import test_several_devices as several
from tests.device.test_cuda import recorded
from tests.support import processes

GPUS = ("gpu 0", "gpu 1", "gpu 0", "gpu 1")
ONE_GPU = ("gpu 0",) * 4
STEPS = 8


def make_store(update: Update, sync: str, *, loss: str = "continue", gpus: Any = GPUS) -> DeviceStore:
    """A job with a server, a worker on each of `gpus`, and a shard on each GPU. Its weights are those of the jobs on one."""
    faults = FaultPolicy(on_worker_loss=loss, nonfinite="allow")  # type: ignore[arg-type]
    layout = jobs.layout_of(update, sync, len(gpus), faults=faults, server="process")
    make = partial(host_devices, list(dict.fromkeys(gpus)), 0.0005)
    return jobs.store_of(placed_on(layout, gpus), update, timeout_s=20, server_devices=make)


def steps_of(
    store: DeviceStore,
    rank: int,
    make: Callable[[int, int], dict[str, Any]],
    dies_at: int = 0,
    *,
    gpus: Sequence[str] = GPUS,
    pause: Callable[[int], None] = lambda step: None,
) -> Any:
    """Take steps; returns the final weights, the lane's generation and the number of own folds."""
    faults = Faults(seed=rank, delay_s=0.001, late_s=0.0005, dies_at=dies_at)
    device = HostDevice(gpus[rank], faults=faults, computes_at_once=False)
    with store.use(device), store.attach(rank) as worker:
        if not worker.generation:
            worker.wait_for_start()
        for step in range(worker.steps, worker.steps + STEPS):
            pause(step)
            jobs.compute(store, device, rank, worker.slot, make(rank, step))
            jobs.go_on(worker, samples=8)
        worker.wait_for_others()
        device.synchronize(device.compute_stream())
        folds = store.arena_on_devices().folds
        return {name: np.array(values) for name, values in worker.weights.items()}, worker.generation, folds


class _Recorded(CudaDevice):
    """A GPU of a server, which writes the calls of all its GPUs to a file when it is shut."""

    path = ""

    def shut(self, *, waits: bool = True) -> None:
        super().shut(waits=waits)
        assert isinstance(self._cuda, RecordedCuda)
        Path(self.path).write_bytes(pickle.dumps(self._cuda.calls))


def recorded_gpus(gpus: list[str], path: str) -> list[CudaDevice]:
    """The GPUs of a server on the simulated runtime, as one process has them."""
    api = RecordedCuda(HostCuda(gpus, Faults(seed=9, delay_s=0.001)))
    _Recorded.path = path
    return [_Recorded(index, api) for index in range(len(gpus))]


@pytest.mark.slow
def test_a_server_on_two_gpus_of_the_simulated_runtime_keeps_the_rules_of_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus, update, path = ["gpu 0", "gpu 1"], fastps.Adam(lr=0.01), tmp_path / "calls"
    make = partial(recorded_gpus, gpus, str(path))
    monkeypatch.setattr(sys.modules[__name__], "partial", lambda *_: make)
    store = make_store(update, "bsp", loss="stop", gpus=gpus)

    found, own = recorded(store, gpus, lambda rank: jobs.steps_of(store, rank, STEPS, jobs.gradient))
    jobs.assert_equal(found, several.on_cpu(update, "bsp", 2, STEPS))
    calls = merged(pickle.loads(path.read_bytes()), *own)
    assert check_record(calls, [frozenset(gpus)]) == len(calls)
    enabled = [call for call in calls if call.name == "deviceEnablePeerAccess"]
    assert len(enabled) == 2, "each GPU of the server reads the other's slots"


@pytest.mark.slow
def test_a_server_on_two_devices_has_the_bits_of_the_cpu() -> None:
    update = fastps.Adam(lr=0.01, weight_decay=0.1)
    expected = several.on_cpu(update, "bsp,ema=0.9", 4, STEPS)
    with make_store(update, "bsp,ema=0.9") as store:
        assert sorted(store.layout.owner_lanes) == [4, 5], "each device is a home"
        ends = processes.results(processes.start_each(lambda rank: steps_of(store, rank, jobs.gradient), 4), 60)
    for weights, _, folds in ends:
        assert folds == 0, "workers fold nothing"
        assert all(np.array_equal(weights[name], values) for name, values in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize(("sync", "gpus", "operation"), [
    ("asp", GPUS, 8), ("ssp:2", GPUS, 20), ("asp", GPUS, 41), ("bsp", GPUS, 80), ("asp", GPUS, 130),
    ("asp", ONE_GPU, 37), ("ssp:2", ONE_GPU, 90), ("bsp", ONE_GPU, 120),
], ids=lambda each: str(len(set(each))) if isinstance(each, tuple) else str(each))  # fmt: skip
def test_the_others_go_on_and_every_push_that_was_posted_counts(sync: str, gpus: Sequence[str], operation: int) -> None:
    """Deaths from the first operation of a worker's setup on."""
    with make_store(fastps.SGD(lr=1.0), sync, gpus=gpus) as store:
        children = [
            processes.start(partial(steps_of, store, rank, jobs.constant, operation * (rank == 1), gpus=gpus))
            for rank in range(4)
        ]
        processes.finish(children, 60)
        assert [child.exit_code for child in children] == [0, -signal.SIGKILL, 0, 0], [child.outcome for child in children]
        assert store.arena.lane_state(1) == LANE_DEAD
        posted = store.arena.counters(1)["posted"]
        first, found = jobs.first_weights(), [child.outcome[0] for child in children if child.outcome]
        for name in first:
            assert all(np.array_equal(each[name], found[0][name]) for each in found)
            moved = np.unique(np.round((first[name] - found[0][name]) / jobs.AMOUNT, 2))
            assert moved.size == 1, "no fold read a slot before its gradient was there"
            assert moved[0] == (STEPS if sync == "bsp" else 3 * STEPS + posted)


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "gpus"), [(0, GPUS), (1, ONE_GPU)])
def test_another_process_takes_the_lost_workers_lane(victim: int, gpus: Sequence[str]) -> None:
    with make_store(fastps.SGD(lr=1.0), "asp", gpus=gpus) as store:

        def wait_for_the_joiner(step: int) -> None:
            deadline = time.monotonic() + 20
            while step == STEPS - 1 and store.arena.generation(victim) == 0 and time.monotonic() < deadline:
                time.sleep(0.002)

        others = [
            processes.start(partial(steps_of, store, rank, jobs.constant, gpus=gpus, pause=wait_for_the_joiner))
            for rank in range(4)
            if rank != victim
        ]
        lost = processes.start(lambda: steps_of(store, victim, jobs.constant, 120, gpus=gpus))
        processes.finish([lost], 30)
        assert lost.exit_code == -signal.SIGKILL
        joiner = processes.start(lambda: steps_of(store, victim, jobs.constant, gpus=gpus))
        processes.results([*others, joiner], 40)
        assert joiner.outcome[1] == 1
        for child in others:
            assert all(np.array_equal(child.outcome[0][name], values) for name, values in joiner.outcome[0].items())


@pytest.mark.slow
def test_a_worker_on_another_gpu_than_its_slots_is_told_so() -> None:
    with make_store(fastps.SGD(lr=1.0), "asp") as store:
        store.use(HostDevice("gpu 1"))
        with pytest.raises(fastps.UnsupportedError, match="expected worker 0 on gpu 0, where the server has its slots"):
            store.attach(0)


def test_without_a_server_going_on_is_refused_by_name() -> None:
    faults = FaultPolicy(on_worker_loss="continue", nonfinite="allow")
    layout = jobs.layout_of(fastps.SGD(lr=1.0), "asp", 2, faults=faults)
    with jobs.store_of(placed_on(layout, GPUS[:2]), fastps.SGD(lr=1.0)) as store:
        with pytest.raises(fastps.UnsupportedError, match="only if a server owns the memory"):
            store.use(HostDevice("gpu 0")).attach(0)


def test_a_server_whose_gpus_do_not_reach_each_other_is_refused_by_name() -> None:
    devices = host_devices(["gpu 0", "gpu 1"], faults=Faults(unreachable=frozenset({"gpu 1"})))
    with pytest.raises(
        DeviceError, match=r"expected peer access from GPU 0 to GPU 1, found that CUDA refuses .* FASTPS_PLACEMENT=host"
    ):
        devices[0].borrow(devices[1])
    devices[0].shut()


def test_the_plan_gives_each_gpu_shards_and_the_slots_of_its_workers() -> None:
    layout = jobs.layout_of(fastps.SGD(lr=1.0), "bsp", 4)
    assert placed_on(layout, GPUS).owner_lanes == (0, 1) and placed_on(layout, GPUS).slot_owners == ()
    served = placed_on(replace(layout, server="process"), GPUS)
    assert sorted(served.owner_lanes) == [4, 5] and served.slot_owners == (4, 5, 4, 5)
    assert placed_on(replace(layout, server="process"), []).owner_lanes == (4,)
    assert placed_on(layout, []).owner_lanes == (0,)
    ring = replace(layout, policy=parse_policy("r2sp:0.8"), server="process")
    assert placed_on(ring, GPUS).owner_lanes == (4,) and placed_on(ring, GPUS).slot_owners == (4, 5, 4, 5)
