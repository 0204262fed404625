"""The open descriptors of a process, for tests that nothing leaks."""

import contextlib
import time
from pathlib import Path


def opened() -> list[str]:
    """The targets of this process's descriptors, without the descriptor that lists them."""
    targets = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            targets.append(str(entry.readlink()))
    return sorted(target for target in targets if not target.startswith("/proc/"))


def settle(expected: list[str]) -> list[str]:
    """The open descriptors now. Waits up to five seconds for `expected`, because a listener closes its own at any time."""
    deadline = time.monotonic() + 5
    while (found := opened()) != expected and time.monotonic() < deadline:
        time.sleep(0.002)
    return found
