"""The module with every CUDA call, in whole jobs of processes over a simulated CUDA runtime: its calls keep CUDA's rules."""

import contextlib
import os
import pickle
import signal
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import fastps
from fastps.device.cuda import CudaDevice
from fastps.device.interface import DeviceError
from fastps.lab.gpus.cuda_calls import Call, RecordedCuda, merged
from fastps.lab.gpus.cuda_on_host import Faults, HostCuda
from fastps.lab.gpus.cuda_rules import CudaRuleError, check_record
from tests.device import test_device as jobs
from tests.device.conftest import Pipe
from tests.support import processes


def packed(calls: list[Call]) -> bytes:
    """Calls as few bytes, because a pipe has little room: a launch's argument is 4 KiB, most of it zeros."""
    return zlib.compress(pickle.dumps(calls), 1)


def unpacked(calls: bytes) -> list[Call]:
    found: list[Call] = pickle.loads(zlib.decompress(calls))
    return found


def recorded(store: Any, gpus: Sequence[str], work: Callable[[int], Any]) -> tuple[list[Any], list[list[Call]]]:
    """Run a job with a worker on each of `gpus`, which sees the others', too; what each returned, and its process' calls."""

    def in_child(rank: int) -> Any:
        seen = [gpus[rank], *(gpu for gpu in dict.fromkeys(gpus) if gpu != gpus[rank])]
        api = RecordedCuda(HostCuda(seen, Faults(seed=rank, delay_s=0.001)))
        with store.use(CudaDevice(0, api)):
            found = work(rank)
        return found, packed(api.calls)

    outcomes = jobs.in_workers(store, len(gpus), in_child)
    return [found for found, _ in outcomes], [unpacked(calls) for _, calls in outcomes]


@pytest.mark.parametrize(("sync", "gpus"), [("bsp", "00"), ("bsp,ema=0.9,shards=2", "01")])
def test_a_job_keeps_the_rules_of_cuda_and_has_the_bits_of_the_cpu(sync: str, gpus: str) -> None:
    update = fastps.Adam(lr=0.01)
    owners = (0,) if gpus == "00" else (0, 1)
    store = jobs.make_store(update, sync, 2, owners)
    found, calls = recorded(store, [f"gpu {gpu}" for gpu in gpus], lambda rank: jobs.steps_of(store, rank, 12, jobs.gradient))
    jobs.assert_equal(found, jobs.on_cpu(update, sync, 2, 12))
    peers = [frozenset(("gpu 0", "gpu 1"))]
    whole = merged(*calls)
    assert check_record(whole, peers, {call.process for call in whole}) == len(whole) > 300
    names = {call.name for call in whole}
    assert names >= {"ipcOpenMemHandle", "ipcCloseMemHandle", "streamWaitEvent", "eventRecord", "launch", "free"}
    for name in ("setDevice", "ipcGetMemHandle", "eventRecord", "ipcCloseMemHandle"):
        with pytest.raises(CudaRuleError):
            check_record([call for call in whole if call.name != name], peers)


def test_a_gpu_that_is_not_there_is_named() -> None:
    with pytest.raises(DeviceError, match="expected a GPU of 0 to 1, found 2"):
        CudaDevice(2, HostCuda(["gpu 0", "gpu 1"]))


def test_which_gpus_are_reached_is_what_cuda_says() -> None:
    device = CudaDevice(0, HostCuda(["gpu 0", "gpu 1"], Faults(unreachable=frozenset({"gpu 1"}))))
    assert device.can_reach("gpu 0")
    assert not device.can_reach("gpu 1") and not device.can_reach("unseen")
    device.shut()


def test_parts_of_one_gpu_share_its_address_and_are_told_apart() -> None:
    """As MIG's instances do: each process sees one, and there is no CUDA IPC between them."""

    class Part(HostCuda):
        def deviceGetPCIBusId(self, device: int) -> str:  # noqa: N802
            return "0000:17:00.0"

    one, other = (CudaDevice(0, Part([part], Faults(unreachable=frozenset({"MIG-b"})))) for part in ("MIG-a", "MIG-b"))
    assert one.identity != other.identity and not one.can_reach(other.identity)
    assert one._runtime.gpu == other._runtime.gpu == "GPU 0 (0000:17:00.0)", "the name in errors"
    one.shut()
    other.shut()


def test_a_wait_for_a_process_that_has_ended_never_ends_and_the_device_is_left_to_the_process_end(
    pipes: list[Pipe],
) -> None:
    """So it is in CUDA: a wait of the host, as in `loss.item()`, then ends with the process alone."""
    child = jobs.queue_for_a_minute(*pipes)
    device = CudaDevice(0, HostCuda(["gpu 0"]))
    event, stream, own = device.open_event(pipes[1].receive()), device.make_stream(), device.make_event()
    device.wait(event, stream)
    device.record(own, stream)
    os.kill(child.process_id, signal.SIGKILL)
    processes.finish([child], 20)

    def read() -> None:
        with contextlib.suppress(DeviceError):
            device.synchronize(stream)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(0.5)
    assert reader.is_alive() and not device.is_done(own)
    device.check(stream)  # no failure shows
    device.shut(waits=False)
    device._cuda.runtime.end()
    reader.join(20)
