"""Devices that are out of memory or lost: errors by name, with the GPU and the cause, in whole jobs and call by call."""

import os
import signal
import time
from functools import partial
from typing import Any

import pytest

import fastps
from fastps.device.cuda import CudaDevice
from fastps.device.cuda_errors import LOST, named
from fastps.device.interface import DeviceError, DeviceFailedError, DeviceMemoryError
from fastps.kernels.shm.arena import LANE_DEAD, LANE_FAILED
from fastps.lab.gpus.cuda_on_host import Faults, HostCuda, HostCudaError, HostDevice, host_devices
from tests.device import test_device as jobs
from tests.device import test_server_of_several as served
from tests.device.conftest import Pipe
from tests.support import processes


class StatusError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError {status}")
        self.status = status


@pytest.mark.parametrize("status", list(LOST))
def test_each_code_of_a_lost_device_is_named_with_the_gpu_and_the_call(status: int) -> None:
    found = named(StatusError(status), "GPU 3", "memcpyAsync")
    assert isinstance(found, DeviceFailedError)
    assert f"GPU 3 to do its work, found it lost to process {os.getpid()}" in str(found)
    assert f"memcpyAsync: {LOST[status]}, code {status}" in str(found) and "Xid" in str(found)


@pytest.mark.parametrize("status", [1, 2, 101, 400])
def test_other_codes_are_device_errors_that_name_the_call(status: int) -> None:
    found = named(StatusError(status), "GPU 3", "eventRecord")
    assert type(found) is DeviceError and str(found) == f"eventRecord on GPU 3 failed: cudaError {status}"


def test_a_gpu_without_room_says_what_was_asked_and_what_is_free() -> None:
    device = CudaDevice(0, HostCuda(["0000:17:00.0"], Faults(memory=3 << 21)))
    device.allocate(1 << 21)
    with pytest.raises(DeviceMemoryError) as caught:
        device.allocate(5 << 21)
    assert "expected 10,485,760 bytes of memory on GPU 0 (0000:17:00.0), found 4,194,304 free of 6,291,456" in str(caught.value)
    assert "FASTPS_PLACEMENT=host" in str(caught.value)
    device.allocate(2 << 21)
    device.shut()


@pytest.mark.parametrize("status", [46, 700, 719])
def test_every_call_after_a_lost_device_names_it(status: int) -> None:
    device = CudaDevice(0, HostCuda(["gpu 0"], Faults(lost_at=6, status=status)))
    event, address = device.make_event(), device.allocate(64)
    stream, source = device.make_stream(), device.host_memory(64).ctypes.data

    def work() -> None:
        for _ in range(9):
            device.copy(address, source, 64, stream)
            device.record(event, stream)

    for call in (work, partial(device.allocate, 64), lambda: device.wait(event, stream)):
        with pytest.raises(DeviceFailedError, match=rf"GPU 0 \(gpu 0\).*code {status}"):
            call()
    device.shut(waits=False)
    device._cuda.runtime.end()


def test_failed_work_is_found_without_a_wait_for_it() -> None:
    device = CudaDevice(0, HostCuda(["gpu 0"], Faults(status=214)))
    stream = device.make_stream()
    device.check(stream)
    device._cuda.runtime.streams[stream].failure = HostCudaError(214, "it failed")
    with pytest.raises(DeviceFailedError, match=r"streamQuery: an ECC error that could not be corrected, code 214"):
        device.check(stream)
    device.shut(waits=False)
    device._cuda.runtime.end()


def test_peer_access_that_is_enabled_already_is_no_error_and_another_refusal_is() -> None:
    device, status = CudaDevice(0, HostCuda(["gpu 0", "gpu 1"])), 704

    def refuse(peer: int) -> None:
        raise StatusError(status)

    device._cuda.runtime.deviceEnablePeerAccess = refuse  # type: ignore[attr-defined]
    other = CudaDevice(1, device._cuda)
    device.borrow(other)
    status, device._peers = 217, set()
    with pytest.raises(DeviceError, match="expected peer access from GPU 0 to GPU 1, found that CUDA refuses"):
        device.borrow(other)
    device.shut()
    other.shut()


