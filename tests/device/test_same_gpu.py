"""Several devices on one GPU: each has a name and memory of its own, and reaches the others."""

import os

import numpy as np
import pytest

from fastps.bench.gpu import check as gpu_check
from fastps.device import same_gpu
from fastps.device.cuda import CudaDevice
from fastps.device.interface import DeviceError
from fastps.device.placement import gpu_variables, gpus_of_workers
from fastps.lab.gpus.cuda_on_host import HostCuda


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> HostCuda:
    """One simulated GPU, which FASTPS_GPUS names twice."""
    made = HostCuda(["a GPU"])
    monkeypatch.setenv("FASTPS_SAME_GPU", "1")
    monkeypatch.setenv("FASTPS_GPUS", "0,0")
    monkeypatch.setattr("fastps.device.cuda.CupyCuda", lambda: made)
    return made


def test_each_entry_is_a_device_that_reaches_the_others_and_copies_between_them(api: HostCuda) -> None:
    devices = [CudaDevice(0), CudaDevice(1)]
    assert [device.identity for device in devices] == ["a GPU#0", "a GPU#1"]
    assert devices[0].can_reach("a GPU#1") and not devices[0].can_reach("another#0")
    devices[0].borrow(devices[1])
    addresses, streams = [device.allocate(64) for device in devices], [device.make_stream() for device in devices]
    found = devices[0].host_memory(64)
    found[:] = 7
    devices[1].copy(addresses[1], found.ctypes.data, 64, streams[1])
    devices[1].synchronize(streams[1])
    found[:] = 0
    devices[0].copy(addresses[0], addresses[1], 64, streams[0])
    devices[0].copy(found.ctypes.data, addresses[0], 64, streams[0])
    devices[0].synchronize(streams[0])
    assert np.array_equal(found, np.full(64, 7, np.uint8))
    for device in devices:
        device.shut()
    with pytest.raises(DeviceError, match="expected a GPU of 0 to 1, found 2"):
        CudaDevice(2)


def test_a_worker_sees_its_own_device_first_and_all_see_one_gpu(api: HostCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpus_of_workers(3) == ["0#0", "0#1", "0#0"]
    variables = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    assert [gpu_variables(rank, os.environ) for rank in (0, 1)] == [variables] * 2
    assert gpu_variables(1, os.environ, keeps_order=True) == variables | {"LOCAL_RANK": "0"}
    monkeypatch.setattr("fastps.job.environment.own_rank", lambda: 1)
    assert CudaDevice(0).identity == "a GPU#1"


def test_entries_that_name_several_gpus_are_refused_and_without_the_variable_nothing_changes(
    api: HostCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTPS_GPUS", "0,1")
    with pytest.raises(DeviceError, match="expected a FASTPS_GPUS that names one GPU, such as 0,0, found '0,1'"):
        CudaDevice(0)
    monkeypatch.delenv("FASTPS_SAME_GPU")
    assert same_gpu.each_entry_apart(api) is api


def test_copies_and_folds_between_two_devices_of_one_gpu_pass_the_check_of_peers(api: HostCuda) -> None:
    rows = list(gpu_check.between_gpus(2, 5003 * 8, repeat_s=0.001))
    assert [row["name"] for row in rows] == ["GPU 0 reads GPU 1", "GPU 1 reads GPU 0", "GPU 0", "GPU 1"]
    assert all(row["ok"] for row in rows) and rows[2]["gpus"] == 2
