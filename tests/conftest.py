"""Nothing may be left behind: every test is checked for processes, descriptors and shared memory that outlive it."""

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

os.environ.setdefault("FASTPS_TIMEOUT", "60")


def _shared_memory() -> set[str]:
    """Files under /dev/shm, and the fastps memory that this process holds."""
    return {entry.name for entry in Path("/dev/shm").iterdir() if not entry.name.startswith("sem.")}


def _descriptors() -> dict[str, int]:
    """What this process has open, by kind: memfds, sockets and pidfds of ours are of interest."""
    counts: dict[str, int] = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        kind = "memfd" if "memfd:fastps" in target else "pidfd" if "pidfd" in target else None
        if kind:
            counts[kind] = counts.get(kind, 0) + 1
    return counts


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Compare before and after; children get a moment to be reaped."""
    memory, descriptors = _shared_memory(), _descriptors()
    yield
    gc.collect()
    deadline = time.monotonic() + 5
    children = psutil.Process().children(recursive=True)
    while children and time.monotonic() < deadline:
        time.sleep(0.02)
        children = [child for child in psutil.Process().children(recursive=True) if "resource_tracker" not in _command(child)]
    assert not children, f"left running: {[_command(child) for child in children]}"
    assert _shared_memory() <= memory
    after = _descriptors()
    assert all(after.get(kind, 0) <= descriptors.get(kind, 0) for kind in after), f"left open: {after}, before {descriptors}"


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return "resource_tracker"  # gone already
