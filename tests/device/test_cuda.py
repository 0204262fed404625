"""The module with every CUDA call, in whole jobs of processes over a simulated CUDA runtime: its calls keep CUDA's rules."""

import os
import signal
from typing import Any

import numpy as np
import pytest

import fastps
from fastps.device.cuda import CudaDevice
from fastps.device.interface import DeviceError
from fastps.lab.gpus.cuda_calls import RecordedCuda, merged
from fastps.lab.gpus.cuda_on_host import Faults, HostCuda, HostDevice
from fastps.lab.gpus.cuda_rules import CudaRuleError, check_record
from tests.device import test_device as jobs
from tests.support import processes


def recorded(store: Any, workers: int, steps: int, gpus: list[list[str]]) -> Any:
    """Run a job; returns the weights of each worker, and the calls of each process."""

    def work(rank: int) -> Any:
        api = RecordedCuda(HostCuda(gpus[rank]))
        store.use(CudaDevice(0, api))
        try:
            weights, _ = jobs.steps_of(store, rank, steps, jobs.gradient)
        finally:
            store.close()
        return weights, api.calls

    with store:
        children = [processes.start(lambda rank=rank: work(rank)) for rank in range(workers)]
        processes.finish(children, 60)
    assert [child.exit_code for child in children] == [0] * workers, [child.outcome for child in children]
    return [child.outcome[0] for child in children], [child.outcome[1] for child in children]


def on_cpu(update: Any, sync: str, workers: int, steps: int) -> Any:
    return jobs.run_workers(fastps.Store.create(jobs.first_weights(), update, sync=sync, workers=workers), workers, steps, [])[
        0
    ][0]


@pytest.mark.parametrize(("sync", "gpus"), [("bsp", "00"), ("bsp,ema=0.9,shards=2", "01")])
def test_a_job_keeps_the_rules_of_cuda_and_has_the_bits_of_the_cpu(sync: str, gpus: str) -> None:
    update = fastps.Adam(lr=0.01)
    owners = (0,) if gpus == "00" else (0, 1)
    seen = [[f"gpu {gpu}", *(f"gpu {other}" for other in "01" if other != gpu)] for gpu in gpus]
    weights, calls = recorded(jobs.make_store(update, sync, 2, owners), 2, 12, seen)
    expected = on_cpu(update, sync, 2, 12)
    for found in weights:
        assert all(np.array_equal(found[name], values) for name, values in expected.items())
    peers = [frozenset(("gpu 0", "gpu 1"))]
    whole = merged(*calls)
    assert check_record(whole, peers, {call.process for call in whole}) == len(whole) > 300
    names = {call.name for call in whole}
    assert names >= {
        "ipcOpenMemHandle",
        "ipcCloseMemHandle",
        "streamWaitEvent",
        "eventRecord",
        "launch_fold",
        "free",
        "graphLaunch",
    }
    folds = [call for call in whole if call.name == "graphLaunch"]
    assert len(folds) == (12 - 4) * len(set(owners)) if gpus == "01" else len(folds) > 0, "from each entry's second fold on"
    for name in ("setDevice", "ipcGetMemHandle", "eventRecord", "ipcCloseMemHandle"):
        with pytest.raises(CudaRuleError):
            check_record([call for call in whole if call.name != name], peers)


def test_a_gpu_that_is_not_there_is_named() -> None:
    with pytest.raises(DeviceError, match="expected a GPU of 0 to 1, found 2"):
        CudaDevice(2, HostCuda(["gpu 0", "gpu 1"]))


def test_which_gpus_are_reached_is_what_cuda_says() -> None:
    device = CudaDevice(0, HostCuda(["gpu 0", "gpu 1"], Faults(unreachable=frozenset({"gpu 1"}))))
    assert not device.reaches_all and device.can_reach("gpu 0")
    assert not device.can_reach("gpu 1") and not device.can_reach("unseen")
    device.shut()


def test_host_memory_is_shared_between_processes_and_registered_once() -> None:
    there, back = jobs.Pipe(), jobs.Pipe()

    def other() -> Any:
        api = RecordedCuda(HostCuda(["gpu 1"]))
        device = CudaDevice(0, api)
        address = device.open_host(there.receive())
        stream, source = device.make_stream(), device.host_memory(64)
        source[:] = 9
        device.copy(address, source.ctypes.data, 64, stream)
        device.synchronize(stream)
        back.send(b"w")
        device.shut()
        return api.calls

    api = RecordedCuda(HostCuda(["gpu 0"]))
    device = CudaDevice(0, api)
    address, found, stream = device.allocate_host(64), device.host_memory(64), device.make_stream()
    child = processes.start(other)
    there.send(device.export_host(address))
    back.receive(1)
    device.copy(found.ctypes.data, address, 64, stream)
    device.synchronize(stream)
    assert found.tolist() == [9] * 64
    processes.finish([child], 20)
    assert child.exit_code == 0, child.outcome
    device.shut()
    for pipe in (there, back):
        pipe.close()
    assert check_record(merged(api.calls, child.outcome)) > 10


def test_a_device_is_shut_although_its_work_waited_for_a_process_that_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    """The death is what the worker reports; its own device must be released all the same."""
    there, back = jobs.Pipe(), jobs.Pipe()

    def other() -> None:
        mine = HostDevice("gpu 0", 60.0)
        event, stream = mine.make_event(), mine.make_stream()
        mine.copy(mine.allocate(64), mine.host_memory(64).ctypes.data, 64, stream)
        mine.record(event, stream)
        back.send(mine.export_event(event))
        there.receive(1)

    child = processes.start(other)
    device = CudaDevice(0, HostCuda(["gpu 0"]))
    event = device.open_event(back.receive())
    device.wait(event, device.make_stream())
    os.kill(child.process_id, signal.SIGKILL)
    processes.finish([child], 20)
    device.shut()
    device.close_event(event)  # which else the process's end does
    assert "had failed when the device was shut: expected a process to finish its work" in caplog.text
    for pipe in (there, back):
        pipe.close()


@pytest.mark.slow
def test_a_worker_that_dies_is_named_by_those_on_the_simulated_runtime() -> None:
    store = jobs.make_store(fastps.SGD(lr=0.01), "bsp", 2, (0,))

    def work(rank: int) -> str:
        store.use(CudaDevice(0, HostCuda(["gpu 0"], Faults(dies_at=150 * rank))))
        try:
            with store.attach(rank) as worker:
                for step in range(1_000_000):
                    worker.step(jobs.gradient(rank, step))
        except fastps.WorkerDiedError as error:
            return str(error)
        finally:
            store.close()
        return "never"

    with store:
        children = [processes.start(lambda rank=rank: work(rank)) for rank in range(2)]
        processes.finish(children, 60)
    assert children[1].exit_code == -signal.SIGKILL and "worker 1" in children[0].outcome
