"""Where a job's shards lie: in host memory, which every worker reaches, or on the one GPU that all workers share.

All workers must come to the same answer, so it is read from what the launcher tells all of them alike. Refuses to import torch
or CuPy, and to touch a GPU.
"""

import importlib.util
import os
from typing import Literal

from fastps import environment
from fastps.errors import UnsupportedError, UsageError

Placement = Literal["host", "device"]
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def gpus_of_workers() -> list[str]:
    """The GPU of each worker, by the launcher's FASTPS_GPUS, which worker r has the (r mod n)th of; [] without the launcher.

    >>> os.environ["FASTPS_GPUS"] = "0,1"
    >>> gpus_of_workers()
    ['0']
    >>> del os.environ["FASTPS_GPUS"]
    """
    text = os.environ.get("FASTPS_GPUS", "")
    gpus = [gpu.strip() for gpu in text.split(",") if gpu.strip()]
    return [gpus[rank % len(gpus)] for rank in range(environment.world_size())] if gpus else []


def placement() -> Placement:
    """FASTPS_PLACEMENT: "host", "device", or "auto", which is also the default: on the device where all workers are on one GPU
    and CuPy is installed. Raises UsageError, and UnsupportedError for an allocator that shards on devices do not go with.
    """
    wanted = os.environ.get("FASTPS_PLACEMENT", "auto")
    gpus = gpus_of_workers()
    is_one = len(set(gpus)) == 1 or (not gpus and environment.world_size() == 1)
    if wanted == "auto":
        wanted = "device" if is_one and importlib.util.find_spec("cupy") is not None else "host"
    elif wanted not in ("host", "device"):
        raise UsageError(f"FASTPS_PLACEMENT: expected host, device or auto, found {wanted!r}")
    elif wanted == "device" and not is_one:
        raise UsageError(
            f"FASTPS_PLACEMENT=device: expected all workers on one GPU, found {', '.join(gpus) or 'no word of the GPUs'}: start"
            " them with `fastps run --gpus 0 -n N`, or use FASTPS_PLACEMENT=host"
        )
    if wanted == "device":
        check_allocator()
        return "device"
    return "host"


def check_allocator() -> None:
    """Refuse torch's expandable segments: CUDA makes no handle that another process can open of such memory."""
    for name in _ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in os.environ.get(name, "").replace(" ", "").lower():
            raise UnsupportedError(
                f"shards on a GPU need memory that processes can share, which CUDA refuses with {name}={os.environ[name]}:"
                " leave expandable_segments out of it, or use FASTPS_PLACEMENT=host"
            )
