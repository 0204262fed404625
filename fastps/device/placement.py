"""Where a job's shards are: in host memory, which every worker reaches, or on the workers' GPUs.

All workers must choose alike, so the choice depends only on variables that the launcher sets alike in every worker. This module
imports neither torch nor CuPy, and touches no GPU.
"""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from fastps.errors import UnsupportedError, UsageError
from fastps.job import environment
from fastps.job.launchers import whole
from fastps.job.options import OPTIONS, value_of

Placement = Literal["host", "device"]
_DEVICES = Path("/dev")
BUCKET_MB = int(OPTIONS["FASTPS_BUCKET_MB"].default)
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def gpus_of_workers() -> list[str]:
    """The GPU of each worker: worker r has entry r mod n of the launcher's FASTPS_GPUS. [] without the launcher.

    >>> os.environ["FASTPS_GPUS"] = "0,1"
    >>> gpus_of_workers()
    ['0']
    >>> del os.environ["FASTPS_GPUS"]
    """
    gpus = _gpus_in(os.environ.get("FASTPS_GPUS", ""))
    return [gpus[rank % len(gpus)] for rank in range(environment.world_size())] if gpus else []


def _gpus_in(text: str) -> list[str]:
    """The GPUs of FASTPS_GPUS. Raises UsageError for what is no list of numbers."""
    gpus = [gpu.strip() for gpu in text.split(",") if gpu.strip()]
    if any(whole(gpu) is None for gpu in gpus):
        raise UsageError(f"FASTPS_GPUS: expected numbers of GPUs such as 0,1, found {text!r}")
    return gpus


def parse_gpus(text: str) -> str:
    """Check the list of `--gpus`, such as "0,1,2,3", and return it. Raises UsageError if this machine lacks one of them.

    >>> parse_gpus("0,x")
    Traceback (most recent call last):
    fastps.errors.UsageError: --gpus: expected numbers of GPUs such as 0,1, found '0,x'
    """
    numbers = [number.strip() for number in text.split(",")]
    if any(whole(number) is None for number in numbers):
        raise UsageError(f"--gpus: expected numbers of GPUs such as 0,1, found {text!r}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = len(list(_DEVICES.glob("nvidia[0-9]*"))) if visible is None else len([name for name in visible.split(",") if name])
    if max(map(int, numbers)) >= found:
        raise UsageError(
            f"--gpus {text}: expected at least {max(map(int, numbers)) + 1} GPUs on this machine, found"
            f" {found or 'none'}: `fastps doctor` shows what there is"
        )
    return ",".join(numbers)


def gpu_variables(rank: int, base: Mapping[str, str]) -> dict[str, str]:
    """A worker's variables of CUDA, if FASTPS_GPUS in `base` names GPUs. The worker's own GPU comes first, as cuda:0.

    The job's other GPUs follow, because a process can only reach GPUs that it sees. Streams share CUDA_DEVICE_MAX_CONNECTIONS
    queues, 8 unless it is set; the folds of a shard could then wait behind another's, so there are 32, the most.

    >>> gpu_variables(3, {"FASTPS_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": "4,5,6"})
    {'CUDA_VISIBLE_DEVICES': '5,4', 'CUDA_DEVICE_MAX_CONNECTIONS': '32'}
    >>> gpu_variables(0, {"FASTPS_GPUS": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    {'CUDA_VISIBLE_DEVICES': '0', 'CUDA_DEVICE_MAX_CONNECTIONS': '1'}
    """
    gpus = _gpus_in(base.get("FASTPS_GPUS", ""))
    if not gpus:
        return {}
    visible = [name.strip() for name in base.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if visible and max(map(int, gpus)) >= len(visible):
        raise UsageError(f"FASTPS_GPUS={','.join(gpus)}: expected numbers within CUDA_VISIBLE_DEVICES={','.join(visible)}")
    own = gpus[rank % len(gpus)]
    ordered = [own, *(gpu for gpu in dict.fromkeys(gpus) if gpu != own)]
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(visible[int(gpu)] if visible else gpu for gpu in ordered),
        "CUDA_DEVICE_MAX_CONNECTIONS": base.get("CUDA_DEVICE_MAX_CONNECTIONS", "32"),
    }


def placement() -> Placement:
    """The placement that FASTPS_PLACEMENT chooses: "host", "device", or "auto" (the default).

    "auto" means "device" if all workers are on one GPU and CuPy is installed, else "host": several GPUs have never been tried.
    Raises UsageError, and UnsupportedError for an allocator that cannot share memory between processes.
    """
    wanted = value_of("FASTPS_PLACEMENT")
    gpus = gpus_of_workers()
    is_one = len(set(gpus)) == 1 or (not gpus and environment.world_size() == 1)
    if wanted == "auto":
        wanted = "device" if is_one and importlib.util.find_spec("cupy") is not None else "host"
    elif wanted == "device" and not is_one and not gpus:
        raise UsageError(
            "FASTPS_PLACEMENT=device: expected to know each worker's GPU, found no word of the GPUs: start the workers with"
            " `fastps run --gpus 0,1 -n N`, or use FASTPS_PLACEMENT=host"
        )
    if wanted == "device":
        check_allocator()
        return "device"
    return "host"


def bucket_bytes() -> int | None:
    """The size of the buckets that are folded while backward goes on, in bytes: FASTPS_BUCKET_MB in units of 2**20, or 64.

    None for 0: no fold begins before backward has ended. Raises UsageError.
    """
    return int(value_of("FASTPS_BUCKET_MB") * (1 << 20)) or None


def check_allocator() -> None:
    """Raise UnsupportedError for torch's expandable segments: CUDA exports no handle of such memory to other processes."""
    for name in _ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in os.environ.get(name, "").replace(" ", "").lower():
            raise UnsupportedError(
                f"shards on a GPU need memory that processes can share, which CUDA refuses with {name}={os.environ[name]}:"
                " leave expandable_segments out of it, or use FASTPS_PLACEMENT=host"
            )
