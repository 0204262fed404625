"""What a process has open, for tests that show that nothing is leaked."""

import contextlib
import time
from pathlib import Path


def opened() -> list[str]:
    """What each descriptor of this process is, without the one that lists them."""
    targets = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            targets.append(str(entry.readlink()))
    return sorted(target for target in targets if not target.startswith("/proc/"))


def settle(expected: list[str]) -> list[str]:
    """What is open now; waits up to five seconds for `expected`, since an answering thread closes in its own time."""
    deadline = time.monotonic() + 5
    while (found := opened()) != expected and time.monotonic() < deadline:
        time.sleep(0.002)
    return found
