"""The check of sharing between GPUs finds out what works, on the simulated runtime."""

from collections.abc import Callable, Sequence

import pytest

from fastps.device import sharing
from fastps.device.cuda import CudaDevice
from fastps.device.interface import DeviceError
from fastps.device.sharing import Handles, read_shared, try_sharing
from fastps.lab.gpus.cuda_on_host import Faults, HostCuda
from tests.support import processes


def read_in_fork(reader: int, handles: Sequence[Handles], unreachable: frozenset[str] = frozenset()) -> list[str]:
    """Let a forked process read the memory of all GPUs on GPU `reader`."""

    def work() -> list[str]:
        faults = Faults(unreachable=unreachable - {f"gpu {reader}"})
        return read_shared(CudaDevice(0, HostCuda([f"gpu {reader}"], faults)), handles)

    child = processes.start(work)
    processes.finish([child], 20)
    if child.exit_code:
        raise DeviceError(child.outcome[1])
    found: list[str] = child.outcome
    return found


def _sharing(count: int, read: Callable[[int, Sequence[Handles]], list[str]]) -> tuple[bool, str]:
    api = HostCuda([f"gpu {number}" for number in range(count)], Faults(delay_s=0.01))
    try:
        return try_sharing([CudaDevice(number, api) for number in range(count)], read)
    finally:
        api.end()  # with the events, which CUDA leaves to the process's end


def test_sharing_is_tried_between_each_pair_of_gpus_with_one_process_for_each_gpu() -> None:
    readers: list[int] = []

    def read(reader: int, handles: Sequence[Handles]) -> list[str]:
        readers.append(reader)
        return read_in_fork(reader, handles)

    works, said = _sharing(3, read)
    assert works and "for all 9 pairs" in said
    assert readers == [0, 1, 2]


def test_pairs_that_do_not_share_are_named_and_a_gpu_that_cannot_at_all_is_told_apart() -> None:
    works, said = _sharing(2, lambda reader, handles: read_in_fork(reader, handles, frozenset({"gpu 0", "gpu 1"})))
    assert works and "[(1, 0), (0, 1)]: " in said and "peer access" in said

    def refuse(reader: int, handles: Sequence[Handles]) -> list[str]:
        raise DeviceError("no handles here")

    works, said = _sharing(1, refuse)
    assert not works and "use FASTPS_PLACEMENT=host: no handles here" in said


def test_memory_with_other_contents_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(reader: int, handles: Sequence[Handles]) -> list[str]:
        monkeypatch.setattr(sharing, "_WORDS", b"something")
        return read_in_fork(reader, handles)

    assert "holds something else" in _sharing(1, read)[1]
