"""Shards whose gradients have appeared are folded while backward still computes the others."""

import time
from functools import partial
from typing import Any

import numpy as np
import pytest

import fastps
from fastps.device.plan import shards_of
from fastps.device.store import DeviceStore
from fastps.lab.gpus.cuda_on_host import HostDevice
from fastps.lab.worlds.device_workers import parts_of
from tests.device.test_completed_pushes import SIZE, final_values, layout_of
from tests.device.test_device import AMOUNT, go_on, store_of
from tests.support import processes

STEPS = 3
GAP_S = 0.2  # between the gradients of two shards


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
            go_on(worker, samples=1)
        values = final_values(worker, device)
        assert np.allclose(values, -STEPS * AMOUNT), "every gradient was there when it was folded"
        return seen if last in arena.own_shards() else []


@pytest.mark.parametrize(
    "marks", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["marked by hooks", "left to the push"]
)
def test_a_shard_is_folded_while_backward_computes_the_others(marks: bool) -> None:
    # It checks nothing: a push that is checked is posted behind all its gradients.
    with store_of(layout_of("bsp", 2, (0, 1, 0, 1)), fastps.SGD(lr=1.0), [0] * 4, timeout_s=20) as store:
        children = processes.start_each(lambda rank: work(store, rank, "ab", marks), 2)
        assert processes.results(children, 40) == [[], [marks] * STEPS]


def test_a_large_model_has_several_shards_a_device_and_a_small_one_as_few_as_may_be() -> None:
    assert [shards_of(size << 20, 4, 64 << 20) for size in (1, 64, 65, 1000)] == [4, 4, 8, 64]
    assert shards_of(1 << 40, 8, 64 << 20) == 64 and shards_of(1 << 40, 5, 64 << 20) == 60, "an arena has at most 64"
