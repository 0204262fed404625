"""Shards whose gradients have appeared are folded while backward still computes the others."""

import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import fastps
from fastps.device.plan import handle_table_bytes, shards_of
from fastps.device.store import DeviceStore
from fastps.job.fault_policy import FaultPolicy
from fastps.job.layout import Layout, place
from fastps.job.specs import parse_policy
from fastps.lab.gpus.cuda_on_host import HostDevice
from fastps.lab.worlds.device_workers import parts_of
from tests.device.test_device import store_of
from tests.support import processes

SIZE, STEPS, AMOUNT = 1025, 3, np.float32(1 / 1024)
GAP_S = 0.2  # between the gradients of two shards


def make_store(owner_lanes: tuple[int, ...]) -> DeviceStore:
    update = fastps.SGD(lr=1.0)
    rows = [(f"p{number}", (SIZE,), (1,), 0) for number in range(len(owner_lanes))]
    unchecked = FaultPolicy(nonfinite="allow")  # a push that is checked is posted behind all its gradients
    layout = Layout(place(rows, 1), 1, update.rule, parse_policy("bsp"), 2, faults=unchecked).with_shards(len(owner_lanes))
    layout = replace(layout, owner_lanes=owner_lanes, extra_bytes=handle_table_bytes(len(owner_lanes)))
    return store_of(layout, update, [0] * len(owner_lanes), timeout_s=20)


def work(store: DeviceStore, rank: int, gpus: str, marks: bool) -> Any:
    """Steps in which the last bucket's gradients appear first and the first bucket's much later.

    Returns, for each step, whether the last bucket's folds were done before the first bucket's gradients appeared. A bucket has
    a shard on each of two devices, and the first is a wave of its own.
    """
    device, seen = HostDevice(gpus[rank], computes_at_once=False), []
    with store.use(device), store.attach(rank) as worker:
        worker.wait_for_start()
        arena, stream, gradient = store.arena_on_devices(), device.compute_stream(), device.host_memory(4 * SIZE)
        gradient.view(np.float32)[:] = AMOUNT
        last, folded = len(store.layout.parameters) - 1, device.api.events[parts_of(arena)["folded 0"]]
        for step in range(STEPS):
            for shard in reversed(range(last + 1)):
                device.copy(arena.gradient_address(rank, worker.slot, shard), gradient.ctypes.data, 4 * SIZE, stream)
                if marks:
                    arena.mark_computed(shard)
                if shard == last - 1:
                    device.api.streams[stream].do(partial(time.sleep, GAP_S))
                    made = step + 2  # the first record is that of the setup
                    device.api.streams[stream].do(lambda made=made: seen.append(int(folded.words[1]) >= made))  # type: ignore[misc]
            worker.push(store.hypers, samples=1)
            worker.advance()
            worker.pull()
        worker.wait_for_others()
        device.synchronize(stream)
        values = np.concatenate([np.array(values) for values in worker.weights.values()])
        assert np.allclose(values, -STEPS * AMOUNT), "every gradient was there when it was folded"
        return seen if last in arena.own_shards() else []


@pytest.mark.parametrize(
    "marks", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["marked by hooks", "left to the push"]
)
def test_a_shard_is_folded_while_backward_computes_the_others(marks: bool) -> None:
    with make_store((0, 1, 0, 1)) as store:
        children = processes.start_each(lambda rank: work(store, rank, "ab", marks), 2)
        assert processes.results(children, 40) == [[], [marks] * STEPS]


def test_a_large_model_has_several_shards_a_device_and_a_small_one_as_few_as_may_be() -> None:
    assert [shards_of(size << 20, 4, 64 << 20) for size in (1, 64, 65, 1000)] == [4, 4, 8, 64]
    assert shards_of(1 << 40, 8, 64 << 20) == 64 and shards_of(1 << 40, 5, 64 << 20) == 60, "an arena has at most 64"