def test_memory_that_torch_keeps_is_given_back_before_a_device_is_called_full() -> None:
    device = CudaDevice(0, HostCuda(["gpu 0"], Faults(memory=4 << 21, cached=3 << 21)))
    address = device.allocate(2 << 21)
    with pytest.raises(DeviceMemoryError, match="found 4,194,304 free of 8,388,608"):
        device.allocate(3 << 21)
    device.close(address)
    device.shut()


def test_a_wait_for_work_that_has_failed_ends(device: HostDevice) -> None:
    """Its record never comes. Another process that waits for it is told nothing, as in CUDA."""
    stream, event = device.make_stream(), device.make_event()
    device.copy(1, device.host_memory(64).ctypes.data, 64, stream)
    device.record(event, stream)
    with pytest.raises(DeviceError, match="expected work on memory that is open"):
        device.synchronize_event(event)


def test_a_device_shuts_though_the_work_that_it_waits_for_never_comes(pipes: list[Pipe]) -> None:
    """Two processes whose streams wait for each other must both be able to end."""
    child = jobs.queue_for_a_minute(*pipes)
    device = HostDevice("host")
    stream = device.make_stream()
    device.wait(device.open_event(pipes[1].receive()), stream)
    time.sleep(0.05)
    began = time.monotonic()
    device.shut()
    assert time.monotonic() - began < 5
    os.kill(child.process_id, signal.SIGKILL)
    processes.finish([child], 20)


# -- whole jobs ------------------------------------------------------------------------------------------------------------


def on_host(faults: Faults) -> Any:
    return HostDevice("gpu 7", 0.001, faults=faults, computes_at_once=False)


def on_cuda(faults: Faults) -> Any:
    return CudaDevice(0, HostCuda(["gpu 7"], faults, computes_at_once=False))


CASES = [
    (on_host, Faults(lost_at=150), "DeviceFailedError", "GPU 0 (gpu 7) to do its work"),
    (on_host, Faults(memory=1000), "DeviceMemoryError", "bytes of memory on GPU 0 (gpu 7), found 1,000 free of 1,000"),
    pytest.param(on_cuda, Faults(lost_at=300), "DeviceFailedError", "GPU 0 (gpu 7) to do its work", marks=pytest.mark.slow),
    pytest.param(on_cuda, Faults(memory=1 << 20), "DeviceMemoryError", "found 1,048,576 free", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("make", "faults", "kind", "cause"), CASES)
def test_a_device_that_fails_is_named_by_its_worker_and_by_the_others(make: Any, faults: Faults, kind: str, cause: str) -> None:
    with jobs.make_store(fastps.SGD(lr=0.01), "bsp", 3, (0,)) as store:
        children = processes.start_each(lambda rank: jobs.endless(store, rank, make(faults if rank == 1 else Faults())), 3)
        processes.finish(children, 30)
    assert [child.exit_code for child in children] == [1, 1, 1]
    assert children[1].outcome[0] == kind and children[1].outcome[1].startswith("worker 1: ")
    assert cause in children[1].outcome[1]
    for rank in (0, 2):
        assert children[rank].outcome[0] == "WorkerDiedError", children[rank].outcome
        assert "worker 1 (process" in children[rank].outcome[1] and f"failed: {kind}: " in children[rank].outcome[1]
        assert cause in children[rank].outcome[1]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "operation"), [(on_host, 40), (on_host, 83), (on_host, 151), (on_cuda, 150)])
