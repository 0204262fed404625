"""Several devices on one GPU: what several GPUs add to one, all but the links between them, runs where there is one GPU.

With FASTPS_SAME_GPU=1 each entry of FASTPS_GPUS is a device of its own, although all name one GPU: FASTPS_GPUS=0,0 is two. Only
`fastps gpu-check` and tests set it, because nothing gets faster by it. Each process sees the one GPU; the devices have streams,
events and memory of their own, and peer access to each other.
"""

import os
from collections.abc import Sequence
from typing import Any

from fastps.device.interface import DeviceError
from fastps.device.placement import VARIABLE_OF_SAME_GPU, gpus_seen_by
from fastps.job import environment


def each_entry_apart(api: Any) -> Any:
    """The API of a CudaDevice, with a device for each entry of FASTPS_GPUS if FASTPS_SAME_GPU=1; else `api` itself.

    Raises DeviceError if the entries name several GPUs.
    """
    if os.environ.get(VARIABLE_OF_SAME_GPU) != "1":
        return api
    text = os.environ.get("FASTPS_GPUS", "")
    names = gpus_seen_by(environment.own_rank(), text)
    if len({name.partition("#")[0] for name in names}) != 1:
        raise DeviceError(f"{VARIABLE_OF_SAME_GPU}=1: expected a FASTPS_GPUS that names one GPU, such as 0,0, found {text!r}")
    return SameGpu(api, names)


class SameGpu:
    """Devices that are all GPU 0 of `api`, with these names: the calls of an API that have a device's number.

    >>> from fastps.lab.gpus.cuda_on_host import HostCuda
    >>> api = SameGpu(HostCuda(["a GPU"]), ["0#1", "0#0"])
    >>> api.runtime.getDeviceCount(), api.identity(0), api.identity(1)
    (2, 'a GPU#1', 'a GPU#0')
    """

    def __init__(self, api: Any, names: Sequence[str]) -> None:
        self._api, self._names = api, names
        self.runtime = _Runtime(api.runtime, len(names))

    def identity(self, device: int) -> str:
        """The GPU's name, and which of its devices this is."""
        return f"{self._api.identity(0)}#{self._names[device].partition('#')[2]}"

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._api, name)  # prepare, launch, array and compute_stream have the device's number first
        return call if name == "empty_cache" else lambda device, *rest: call(0, *rest)


class _Runtime:
    """The CUDA runtime, for devices that are all GPU 0."""

    def __init__(self, runtime: Any, count: int) -> None:
        self._runtime, self._count = runtime, count

    def getDeviceCount(self) -> int:
        return self._count

    def setDevice(self, device: int) -> None:
        self._runtime.setDevice(0)

    def deviceGetPCIBusId(self, device: int) -> str:
        return f"{self._runtime.deviceGetPCIBusId(0)}#{device}"

    def deviceCanAccessPeer(self, device: int, peer: int) -> int:
        return 1

    def deviceEnablePeerAccess(self, peer: int) -> None:
        """A GPU's memory needs no access of its own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)
