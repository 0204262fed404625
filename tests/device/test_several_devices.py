"""Jobs whose shards lie on several devices: a worker a device, slots at their workers, folds that read the others' slots.

Streams are late here, by seeds: whatever is not ordered by an event comes too early.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import fastps
from fastps.device.plan import placed_on
from fastps.device.store import DeviceStore
from fastps.job.update_rules import Update
from fastps.lab.gpus.cuda_calls import merged
from fastps.lab.gpus.cuda_on_host import Faults, HostDevice
from fastps.lab.gpus.cuda_rules import check_record
from tests.device import test_device as jobs
from tests.device.test_cuda import recorded
from tests.device.test_device import assert_equal
from tests.support import processes

GPUS = ("gpu 0", "gpu 1", "gpu 2", "gpu 3")


def make_store(update: Update, sync: str, gpus: tuple[str, ...], *, shards: int = 0, dtype: Any = "float32") -> DeviceStore:
    """A job with a worker on each of `gpus`, and a shard for each GPU. Its weights are those of the jobs on one device."""
    layout = jobs.layout_of(update, sync, len(gpus), gradient_type=dtype)
    return jobs.store_of(placed_on(layout.with_shards(shards) if shards else layout, gpus), update)


def run(store: DeviceStore, gpus: Sequence[str], steps: int, make: Any = jobs.gradient, **options: Any) -> list[Any]:
    """Train on late devices, which have `options`."""

    def device_of(rank: int) -> HostDevice:
        return HostDevice(gpus[rank], faults=Faults(seed=rank, delay_s=0.001, late_s=0.0005), **options)

    return jobs.in_workers(store, len(gpus), lambda rank: steps_of(store, rank, steps, make), device_of)


def steps_of(store: fastps.Store, rank: int, steps: int, make: Callable[[int, int], dict[str, Any]]) -> tuple[Any, int]:
    """Take steps of 8 samples; returns the final weights, and how many folds this worker queued."""
    with store.attach(rank) as worker:
        for step in range(steps):
            gradients, later = make(rank, step), None
            for parameter in reversed(store.layout.parameters):  # as backward does
                worker.gradients[parameter.name][...] = gradients[parameter.name]
                if later is not None and later.shard != parameter.shard:
                    mark(store, later.shard)
                later = parameter
            jobs.go_on(worker, samples=8)
        worker.wait_for_others()
        weights = {name: np.array(values) for name, values in worker.weights.items()}
        devices = store.devices if isinstance(store, DeviceStore) else None
        return weights, devices.folds if devices is not None else 0


def mark(store: fastps.Store, shard: int) -> None:
    """Mark a shard's gradients before the push, as the hooks of backward do; the first shard's is left to the push."""
    if isinstance(store, DeviceStore):
        store.arena_on_devices().mark_computed(shard)


def on_cpu(update: Update, sync: str, workers: int, steps: int) -> Any:
    return jobs.on_cpu(update, sync, workers, steps, steps_of)


def test_four_devices_have_the_bits_of_the_cpu() -> None:
    update = fastps.Adam(lr=0.01, weight_decay=0.1)
    found = run(make_store(update, "bsp,ema=0.9", GPUS, shards=8), GPUS, 8)
    assert_equal(found, on_cpu(update, "bsp,ema=0.9", 4, 8))
    folds = [count for _, count in found]
    assert sum(folds) == 8 * 8 and all(count % 8 == 0 and count for count in folds), "each device folds its own shards"


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["bsp,clip=0.5", "psp:4,1,shards=4"])
def test_disciplines_that_wait_for_all_have_the_bits_of_the_cpu(sync: str) -> None:
    update = fastps.SGD(lr=0.1, momentum=0.9)
    assert_equal(run(make_store(update, sync, GPUS), GPUS, 8), on_cpu(update, sync, 4, 8))


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["dssp:1,4", "r2sp:0.8", "softsync:2", "psp:2,0.5,shards=4", "backup:1,pull=0.75,shards=4"])
def test_every_push_is_folded_or_dropped_once_and_all_see_the_same_weights(sync: str) -> None:
    found = run(make_store(fastps.SGD(lr=1.0), sync, GPUS), GPUS, 15, jobs.constant)
    first = jobs.first_weights()
    for weights, _ in found:
        for name, values in weights.items():
            moved = np.round((first[name] - values) * 1024, 2)
            assert np.unique(moved).size == 1 and 0 < moved.flat[0] <= 60, name
            assert np.array_equal(values, found[0][0][name]), name
            if sync in ("asp", "ssp:2", "dssp:1,4"):
                assert moved.flat[0] == 60, name


def test_two_workers_on_each_of_two_devices_share_the_folds() -> None:
    gpus = ("gpu 0", "gpu 1", "gpu 0", "gpu 1")
    update = fastps.SGD(lr=0.1, momentum=0.9)
    found = run(make_store(update, "bsp", gpus), gpus, 8)
    assert_equal(found, on_cpu(update, "bsp", 4, 8))
    folds = [count for _, count in found]
    assert folds[0] + folds[2] == folds[1] + folds[3] == 8


def test_four_gpus_of_the_simulated_runtime_keep_the_rules_of_cuda() -> None:
    update = fastps.Adam(lr=0.01)
    store = make_store(update, "bsp", GPUS)
    found, calls = recorded(store, GPUS, lambda rank: jobs.steps_of(store, rank, 6, jobs.gradient))
    assert_equal(found, on_cpu(update, "bsp", 4, 6))
    whole = merged(*calls)
    peers = [frozenset((one, other)) for one in GPUS for other in GPUS if one != other]
    assert check_record(whole, peers, {call.process for call in whole}) == len(whole)
    synchronized = [call for call in whole if call.name in ("streamSynchronize", "eventSynchronize", "deviceSynchronize")]
    assert len(synchronized) < len(whole) / 5, "the host waits at the beginning and the end"


def test_a_replica_is_shown_where_the_home_is_elsewhere() -> None:
    def look(rank: int) -> Any:
        with store.attach(rank) as worker:
            shown = {name: np.array(values) for name, values in worker.weights.items()}
            worker.wait_for_others()
            return shown, None

    store = make_store(fastps.SGD(lr=0.1), "asp", GPUS[:2])
    assert_equal(jobs.in_workers(store, 2, look, lambda rank: HostDevice(GPUS[rank])), jobs.first_weights())


@pytest.mark.parametrize("out_of_reach", [{"gpu 0"}, {"gpu 0", "gpu 1"}], ids=["one way", "both ways"])
def test_gpus_without_peer_access_are_refused_by_name(out_of_reach: set[str]) -> None:
    def join(rank: int) -> None:
        others = frozenset(out_of_reach - {GPUS[rank]}) if rank or len(out_of_reach) == 2 else frozenset()
        with store.use(HostDevice(GPUS[rank], faults=Faults(unreachable=others))), store.attach(rank) as worker:
            worker.wait_for_others()

    with make_store(fastps.SGD(lr=0.1), "asp", GPUS[:2], shards=2).with_timeout(20) as store:
        children = processes.start_each(join, 2)
        processes.finish(children, 40)
    assert all(child.exit_code == 1 for child in children)
    kind, found = children[1].outcome
    assert kind == "UnsupportedError"
    assert "expected peer access from gpu 1 to gpu 0" in found and "use FASTPS_PLACEMENT=host" in found
