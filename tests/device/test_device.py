"""Devices between real processes, with the device of the host's memory: handles, order, deaths, and whole jobs on them.

The device's streams are slowed down here, so that whatever is not ordered by an event comes too early and is seen.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fastps
from fastps.device.cuda import CudaDevice
from fastps.device.interface import DeviceError, DeviceLostError
from fastps.device.plan import handle_table_bytes
from fastps.device.store import DeviceStore
from fastps.job.layout import Layout, place
from fastps.job.specs import parse_policy
from fastps.job.update_rules import Update
from fastps.lab.gpus.cuda_on_host import Faults, HostDevice
from tests.device.conftest import DELAY_S, Pipe
from tests.support import processes

AMOUNT = np.float32(1 / 1024)


def queue_for_a_minute(there: Pipe, back: Pipe) -> processes.Child:
    """Another process, which sends the event of work that takes a minute, and lives until it is told to end."""

    def other() -> None:
        mine = HostDevice("gpu 0", 60.0)
        event, stream = mine.make_event(), mine.make_stream()
        mine.copy(mine.allocate(64), mine.host_memory(64).ctypes.data, 64, stream)
        mine.record(event, stream)
        back.send(mine.export_event(event))
        there.receive(1)

    return processes.start(other)


def test_memory_that_is_opened_by_its_handle_is_the_same_memory(device: HostDevice, pipes: list[Pipe]) -> None:
    def work(mine: HostDevice, address: int, back: Pipe) -> Any:
        found = mine.view(address, 16).tolist()
        mine.view(address, 16)[:] = 7.0
        return found

    found, address = opened_elsewhere(device, pipes, work, "host")
    assert found == list(range(16)) and device.view(address, 16).tolist() == [7.0] * 16


def test_a_handle_of_an_older_generation_is_refused_although_its_numbers_are_in_use_again(device: HostDevice) -> None:
    address = device.allocate(64)
    stale = device.export(address)
    device.close(address)
    again = device.allocate(64)
    assert device.export(again)[:24] == stale[:24], "the same process, descriptor and size, or this test shows nothing"
    with pytest.raises(DeviceLostError, match="has freed that memory"):
        device.open(stale)


def test_a_handle_of_a_process_that_has_ended_is_refused(device: HostDevice) -> None:
    def other() -> bytes:
        mine = HostDevice("host")
        return mine.export(mine.allocate(64))

    child = processes.start(other)
    processes.finish([child], 20)
    with pytest.raises(DeviceLostError, match="it has ended"):
        device.open(child.outcome)


@pytest.mark.parametrize("waits", [True, False])
def test_work_that_waits_for_another_processes_event_comes_after_it(device: HostDevice, pipes: list[Pipe], waits: bool) -> None:
    """The other process fills the memory slowly; whoever copies it after the event has all of it, and without one has not."""
    there, back = pipes

    def other() -> None:
        mine = HostDevice("host", 20 * DELAY_S)
        address, event = mine.open(there.receive()), mine.make_event()
        stream, source = mine.make_stream(), mine.host_memory(64)
        source[:] = 1
        mine.copy(address, source.ctypes.data, 64, stream)
        mine.record(event, stream)
        back.send(mine.export_event(event))
        there.receive(1)
        mine.synchronize(stream)
        mine.shut()

    address, found = device.allocate(64), device.host_memory(64)
    child = processes.start(other)
    there.send(device.export(address))
    event, stream = device.open_event(back.receive()), device.make_stream()
    if waits:
        device.wait(event, stream)
    device.copy(found.ctypes.data, address, 64, stream)
    device.synchronize(stream)
    assert found.tolist() == [int(waits)] * 64
    there.send(b"e")
    processes.results([child], 20)


# -- faults -----------------------------------------------------------------------------------------------------------------


def opened_elsewhere(
    device: HostDevice, pipes: list[Pipe], work: Callable[[HostDevice, int, Pipe], Any], name: str = "other", **options: Any
) -> tuple[Any, int]:
    """Let another process open the numbers 0 to 15 on this device and work on them.

    Returns what it found, or its error's text, and where the numbers are.
    """
    there, back = pipes

    def other() -> Any:
        mine = HostDevice(name, **options)
        try:
            return work(mine, mine.open(there.receive()), back)
        except DeviceError as error:
            return str(error)
        finally:
            mine.shut()

    address = device.allocate(64)
    device.view(address, 16)[:] = range(16)
    child = processes.start(other)
    there.send(device.export(address))
    if work is free_meanwhile:
        back.receive(1)
        device.close(address)
        there.send(b"f")
    processes.finish([child], 20)
    return child.outcome, address


def free_meanwhile(device: HostDevice, address: int, back: Pipe) -> Any:
    """See freed memory through a view that was there before."""
    view = device.view(address, 16)
    before = view.tolist()
    back.send(b"o")
    while not np.isnan(view).any():
        time.sleep(0.001)
    return before, bool(np.isnan(view).all())


def test_memory_that_its_owner_frees_is_poisoned_for_all(device: HostDevice, pipes: list[Pipe]) -> None:
    found, _ = opened_elsewhere(device, pipes, free_meanwhile)
    assert found == (list(range(16)), True)


def test_a_device_without_peer_access_opens_no_memory(device: HostDevice, pipes: list[Pipe]) -> None:
    found, _ = opened_elsewhere(device, pipes, lambda *_: "opened", faults=Faults(unreachable=frozenset({"host"})))
    assert "expected peer access from other to host, found none" in found


def test_memory_that_is_closed_twice_and_events_of_others_are_refused(device: HostDevice, pipes: list[Pipe]) -> None:
    there, _ = pipes

    def other() -> list[str]:
        mine, found = HostDevice("other"), []
        event = mine.open_event(there.receive())
        address = mine.allocate(64)
        mine.close(address)
        for call in (lambda: mine.close(address), lambda: mine.record(event, mine.compute_stream())):
            with pytest.raises(DeviceError) as caught:
                call()
            found.append(str(caught.value))
        mine.shut()
        return found

    child = processes.start(other)
    there.send(device.export_event(device.make_event()))
    processes.finish([child], 20)
    assert "which is not open" in child.outcome[0] and "another process's" in child.outcome[1]


def test_a_device_without_peer_access_opens_no_event(device: HostDevice, pipes: list[Pipe]) -> None:
    """The errors of cudaIpcOpenEventHandle include cudaErrorPeerAccessUnsupported."""

    def other() -> None:
        HostDevice("other", faults=Faults(unreachable=frozenset({"host"}))).open_event(pipes[0].receive())

    child = processes.start(other)
    pipes[0].send(device.export_event(device.make_event()))
    processes.finish([child], 20)
    assert child.outcome[0] == "DeviceLostError" and "expected peer access from other to host, found none" in child.outcome[1]


def test_memory_does_not_open_where_it_was_made(device: HostDevice) -> None:
    with pytest.raises(DeviceError, match="that this process has exported"):
        device.open(device.export(device.allocate(64)))


def test_work_on_memory_that_is_unmapped_when_it_runs_is_an_error(device: HostDevice) -> None:
    address, stream = device.allocate(64), device.make_stream()
    view = device.view(address, 16)
    device.copy(device.host_memory(64).ctypes.data, address, 64, stream)
    device.close(address)
    assert np.isnan(view).all()
    with pytest.raises(DeviceError, match="they were freed, unmapped, or never opened"):
        device.synchronize(stream)


def test_completed_events_are_seen_late() -> None:
    device = HostDevice("host", faults=Faults(late_s=0.2, seed=3))
    event, stream = device.make_event(), device.make_stream()
    device.record(event, stream)
    device.synchronize(stream)
    began = time.monotonic()
    device.synchronize_event(event)
    assert time.monotonic() - began > 0.01, "the draw of this seed is greater"
    device.shut()


# -- whole jobs ------------------------------------------------------------------------------------------------------------

SHAPES = {"a": (33, 7), "b": (5,), "c": (4097,), "d": (1,), "e": (64, 3), "f": (2, 2), "g": (300,), "h": (17,)}


def first_weights() -> dict[str, Any]:
    random = np.random.default_rng(1)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(stride) // 4 for stride in np.zeros(shape, np.float32).strides)


ROWS = [(name, shape, contiguous(shape), 0) for name, shape in SHAPES.items()]


def store_of(layout: Layout, update: Update, weights: Any = None, kind: Any = DeviceStore, **options: Any) -> DeviceStore:
    """A job of this layout, whose weights are `first_weights` if no others are given, an array or number for each parameter."""

    def write(views: list[Any]) -> None:
        for view, values in zip(views, weights or first_weights().values(), strict=True):
            view[:] = np.reshape(values, -1)

    store = kind.create_for(layout, write, [update.hyper], **options)
    assert isinstance(store, kind)
    found: DeviceStore = store
    return found


def layout_of(update: Update, sync: str, workers: int, **options: Any) -> Layout:
    """The layout of a job with these weights in host memory."""
    policy = parse_policy(sync)
    return Layout(place(ROWS, policy.shards), 1, update.rule, policy, workers, **options)


def homed(layout: Layout, owner_lanes: tuple[int, ...]) -> Layout:
    """This layout with its shards on the devices of the given workers."""
    return replace(layout, owner_lanes=owner_lanes, extra_bytes=handle_table_bytes(len(layout.shards)))


def make_store(update: Update, sync: str, workers: int, owner_lanes: tuple[int, ...]) -> DeviceStore:
    """A job whose shards lie on the devices of the given workers; its weights are `first_weights`."""
    return store_of(homed(layout_of(update, sync, workers), owner_lanes), update)


def gradient(rank: int, step: int) -> dict[str, Any]:
    random = np.random.default_rng([rank, step])
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def constant(rank: int, step: int) -> dict[str, Any]:
    return {name: np.full(shape, AMOUNT) for name, shape in SHAPES.items()}


def compute(store: DeviceStore, device: HostDevice, rank: int, slot: int, gradients: dict[str, Any]) -> None:
    """Queue what writes gradients into a slot. It is overwritten twice: a fold that comes too early sees zeros."""
    for index, parameter in enumerate(store.layout.parameters):
        address = store.arena_on_devices().gradient_address(rank, slot, index)
        for values in (0.0, gradients[parameter.name].reshape(-1)):
            source = device.host_memory(4 * parameter.length)
            source.view(np.float32)[:] = values
            device.copy(address, source.ctypes.data, 4 * parameter.length, device.compute_stream())


def go_on(worker: fastps.Worker, **options: Any) -> None:
    """Push what is in the slot, and wait for what follows."""
    worker.push(worker.store.hypers, **options)
    worker.advance()
    worker.pull()


def steps_of(store: fastps.Store, rank: int, steps: int, make: Callable[[int, int], dict[str, Any]]) -> tuple[Any, Any]:
    """Take steps; returns the final weights, and how many folds this worker queued if it has a device."""
    with store.attach(rank) as worker:
        for step in range(steps):
            worker.step(make(rank, step))
        worker.wait_for_others()
        weights = {name: np.array(values) for name, values in worker.weights.items()}
        folds = store.devices.folds if isinstance(store, DeviceStore) and store.devices is not None else None
        return weights, folds


def in_workers(
    store: Any, workers: int, work: Callable[[int], Any], device_of: Callable[[int], CudaDevice] | None = None
) -> list[Any]:
    """What `work(rank)` returns in each worker, which has its device, or is on the CPU."""

    def in_child(rank: int) -> Any:
        if device_of is not None:
            store.use(device_of(rank))
        with store:
            return work(rank)

    with store:
        return processes.results(processes.start_each(in_child, workers), 60)


def slow_devices(identities: str) -> Callable[[int], CudaDevice]:
    return lambda rank: HostDevice(identities[rank], DELAY_S)


def on_cpu(update: Update, sync: str, workers: int, steps: int, steps_of: Callable[..., Any] = steps_of) -> Any:
    """The weights that workers on the CPU end with."""
    store = fastps.Store.create(first_weights(), update, sync=sync, workers=workers)
    return in_workers(store, workers, lambda rank: steps_of(store, rank, steps, gradient))[0][0]


def endless(store: DeviceStore, rank: int, device: CudaDevice) -> None:
    """Take steps until an error comes."""
    with store.use(device), store.attach(rank) as worker:
        for step in range(1_000_000):
            worker.step(gradient(rank, step))


def assert_equal(found: list[Any], expected: dict[str, Any]) -> None:
    for weights, _ in found:
        for name, values in weights.items():
            assert np.array_equal(values, expected[name]), name


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("update", "sync", "owner_lanes"), [
    (fastps.SGD(lr=0.1, momentum=0.9, nesterov=True), "bsp", (0,)),
    (fastps.Adam(lr=0.01, weight_decay=0.1), "bsp,ema=0.9", (1,)),
    (fastps.RMSProp(momentum=0.9, centered=True), "psp:2,0.5,shards=3", (0, 1, 1)),
    (fastps.Adagrad(lr_decay=0.1), "bsp,clip=0.5", (0,)),
    (fastps.Adam(lr=0.01, amsgrad=True), "bsp", (0,)),
    (fastps.NAdam(lr=0.01, weight_decay=0.1, decoupled=True), "bsp,ema=0.9", (0,)),
    (fastps.RAdam(lr=0.01, betas=(0.9, 0.8)), "bsp", (0,)),
    (fastps.Adamax(lr=0.01), "bsp", (0,)),
    (fastps.Adadelta(lr=0.5), "bsp", (0,)),
], ids=[
    "nesterov", "adam-average", "two-devices", "adagrad", "amsgrad", "nadam-average", "radam", "adamax", "adadelta",
])  # fmt: skip
def test_a_job_on_devices_has_the_bits_of_the_same_job_on_the_cpu(
    update: Update, sync: str, owner_lanes: tuple[int, ...]
) -> None:
    devices = slow_devices("12" if len(set(owner_lanes)) > 1 else "11")
    store = make_store(update, sync, 2, owner_lanes)
    found = in_workers(store, 2, lambda rank: steps_of(store, rank, 12, gradient), devices)
    assert_equal(found, on_cpu(update, sync, 2, 12))
    assert sum(folds for _, folds in found) >= 12 * len(owner_lanes)
    if len(set(owner_lanes)) > 1:
        assert all(folds >= 12 for _, folds in found), "each device's own worker folds its shards"


@pytest.mark.parametrize(("sync", "identities"), [("asp", "sss"), ("dssp:1,4", "sss"), ("ssp:2", "soo"), ("asp", "soo")])
@pytest.mark.sampled(2)
def test_every_push_is_folded_exactly_once_on_a_device(sync: str, identities: str) -> None:
    """`identities`: workers of the shard's own device (s) take the turns; those of another (o) push and are answered."""
    steps, expected = 20, first_weights()
    store = make_store(fastps.SGD(lr=1.0), sync, 3, (0,))
    found = in_workers(store, 3, lambda rank: steps_of(store, rank, steps, constant), slow_devices(identities))
    for values in expected.values():
        for _ in range(3 * steps):
            values -= AMOUNT
    assert_equal(found, expected)
    assert all(folds == 0 for (_, folds), identity in zip(found, identities, strict=True) if identity == "o")


