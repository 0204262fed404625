"""The arena's memory: one sealed memfd of fully allocated pages, made by one process and mapped by all.

Refuses to use names in any file system: the memory lives as long as somebody holds it, and is gone with the last, however they
ended.
"""

import errno
import fcntl
import os
from pathlib import Path

import psutil

from fastps.errors import ArenaError
from fastps.kernels.shm.mapping import SharedMapping
from fastps.system import numa as memory_nodes

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_CGROUP = Path("/sys/fs/cgroup")


def create(size: int, what: str) -> int:
    """Make a memfd of `size` bytes with every page allocated, sealed against resizing; returns its descriptor.

    Allocating first turns a lack of memory into an error here, instead of SIGBUS at a first touch later. `what` describes the
    contents in the error. Raises ArenaError.
    """
    free, limit = available_bytes()
    if size > free:
        raise ArenaError(
            f"the arena needs {_shown(size)} for {what}, found {_shown(free)} free ({limit}): use fewer workers or a smaller"
            " model, or raise the limit"
        )
    descriptor = os.memfd_create("fastps-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        memory_nodes.spread(descriptor, size)
        os.posix_fallocate(descriptor, 0, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(descriptor)
        reason = "no memory is left" if error.errno in (errno.ENOSPC, errno.ENOMEM) else str(error)
        raise ArenaError(f"the arena needs {_shown(size)} for {what}, but {reason}; {_shown(free)} were free") from error
    return descriptor


def map_shared(descriptor: int, *, writable: bool = True) -> SharedMapping:
    """Map a whole arena after checking that nobody can shrink it. Raises ArenaError."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if seals & _SEALS != _SEALS:
        raise ArenaError("expected a sealed arena, found memory that its owner could shrink; it is not from fastps")
    size = os.fstat(descriptor).st_size
    try:
        memory = SharedMapping(descriptor, writable)
    except (OSError, ValueError) as error:
        raise ArenaError(f"the arena of {_shown(size)} cannot be mapped: {error}") from error
    # A process that crashes is known to have ended only once its core is written: not with all of the arena in it.
    memory.leave_out_of_dumps()
    return memory


def available_bytes() -> tuple[int, str]:
    """Bytes that may still be allocated, and which limit says so: the machine's free memory or the control group's."""
    free = int(psutil.virtual_memory().available)
    limit = "free memory of the machine"
    for folder in _own_cgroups():
        try:
            maximum = (folder / "memory.max").read_text().strip()
            current = int((folder / "memory.current").read_text())
        except (OSError, ValueError):
            continue
        if maximum != "max" and int(maximum) - current < free:
            free, limit = max(0, int(maximum) - current), f"limit of the control group {folder}"
    return free, limit


def oom_kills() -> int:
    """Processes that the kernel has killed for want of memory in this process's control groups; 0 where it is not told."""
    return sum(_oom_kills_of(folder) for folder in _own_cgroups()[:1])


def _oom_kills_of(folder: Path) -> int:
    """The counter in a control group's memory.events, which counts the groups below it, too."""
    try:
        events = dict(line.split() for line in (folder / "memory.events").read_text().splitlines())
        return int(events.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0


def _own_cgroups() -> list[Path]:
    """This process's control group and all above it (version 2); an empty list where there is none."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((line[3:] for line in lines if line.startswith("0::")), None)
    if own is None:
        return []
    folder = _CGROUP / own.lstrip("/")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(_CGROUP))]


def _shown(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
