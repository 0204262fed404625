"""The arena's memory: one sealed memfd of fully allocated pages, which one process creates and all processes map.

The memory has no name in any file system. The kernel frees it with the last process that holds it, however that process ends.
"""

import errno
import fcntl
import os
from pathlib import Path

import psutil

from fastps.errors import ArenaError
from fastps.kernels.shm.mapping import SharedMapping
from fastps.system import numa

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_CGROUP = Path("/sys/fs/cgroup")


def create(size: int, what: str, needed: int | None = None) -> int:
    """Create a memfd of `size` bytes, sealed against resizing, and allocate the first `needed` bytes. Return its descriptor.

    By default all bytes are needed; `allocate` allocates others later.

    Allocating every page now turns a lack of memory into an error here, instead of SIGBUS at a later access. `what` describes
    the contents in the error. Raises ArenaError.
    """
    needed = size if needed is None else needed
    free, limit = available_bytes()
    if needed > free:
        raise ArenaError(
            f"the arena needs {_shown(needed)} for {what}, found {_shown(free)} free ({limit}): use fewer workers or a smaller"
            " model, or raise the limit"
        )
    descriptor = os.memfd_create("fastps-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        numa.spread(descriptor, size)
        os.posix_fallocate(descriptor, 0, needed)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(descriptor)
        reason = "no memory is left" if error.errno in (errno.ENOSPC, errno.ENOMEM) else str(error)
        if error.errno == errno.EFBIG:
            reason = "a file may not be as large: raise the limit (ulimit -f)"
        raise ArenaError(f"the arena needs {_shown(needed)} for {what}, but {reason}; {_shown(free)} were free") from None
    return descriptor


def allocate(descriptor: int, offset: int, length: int, what: str) -> None:
    """Allocate the pages of a part that was left out by `create`. Pages that are there stay. Raises ArenaError."""
    missing = min(length, os.fstat(descriptor).st_size - 512 * os.fstat(descriptor).st_blocks)
    free, limit = available_bytes()
    if missing > free:
        raise ArenaError(
            f"{what} needs {_shown(missing)} of the arena, found {_shown(free)} free ({limit}): end other programs, or raise"
            " the limit"
        )
    try:
        os.posix_fallocate(descriptor, offset, length)
    except OSError as error:
        raise ArenaError(f"{what} needs {_shown(length)} of the arena, but {error}; {_shown(free)} were free") from error


def map_shared(descriptor: int, *, writable: bool = True) -> SharedMapping:
    """Map a whole arena after checking that no process can shrink it. Raises ArenaError."""
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
    # The death of a process becomes visible only when its core dump is written, so the arena is left out of dumps.
    memory.leave_out_of_dumps()
    return memory


def available_bytes() -> tuple[int, str]:
    """Bytes that may still be allocated, and the limit that applies: the machine's free memory or a control group's maximum."""
    free = int(psutil.virtual_memory().available)
    limit = "free memory of the machine"
    for folder in _own_cgroups():
        try:
            maximum = (folder / "memory.max").read_text().strip()
            left = int(maximum) - int((folder / "memory.current").read_text()) if maximum != "max" else free
        except (OSError, ValueError):
            continue
        if left < free:
            free, limit = max(0, left), f"limit of the control group {str(folder)!r}"
    return free, limit


def oom_kills() -> int:
    """Processes of this process's control group that the OOM killer has killed; 0 if the kernel does not report it."""
    return sum(_oom_kills_of(folder) for folder in _own_cgroups()[:1])


def _oom_kills_of(folder: Path) -> int:
    """The oom_kill counter in a control group's memory.events, which includes the groups below."""
    try:
        events = dict(line.split() for line in (folder / "memory.events").read_text().splitlines())
        return int(events.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0


def _own_cgroups() -> list[Path]:
    """This process's control group and its ancestors (cgroup version 2); empty if there is none."""
    try:
        lines = os.fsdecode(Path("/proc/self/cgroup").read_bytes()).split("\n")  # a group's name holds any byte but a line end
    except OSError:
        return []
    own = next((line[3:] for line in lines if line.startswith("0::")), None)
    if own is None:
        return []
    folder = _CGROUP / own.lstrip("/")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(_CGROUP))]


def _shown(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