def test_a_worker_that_dies_between_two_operations_of_its_device_is_named(make: Any, operation: int) -> None:
    with jobs.make_store(fastps.SGD(lr=0.01), "bsp", 3, (0,)) as store:
        faults = [Faults(), Faults(dies_at=operation), Faults()]
        children = processes.start_each(lambda rank: jobs.endless(store, rank, make(faults[rank])), 3)
        processes.finish(children, 60)
    assert children[1].exit_code == -signal.SIGKILL
    for child in (children[0], children[2]):
        assert child.outcome[0] == "WorkerDiedError" and "worker 1" in child.outcome[1], child.outcome


@pytest.mark.slow
@pytest.mark.parametrize("lost_at", [45, 77])
def test_with_a_server_the_others_go_on_without_a_worker_whose_device_is_lost(lost_at: int) -> None:
    with served.make_store(fastps.SGD(lr=1.0), "asp") as store:

        def work(rank: int) -> Any:
            faults = Faults(seed=rank, delay_s=0.001, lost_at=lost_at * (rank == 1))
            with store.use(HostDevice(served.GPUS[rank], faults=faults)), store.attach(rank) as worker:
                worker.wait_for_start()
                for step in range(served.STEPS):
                    worker.step(jobs.constant(rank, step))
                worker.wait_for_others()
                return {name: values.copy() for name, values in worker.weights.items()}

        children = processes.start_each(work, 4)
        processes.finish(children, 40)
        assert [child.exit_code for child in children] == [0, 1, 0, 0], [child.outcome for child in children]
        assert children[1].outcome[0] == "DeviceFailedError" and "worker 1: expected GPU 0 (gpu 1)" in children[1].outcome[1]
        # It stays FAILED where all others have left before its process ends.
        assert store.arena.lane_state(1) in (LANE_FAILED, LANE_DEAD)
        pushed = min(served.STEPS, store.arena.counters(1)["posted"])  # the message after all pushes says that it leaves
        moved = (jobs.first_weights()["d"] - children[0].outcome["d"]) / jobs.AMOUNT
        assert moved.round(2)[0] == 3 * served.STEPS + pushed


def _lost(lost_at: int) -> list[HostDevice]:
    return host_devices(["gpu 0", "gpu 1"], 0.0005, Faults(lost_at=lost_at))


@pytest.mark.slow
@pytest.mark.parametrize("lost_at", range(52, 100, 9))
def test_a_server_whose_device_is_lost_is_named_by_every_worker(lost_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the server has queued its last fold: all workers wait for it, and none posts anything."""
    monkeypatch.setattr(served, "partial", lambda *_: partial(_lost, lost_at))
    with served.make_store(fastps.SGD(lr=1.0), "bsp") as store:

        def work(rank: int) -> None:
            device = HostDevice(served.GPUS[rank], 0.0005, computes_at_once=False)
            with store.use(device), store.attach(rank) as worker:
                for _ in range(1_000_000):
                    jobs.go_on(worker, samples=8)

        children = processes.start_each(work, 4)
        processes.finish(children, 10)
    assert [child.exit_code for child in children] == [1] * 4, [child.outcome for child in children]
    texts = [f"{child.outcome[0]}: {child.outcome[1]}" for child in children]
    assert all(
        "the server (process" in text and "DeviceFailedError: expected GPU 0 (gpu 0) to do its work" in text for text in texts
    ), texts


def _small(memory: int) -> list[HostDevice]:
    return [HostDevice("gpu 0", faults=Faults(memory=memory))]


@pytest.mark.slow
def test_a_server_without_room_is_named_where_the_job_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "host_devices", lambda *_: None)
    monkeypatch.setattr(served, "partial", lambda *_: partial(_small, 1000))
    with pytest.raises(
        fastps.AttachError, match=r"the server: expected .* bytes of memory on GPU 0 \(gpu 0\), found 1,000 free"
    ):
        served.make_store(fastps.SGD(lr=1.0), "asp", gpus=("gpu 0",) * 2)
    assert host_devices(["a"])[0].identity == "a"
