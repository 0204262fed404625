"""Disciplines that go by what has arrived: a push on a device is posted once its gradients are there, and holds nobody up."""

import time
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import fastps
from fastps.device.plan import waits_before_posting
from fastps.device.store import DeviceStore
from fastps.job.fault_policy import FaultPolicy
from fastps.job.layout import Layout, place
from fastps.job.specs import parse_policy
from fastps.lab.gpus.cuda_on_host import HostDevice
from tests.device.test_device import AMOUNT, homed, store_of
from tests.support import processes

SIZE = 1025
SLOW_S = 0.12


def layout_of(sync: str, workers: int, owner_lanes: tuple[int, ...] = (0,), **options: Any) -> Layout:
    rows = [(f"p{number}", (SIZE,), (1,), 0) for number in range(len(owner_lanes))]
    options.setdefault("faults", FaultPolicy(nonfinite="allow"))
    layout = Layout(place(rows, 1), 1, fastps.SGD(lr=1.0).rule, parse_policy(sync), workers, **options)
    return homed(layout.with_shards(len(owner_lanes)) if len(owner_lanes) > 1 else layout, owner_lanes)


def test_who_waits_is_a_matter_of_the_fold_of_going_on_and_of_the_check() -> None:
    specs = ["bsp", "hardsync:64", "policy:fold=all,grant=next-version,scale=mean"]
    specs += ["asp", "ssp:2", "dssp:1,4", "backup:1", "psp:2,0.5", "softsync:2", "r2sp:0.8"]
    assert [waits_before_posting(layout_of(spec, 4)) for spec in specs] == [False] * 3 + [True] * 7
    continues = FaultPolicy(on_worker_loss="continue", nonfinite="allow")
    assert waits_before_posting(layout_of("bsp", 4, faults=continues, server="process"))
    assert all(waits_before_posting(layout_of("bsp", 4, faults=FaultPolicy(nonfinite=each))) for each in ("reject", "raise"))


class Outcome(NamedTuple):
    ended: float
    total: float
    posted_at: list[float]
    posted_after: list[bool]
    computing_s: float


def final_values(worker: fastps.Worker, device: HostDevice) -> Any:
    """All weights at the end of the job."""
    worker.wait_for_others()
    device.synchronize(device.compute_stream())
    return np.concatenate([np.array(values) for values in worker.weights.values()])


def work(store: DeviceStore, rank: int, gpus: str, steps: list[int]) -> Outcome:
    """Take steps whose gradients are queued; worker 0's appear slowly.

    Returns when the device was done with them, the sum of all pushes in the weights, when each push was posted, whether its
    gradients were there by then, and the time that the worker's counters call computing.
    """
    device, done = HostDevice(gpus[rank], computes_at_once=False), []
    with store.use(device), store.attach(rank) as worker:
        worker.wait_for_start()
        stream, gradient = device.compute_stream(), device.host_memory(4 * SIZE)
        gradient.view(np.float32)[:] = AMOUNT
        posted_at, posted_after = [], []
        for step in range(steps[rank]):
            device.api.streams[stream].do(partial(time.sleep, SLOW_S * (rank == 0)))
            for index in range(len(store.layout.parameters)):
                address = store.arena_on_devices().gradient_address(rank, worker.slot, index)
                device.copy(address, gradient.ctypes.data, 4 * SIZE, stream)
            device.api.streams[stream].do(partial(done.append, step))
            worker.push(store.hypers, samples=1)
            posted_at.append(time.monotonic())
            posted_after.append(len(done) == step + 1)
            worker.advance()
            worker.pull()
        device.synchronize(stream)
        ended = time.monotonic()
        counted = store.arena.counters(rank)["compute_ns"] / 1e9
        values = final_values(worker, device)
        assert np.unique(values).size == 1, "a fold read a slot before its gradient was there"
        return Outcome(ended, -values[0] / AMOUNT, posted_at, posted_after, counted)


def run(sync: str, gpus: str, steps: list[int], owner_lanes: tuple[int, ...]) -> list[Outcome]:
    layout = layout_of(sync, len(gpus), owner_lanes)
    with store_of(layout, fastps.SGD(lr=1.0), [0] * len(owner_lanes), timeout_s=20) as store:
        return processes.results(processes.start_each(lambda rank: work(store, rank, gpus, steps), len(gpus)), 40)


@pytest.mark.parametrize(
    ("sync", "gpus"), [("asp", "aaa"), pytest.param("asp", "abb", marks=pytest.mark.slow), ("backup:1", "abb")]
)
def test_the_others_go_on_at_their_speed_beside_a_slow_device(sync: str, gpus: str) -> None:
    """Those that share the slow worker's GPU fold themselves; on its own GPU it folds others' pushes while it computes."""
    owners = (0,) if gpus == "aaa" else (0, 1)
    slow, *fast = run(sync, gpus, [4, 12, 12], owners)
    assert all(each.ended < slow.posted_at[3] for each in fast), "they took 12 steps before the slow one took its fourth"
    assert all(all(each.posted_after) for each in (slow, *fast))
    if sync == "asp":
        assert {each.total for each in (slow, *fast)} == {28.0}


def test_the_scheduler_sees_the_times_of_the_device_under_dssp() -> None:
    slow, fast = run("dssp:1,3,hard_bound=true", "aa", [6, 6], (0,))
    assert all(slow.posted_after) and slow.computing_s > 6 * SLOW_S * 0.95, "computing lasts until the gradients are there"
    assert fast.computing_s < slow.computing_s / 2, "and the other worker's own computing stays short: it waits for its grants"
    assert fast.ended > slow.posted_at[1], "so it is at most 4 steps ahead of what the slow device has computed"


def test_where_all_wait_for_all_the_host_still_runs_ahead() -> None:
    slow, fast = run("bsp", "aa", [3, 3], (0,))
    assert not all(slow.posted_after) and slow.total == fast.total == 3.0
