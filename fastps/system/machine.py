"""A description of this machine, to record with measurements."""

import os
import platform
from pathlib import Path
from typing import Any

import psutil

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """A number of this machine since it started; its name where the kernel (gVisor) has no such number."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return platform.node()


def machine() -> dict[str, Any]:
    """The CPU, architecture, usable cores, memory in bytes, kernel and Python version of this machine."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    return {
        "cpu": name,
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
