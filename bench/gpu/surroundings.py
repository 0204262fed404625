"""What the GPU check finds on the machine: GPUs, versions, topology, compute mode, MIG, MPS and container.

The process of the check must not initialize CUDA before it starts others. Other programs and processes describe the GPUs.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from fastps.device.interface import DeviceError
from fastps.version import __version__

_SECONDS = 60.0
_ASKED = ("name", "driver_version", "memory.total", "compute_mode", "mig.mode.current", "ecc.mode.current", "pcie.link.gen.max")
_PACKAGES = ("torch", "numpy", "cupy-cuda12x", "cupy-cuda13x", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MPS_PIPE_DIRECTORY", "PYTORCH_CUDA_ALLOC_CONF")
_CONTAINERS = {Path("/.dockerenv"): "docker", Path("/run/.containerenv"): "podman", Path("/.singularity.d"): "apptainer"}
_STYLE = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi underlines, on whatever it prints
_DESCRIBE = """
import json
from fastps.device.cuda import CudaDevice
device = CudaDevice()
runtime = device._cuda.runtime
found = runtime.getDeviceProperties(0)
print(json.dumps({"name": found["name"].decode(), "memory_bytes": int(found["totalGlobalMem"]),
    "count": runtime.getDeviceCount(), "compute": [found["major"], found["minor"]],
    "driver": runtime.driverGetVersion(), "runtime": runtime.runtimeGetVersion()}))
"""


def gpu_of_this_machine() -> dict[str, Any]:
    """Describe the first GPU, and count them. Raises DeviceError without one, or without CuPy."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _DESCRIBE], capture_output=True, text=True, check=False, timeout=5 * _SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise DeviceError(f"expected a GPU that answers, found that CUDA did not within {error.timeout:g} s") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise DeviceError(last.partition(": ")[2] or last)
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def surroundings() -> dict[str, Any]:
    """What else may decide how a job runs here; None for what nobody told."""
    rows = _output("nvidia-smi", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader")
    listed = _output("nvidia-smi", "-L") or ""
    gpus = [dict(zip(_ASKED, (word.strip() for word in row.split(",")), strict=False)) for row in (rows or "").splitlines()]
    return {
        "versions": {"fastps": __version__} | {name: version for name in _PACKAGES if (version := _version(name))},
        "gpus": gpus or None,
        "topology": _output("nvidia-smi", "topo", "-m"),
        "mig_devices": [line.split("(")[0].strip() for line in listed.splitlines() if "MIG" in line],
        "mps": mps_runs(),
        "container": next((name for path, name in _CONTAINERS.items() if path.exists()), None),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def mps_runs(folder: Path | None = None) -> bool:
    """Whether the server of CUDA MPS accepts clients: with it the kernels of several processes run at the same time."""
    return ((folder or Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))) / "control").exists()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """What a program prints; None without it, or if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return _STYLE.sub("", done.stdout).strip() if done.returncode == 0 else None
