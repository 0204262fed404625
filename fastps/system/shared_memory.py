"""The arena's memory: one sealed memfd of fully allocated pages, which one process creates and all processes map.

The memory has no name in any file system. The kernel frees it with the last process that holds it, however that process ends.
"""

import errno
import fcntl
import os
from collections.abc import Callable, Sequence

import psutil

from fastps.errors import ArenaError
from fastps.kernels.memory.mapping import SharedMapping
from fastps.system import numa
from fastps.system.memory_limits import available_bytes

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_STRIDE = 256 << 20  # bytes between two looks at the free memory
Ranges = Sequence[tuple[int, int]]
"""Parts of a memory: each its offset and its length in bytes."""
_ADVICE = "use fewer workers or a smaller model, or raise the limit"


def create(size: int, what: str, ranges: Ranges | None = None, advise: Callable[[int], str] = lambda free: _ADVICE) -> int:
    """Create a memfd of `size` bytes, sealed against resizing, and allocate these ranges of it. Return its descriptor.

    By default all of it is allocated; `allocate` allocates others later.

    Allocating every page now turns a lack of memory into an error here, instead of SIGBUS at a later access. `what` describes
    the contents in the error, and `advise(free)` says what to change if only `free` bytes can be had. Raises ArenaError.
    """
    ranges = [(0, size)] if ranges is None else ranges
    needed, allocated = sum(length for _, length in ranges), 0
    descriptor = os.memfd_create("fastps-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        numa.spread(descriptor, size)
        for offset, length in ranges:
            for begin in range(offset, offset + length, _STRIDE):
                # Other workers build their models meanwhile: the kernel would kill one of them.
                _check_free(allocated, needed, what, advise)
                stride = min(_STRIDE, offset + length - begin)
                os.posix_fallocate(descriptor, begin, stride)
                allocated += stride
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException as error:
        os.close(descriptor)
        if not isinstance(error, OSError):
            raise
        reason = "no memory is left" if error.errno in (errno.ENOSPC, errno.ENOMEM) else str(error)
        advice = "raise the limit of a file's size (ulimit -f)" if error.errno == errno.EFBIG else advise(0)
        raise ArenaError(f"the arena needs {_shown(needed)} for {what}, but {reason}: {advice}") from None
    return descriptor


def _check_free(allocated: int, needed: int, what: str, advise: Callable[[int], str]) -> None:
    """Raise ArenaError if what is missing of `needed` bytes cannot be had."""
    free, limit = available_bytes()
    swap = psutil.swap_memory().free if allocated else 0  # the memory that others have taken since may go there
    if needed > allocated + free + swap:
        raise ArenaError(
            f"the arena needs {_shown(needed)} for {what}, found {_shown(allocated + free)} free ({limit}):"
            f" {advise(allocated + free)}"
        )


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


def map_private(descriptor: int) -> SharedMapping:
    """Map a whole arena once more, in which this process's writes stay its own. Raises ArenaError."""
    try:
        memory = SharedMapping(descriptor, private=True)
    except OSError as error:
        size = _shown(os.fstat(descriptor).st_size)
        raise ArenaError(
            f"the arena of {size} cannot be mapped once more, for the model: {error}; raise the limits of a process's data and"
            " addresses (ulimit -d, ulimit -v)"
        ) from error
    memory.leave_out_of_dumps()
    return memory


def _shown(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
