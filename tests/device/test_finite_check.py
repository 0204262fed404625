"""Non-finite gradients on devices: found by a kernel before the push is posted, and rejected as the CPU's fold rejects them."""

from functools import cache
from typing import Any

import numpy as np
import pytest

import fastps
from fastps.device.arena import FiniteCheck
from fastps.device.store import DeviceStore
from fastps.job.fault_policy import FaultPolicy
from fastps.job.layout import Layout
from fastps.job.update_rules import Update
from fastps.lab.gpus.cuda_on_host import Faults, HostDevice
from fastps.store.row_slots import presence_of
from tests.device import test_device as jobs
from tests.device.test_device import SHAPES, first_weights, gradient
from tests.support import processes

Places = dict[tuple[int, int], dict[tuple[str, int], float]]
INF, NAN = float("inf"), float("nan")
STEPS = 7
# By worker and step: the first, the last and odd places of parameters, one or several, in one shard or in both.
BAD: Places = {
    (1, 1): {("a", 0): INF},
    (0, 2): {("c", 4096): NAN, ("c", 4095): -INF},
    (1, 2): {("d", 0): -INF},
    (0, 3): {("a", 117): NAN, ("c", 1001): INF},
    (1, 3): {("b", 4): NAN},
    (1, 4): {("c", 0): INF, ("a", 230): -INF, ("b", 0): NAN},
}
ABSENT = {(1, 5): "b", (1, 6): "b"}  # the slots still have the values of the steps before


