"""Where a job's shards are: in host memory, which every worker reaches, or on the workers' GPUs.

All workers must choose alike, so the choice depends only on variables that the launcher sets alike in every worker. This module
imports neither torch nor CuPy, and touches no GPU.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from fastps.errors import UnsupportedError, UsageError
from fastps.job import environment
from fastps.job.launchers import whole
from fastps.job.options import OPTIONS, value_of

Placement = Literal["host", "device"]
_DEVICES = Path("/dev")
PROBE = [sys.executable, "-m", "fastps.device.sharing"]
_PROBE_S = 120.0
VARIABLE_OF_SAME_GPU = "FASTPS_SAME_GPU"
BUCKET_MB = int(OPTIONS["FASTPS_BUCKET_MB"].default)


def gpus_of_workers(workers: int | None = None) -> list[str]:
    """The GPU of each worker: worker r has entry r mod n of the launcher's FASTPS_GPUS. [] without the launcher.

    `workers`: how many there are, by default as this worker's variables say.

    >>> os.environ["FASTPS_GPUS"] = "0,1"
    >>> gpus_of_workers()
    ['0']
    >>> del os.environ["FASTPS_GPUS"]
    """
    gpus = _gpus_in(os.environ.get("FASTPS_GPUS", ""))
    return [gpus[rank % len(gpus)] for rank in range(workers or environment.own_world_size())] if gpus else []


def check_own_gpu(index: int) -> None:
    """Raise UnsupportedError if a worker's model is on another GPU, cuda:`index`, than the one that the launcher gave it."""
    own = whole(os.environ.get("LOCAL_RANK", "0")) or 0
    if os.environ.get("FASTPS_GPUS") and index != own:
        raise UnsupportedError(
            f"expected the model of worker {environment.own_rank()} on cuda:{own}, the GPU that --gpus gives it, found it on"
            f" cuda:{index}: use cuda:LOCAL_RANK where the script has torchrun's variables, and else cuda:0 (fastps run --env)"
        )


def _gpus_in(text: str) -> list[str]:
    """The GPUs of FASTPS_GPUS; under FASTPS_SAME_GPU=1 each entry is one. Raises UsageError for what is no list of numbers."""
    gpus = [gpu.strip() for gpu in text.split(",") if gpu.strip()]
    if any(whole(gpu) is None for gpu in gpus):
        raise UsageError(f"FASTPS_GPUS: expected numbers of GPUs such as 0,1, found {text!r}")
    if os.environ.get(VARIABLE_OF_SAME_GPU) == "1":
        return [f"{gpu}#{number}" for number, gpu in enumerate(gpus)]
    return gpus


def gpus_seen_by(rank: int, text: str) -> list[str]:
    """The GPUs of FASTPS_GPUS in the order in which worker `rank` sees them: its own first.

    >>> gpus_seen_by(1, "2,0,2")
    ['0', '2']
    """
    gpus = _gpus_in(text)
    return list(dict.fromkeys([gpus[rank % len(gpus)], *gpus])) if gpus else []


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