def test_folds_wait_for_gradients_that_are_still_computed_and_for_weights_that_are_still_read() -> None:
    """Here the computing is queued, too, and slow: the host runs ahead, and every step still reads its own version."""
    steps = 15
    store = make_store(fastps.SGD(lr=1.0), "bsp", 2, (0,))

    def work(rank: int) -> list[int]:
        device = HostDevice("one", DELAY_S * (rank == 0), computes_at_once=False)  # one is slow, whoever folds
        with store.use(device).attach(rank) as worker:
            size = 4 * SHAPES["c"][0]
            read = [device.host_memory(size) for _ in range(steps)]
            stream = device.compute_stream()
            for step in range(steps):
                buffer = worker.buffers[0]
                compute(store, device, rank, worker.slot, constant(rank, step))
                device.copy(read[step].ctypes.data, store.arena_on_devices().weights_address(buffer, 2), size, stream)
                go_on(worker)
            device.synchronize(stream)
            expected, wrong = first_weights()["c"], []
            for step, values in enumerate(read):
                wrong += [] if np.array_equal(values.view(np.float32), expected) else [step]
                expected = expected - AMOUNT
        store.close()
        return wrong

    with store:
        wrong = processes.results(processes.start_each(work, 2), 60)
    assert wrong == [[], []], "the steps whose weights were not those of their version"


@pytest.mark.parametrize("victim", [0, 1], ids=["owner", "other"])
def test_a_killed_worker_is_named_within_two_seconds_and_the_others_end(victim: int) -> None:
    with make_store(fastps.SGD(lr=0.01), "bsp", 3, (0,)) as store:
        # Not computed at once, else a read of the dead one's work hangs the host.
        work = lambda rank: endless(store, rank, HostDevice("one", DELAY_S, computes_at_once=False))  # noqa: E731
        children = processes.start_each(work, 3)
        processes.wait_until(lambda: store.version >= 5)
        processes.kill_one(children, victim)


def test_what_a_device_cannot_do_is_refused_by_name() -> None:
    store = make_store(fastps.SGD(lr=0.1), "adv*:1", 4, (0,))
    with store, pytest.raises(fastps.UnsupportedError, match="in the background"):
        store.use(HostDevice("one")).attach(0)


def test_workers_that_place_shards_differently_are_told_so() -> None:
    update = fastps.SGD(lr=0.1)
    with make_store(update, "bsp", 2, (0,)) as store:
        other = replace(store.layout, owner_lanes=(1,))
        with pytest.raises(fastps.LayoutError, match="owner lanes"):
            fastps.Store.connect(store.job, other, [update.hyper])
