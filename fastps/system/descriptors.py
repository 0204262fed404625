"""The descriptors that this process may open: more where its limit may be raised, a named error where it may not.

None of them is a standard stream: those that are closed are occupied first.
"""

import os
import resource
from pathlib import Path

from fastps.errors import UsageError


def occupy_standard_streams() -> None:
    """Open what is closed of 0, 1 and 2. Memory, a pipe or a socket would get the number, and what C libraries print.

    Children of this process do not inherit what it opens.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


def reserve(count: int, what: str) -> None:
    """Make sure that this process may open `count` descriptors more, for `what`. Raises UsageError."""
    occupy_standard_streams()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        opened = len(list(Path("/proc/self/fd").iterdir()))
    except OSError:
        opened = soft  # not even the list can be opened
    needed = opened + count
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise UsageError(
            f"expected a limit of at least {needed} descriptors for {what}, found {hard}, of which {opened} are open: raise it"
            " (ulimit -n), or start fewer workers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def reserve_all() -> None:
    """Let this process open as many descriptors as the hard limit allows; the usual limit is 1,024."""
    occupy_standard_streams()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