def gpu_variables(rank: int, base: Mapping[str, str], *, keeps_order: bool = False) -> dict[str, str]:
    """A worker's variables of CUDA, if FASTPS_GPUS in `base` names GPUs. The worker's own GPU comes first, as cuda:0.

    The job's other GPUs follow, because a process can only reach GPUs that it sees. Streams share CUDA_DEVICE_MAX_CONNECTIONS
    queues, 8 unless it is set; with several GPUs the folds of a shard could then wait behind another's, so there are 32, the
    most. On one GPU they would be taken from the other workers: the server of MPS has too few for four workers with 32 each.

    With `keeps_order` every worker sees the GPUs in the order of the list, as under torchrun, and LOCAL_RANK has the place of
    its own GPU there; it differs from the worker's number where workers share a GPU.

    >>> gpu_variables(3, {"FASTPS_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": "4,5,6"})
    {'CUDA_VISIBLE_DEVICES': '5,4', 'CUDA_DEVICE_MAX_CONNECTIONS': '32'}
    >>> gpu_variables(0, {"FASTPS_GPUS": "0"})
    {'CUDA_VISIBLE_DEVICES': '0'}
    >>> gpu_variables(3, {"FASTPS_GPUS": "2,1"}, keeps_order=True)
    {'CUDA_VISIBLE_DEVICES': '2,1', 'CUDA_DEVICE_MAX_CONNECTIONS': '32', 'LOCAL_RANK': '1'}
    """
    text = base.get("FASTPS_GPUS", "")
    if not (ordered := gpus_seen_by(rank, text)):
        return {}
    devices, own = len(ordered), _number(ordered[0])
    gpus = list(dict.fromkeys(map(_number, _gpus_in(text) if keeps_order else ordered)))
    visible = [name.strip() for name in base.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if visible and max(gpus) >= len(visible):
        raise UsageError(f"FASTPS_GPUS={text}: expected numbers within CUDA_VISIBLE_DEVICES={','.join(visible)}")
    found = {"CUDA_VISIBLE_DEVICES": ",".join(visible[gpu] if visible else str(gpu) for gpu in gpus)}
    if devices > 1:
        found["CUDA_DEVICE_MAX_CONNECTIONS"] = base.get("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    return found | ({"LOCAL_RANK": str(gpus.index(own))} if keeps_order else {})


def _number(gpu: str) -> int:
    """The number of a GPU, which under FASTPS_SAME_GPU=1 the number of its entry follows."""
    return int(gpu.partition("#")[0])


def placement(workers: int | None = None) -> Placement:
    """The placement that FASTPS_PLACEMENT chooses: "host", "device", or "auto" (the default).

    "auto" means "device" if all workers are on one GPU and CuPy is installed, else "host": several GPUs have never been tried.
    `workers` as in `gpus_of_workers`. Raises UsageError.
    """
    wanted = value_of("FASTPS_PLACEMENT")
    gpus = gpus_of_workers(workers)
    is_one = len(set(gpus)) == 1 or (not gpus and environment.own_world_size() == 1)
    if wanted == "auto":
        wanted = "device" if is_one and importlib.util.find_spec("cupy") is not None else "host"
    elif wanted == "device" and not is_one and not gpus:
        raise UsageError(
            "FASTPS_PLACEMENT=device: expected to know each worker's GPU, found no word of the GPUs: start the workers with"
            " `fastps run --gpus 0,1 -n N`, or use FASTPS_PLACEMENT=host"
        )
    return "device" if wanted == "device" else "host"


def place_by_trial(workers: int) -> str:
    """Where "auto" would place a job's shards on a GPU, let two processes try to share its memory and an event.

    If that fails, sets FASTPS_PLACEMENT to "host" for the workers, and returns why; else "".
    """
    if value_of("FASTPS_PLACEMENT") != "auto" or not os.environ.get("FASTPS_GPUS") or placement(workers) != "device":
        return ""
    variables = {**os.environ, **gpu_variables(0, os.environ)}
    try:
        tried = subprocess.run(PROBE, env=variables, capture_output=True, text=True, timeout=_PROBE_S, check=False)
        failed, said = tried.returncode != 0, (tried.stdout.strip() or tried.stderr.strip() or "no word").splitlines()[-1]
    except subprocess.TimeoutExpired:
        failed, said = True, f"no answer within {_PROBE_S:.0f} s"
    if not failed:
        return ""
    os.environ["FASTPS_PLACEMENT"] = "host"
    gpu = variables["FASTPS_GPUS"]
    return f"shards lie in host memory: expected processes that share memory and events of GPU {gpu}, found {said}"


def bucket_bytes() -> int | None:
    """The size of the buckets that are folded while backward goes on, in bytes: FASTPS_BUCKET_MB in units of 2**20, or 64.

    None for 0: no fold begins before backward has ended. Raises UsageError.
    """
    return int(value_of("FASTPS_BUCKET_MB") * (1 << 20)) or None