def narrowed(values: Any, dtype: str) -> Any:
    """Gradients as they lie in a slot: float32, float16, or the bits of a bfloat16."""
    return (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else values.astype(dtype)


def made(rank: int, step: int, dtype: str, amount: float | None) -> dict[str, Any]:
    found = {}
    for name, values in gradient(rank, step).items():
        if ABSENT.get((rank, step)) == name:
            continue
        flat = np.full(values.size, amount, np.float32) if amount is not None else values.reshape(-1)
        for (of, at), value in BAD.get((rank, step), {}).items():
            if of == name:
                flat[at] = value
        found[name] = narrowed(flat, dtype).reshape(values.shape)
    return found


@cache
def layout_of(update: Update, sync: str, dtype: Any, nonfinite: str, places: str) -> Layout:
    """Two workers and two shards: on the CPU, on one device, or on two devices."""
    faults = FaultPolicy(nonfinite=nonfinite)
    layout = jobs.layout_of(update, sync, 2, gradient_type=dtype, faults=faults).with_shards(2)
    return layout if places == "cpu" else jobs.homed(layout, (0, 0) if places == "one" else (0, 1))


def run(update: Update, sync: str, dtype: str, places: str, amount: float | None = None, nonfinite: str = "reject") -> Any:
    """Take the steps; returns the weights, and what was counted and rejected of each worker."""
    layout = layout_of(update, sync, dtype, nonfinite, places)

    def work(rank: int) -> Any:
        if isinstance(store, DeviceStore):
            faults = Faults(seed=rank, delay_s=0.001)
            store.use(HostDevice(f"gpu {rank}" if places == "two" else "gpu", faults=faults, computes_at_once=True))
        try:
            with store.attach(rank) as worker:
                for step in range(STEPS):
                    gradients = made(rank, step, dtype, amount)
                    present = [index for index, name in enumerate(SHAPES) if name in gradients]
                    for name, values in gradients.items():
                        worker.gradients[name].view(values.dtype)[...] = values
                    jobs.go_on(worker, samples=1, presence=presence_of(present, len(SHAPES)))
                worker.wait_for_others()
                return {name: np.array(values) for name, values in worker.weights.items()}
        except (fastps.NonFiniteGradientError, fastps.NonFiniteWeightsError, fastps.WorkerDiedError) as error:
            return getattr(error, "worker", -1), str(error)
        finally:
            store.close()

    with jobs.store_of(layout, update, kind=fastps.Store if places == "cpu" else DeviceStore, timeout_s=20) as store:
        children = processes.start_each(work, 2)
        processes.finish(children, 40)
        arena = store.arena
        counted = [{key: arena.counters(rank)[key] for key in ("steps", "folded", "dropped")} for rank in range(2)]
        rejected = [arena.rejected(rank) for rank in range(2)]
    outcomes = [child.outcome for child in children]
    assert [child.exit_code for child in children] == [0, 0], outcomes
    return outcomes, counted, rejected


@pytest.mark.parametrize(("dtype", "places"), [("float32", "one"), ("bfloat16", "two"), ("float16", "one"), ("float32", "two")])
def test_the_same_pushes_are_rejected_as_on_the_cpu_and_the_weights_have_its_bits(dtype: str, places: str) -> None:
    update = fastps.Adam(lr=0.01, weight_decay=0.1)
    found, expected = run(update, "bsp,ema=0.9", dtype, places), run(update, "bsp,ema=0.9", dtype, "cpu")
    for weights in found[0]:
        for name, values in weights.items():
            assert np.isfinite(values).all() and np.array_equal(values, expected[0][0][name]), name
    assert found[1:] == expected[1:]
    assert [count for count, _ in found[2]] == [2, 4], "counted in each shard, and not for what a push has not"


@pytest.mark.slow
@pytest.mark.parametrize(("sync", "places"), [("asp", "two"), ("dssp:1,3", "one"), ("softsync:2", "one"), ("backup:1", "two")])
def test_whatever_the_discipline_no_such_push_is_folded_and_each_is_counted(sync: str, places: str) -> None:
    amount = 1 / 1024
    found, counted, rejected = run(fastps.SGD(lr=1.0), sync, "float32", places, amount)
    first = first_weights()
    for name, values in found[0].items():
        moved = np.round((first[name] - values) / amount, 2)
        assert np.isfinite(values).all() and np.unique(moved).size == 1, name
        assert np.array_equal(values, found[1][name]), name
    if sync in ("asp", "dssp:1,3"):
        cpu = run(fastps.SGD(lr=1.0), sync, "float32", "cpu", amount)
        assert (counted, rejected) == cpu[1:]
        for name, values in found[0].items():
            np.testing.assert_allclose(values, cpu[0][0][name], atol=1e-6)


@pytest.mark.parametrize("places", ["one", "cpu"])
def test_with_raise_every_worker_ends_with_the_name_of_the_parameter(places: str) -> None:
    outcomes, _, _ = run(fastps.SGD(lr=0.1), "bsp", "float32", places, nonfinite="raise")
    for worker, text in outcomes:
        assert worker == 1 and "worker 1's push of step 1 was rejected" in text and "parameter 'a'" in text


def test_with_allow_nothing_is_looked_for() -> None:
    weights, _, rejected = run(fastps.SGD(lr=0.1), "bsp", "float32", "one", nonfinite="allow")
    assert not np.isfinite(weights[0]["a"]).all() and [count for count, _ in rejected] == [0, 0]


@pytest.mark.parametrize("places", ["one", "two"])
def test_weights_that_overflow_from_finite_gradients_end_the_job_by_name(places: str) -> None:
    """A worker that has folded none may have left before another finds it at its end."""
    outcomes, _, _ = run(fastps.SGD(lr=1e38), "asp", "float32", places, amount=-100.0)
    texts = [outcome[1] for outcome in outcomes if isinstance(outcome, tuple)]
    assert any("expected finite weights on the device gpu" in text for text in texts), outcomes
    assert all("expected finite weights" in text or "worker" in text for text in texts)


# -- the check itself --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_parameter_with_such_a_value_is_named_and_no_other(device: HostDevice, dtype: str) -> None:
    layout = layout_of(fastps.SGD(lr=0.1), "bsp", dtype, "reject", "cpu")
    check, stream = FiniteCheck(device, layout), device.compute_stream()
    form = "float32" if dtype == "float32" else "uint16"
    size = 4 if dtype == "float32" else 2
    slot = device.allocate(size * layout.buffer_floats)
    view = device.view(slot, layout.buffer_floats, form)
    largest = np.array([np.finfo("float16").max if dtype == "float16" else 3e38], np.float32)
    for index, parameter in enumerate(layout.parameters):
        places = {0, parameter.length - 1, parameter.length // 2, min(parameter.length - 1, 7)}
        for at in places:
            for value, is_bad in ((INF, True), (-INF, True), (NAN, True), (largest[0], False), (1e-7, False)):
                raw = narrowed(np.array([value], np.float32), dtype)
                view[:] = narrowed(-largest, dtype)  # all others are as large as they can be
                view[parameter.offset + at] = raw.view(form)[0] if dtype != "float32" else raw[0]
                check.queue(slot, stream)
                assert np.flatnonzero(check.found()).tolist() == [index] * is_bad, (parameter.name, at, value)
        padding = parameter.offset + parameter.length
        if padding < layout.buffer_floats and padding % 16:
            view[padding] = narrowed(np.array([NAN], np.float32), dtype).view(form)[0]
            check.queue(slot, stream)
            assert not check.found().any(), "padding is no parameter"


def test_a_check_that_the_host_did_not_wait_for_is_waited_for_by_the_next(device: HostDevice) -> None:
    layout = layout_of(fastps.SGD(lr=0.1), "bsp", "float32", "reject", "cpu")
    slow = HostDevice("slow", 0.02, computes_at_once=False)
    try:
        slots = [slow.allocate(4 * layout.buffer_floats) for _ in range(2)]
        slow.view(slots[0], 1)[0] = NAN
        check, stream = FiniteCheck(slow, layout), slow.compute_stream()
        check.queue(slots[0], stream)
        check.queue(slots[1], stream)
        slow.synchronize(stream)
        assert not check.found().any()
    finally:
        slow.shut()
