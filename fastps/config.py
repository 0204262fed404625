"""The limits and defaults of fastps, and the relations between them, asserted at import.

What a user may change comes from the environment, read when it is asked for. Refuses to hold a job's own settings.
"""

import os

from fastps.errors import UsageError
from fastps.kernels import arena
from fastps.policy import MOST_SLOTS

RING_SIZE = 8  # descriptors of a lane's ring
SLICE_NS = 20_000_000  # no wait is longer without a look at the peers (protocol A.8: 50 ms), so a death is told within 100 ms
OVERDUE_NS = 200_000  # a wait for a timer that is overdue: whoever holds the turn will fire it
LIVENESS_NS = 50_000_000  # a worker that never waits looks at its peers this often
SPINS = 4_000  # looks before a worker goes to sleep: about the cost of one sleeping wake-up (anchors: 500 spins = 48 us)
STREAMED_BYTES = 128 << 20  # written by a fold that two cores share: from here stores past the caches pay (docs/performance.md)
DEFAULT_TIMEOUT_S = 300.0

# A ring that held more pushes than slots would let a push name a slot that another push still needs; null pushes and the last
# descriptor, LEAVE, need places of their own.
assert RING_SIZE > MOST_SLOTS + 1
assert SLICE_NS <= 50_000_000
assert arena.MAX_LANES + 1 < 1 << 16


def timeout_s(given: float | None = None) -> float:
    """The one timeout of all waits, in seconds: the argument, else FASTPS_TIMEOUT, else 300.

    Raises UsageError for a value that is not a positive number.
    """
    text = os.environ.get("FASTPS_TIMEOUT")
    if given is None and text is None:
        return DEFAULT_TIMEOUT_S
    try:
        value = float(given if given is not None else text or "")
    except ValueError:
        value = -1.0
    if not value > 0:
        raise UsageError(f"expected a timeout of more than 0 seconds (FASTPS_TIMEOUT or timeout_s), found {given or text!r}")
    return value


def spins(workers: int) -> int:
    """How often a wait looks before it sleeps: not at all when workers outnumber the cores this process may run on."""
    return SPINS if workers <= len(os.sched_getaffinity(0)) else 0


def helpers(workers: int) -> int:
    """How many workers may be woken to help with a fold: as many as there are cores beside the folder's own."""
    return min(workers, len(os.sched_getaffinity(0))) - 1


def streams(written_bytes: int, workers: int) -> bool:
    """Whether folds store past the caches: not when the results fit there, nor when one core folds alone."""
    return written_bytes >= STREAMED_BYTES and helpers(workers) > 0
