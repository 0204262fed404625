"""A description of this machine, to record with measurements."""

import os
import platform
from pathlib import Path
from typing import Any

import psutil


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
