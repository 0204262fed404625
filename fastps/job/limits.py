"""The limits and defaults of fastps, and the relations between them, asserted at import.

Limits that a user may change come from the environment and are read at each call. The settings of a job are not here.
"""

import os
from typing import TYPE_CHECKING

from fastps.errors import UsageError
from fastps.job.policy import MOST_SLOTS
from fastps.kernels.protocol import wait
from fastps.kernels.shm import arena

if TYPE_CHECKING:
    from fastps.job.layout import Layout

RING_SIZE = 8  # descriptors in a lane's ring
SLICE_NS = wait.SLICE  # a wait checks its peers this often (protocol A.8: 50 ms), so a death is reported within 100 ms
LIVENESS_NS = 50_000_000  # a worker that never waits checks its peers this often
SPINS = 4_000  # polls before a worker sleeps: about the cost of one sleep and wake-up (measured: 500 spins = 48 us)
# Bytes that a fold reads and writes. From here on non-temporal stores pay (docs/experiments/non-temporal-stores.md).
STREAMED_BYTES = 28 << 20
# The same for a rule whose results go through a staging buffer: bytes that a fold writes, if two or more cores share the fold.
STAGED_BYTES = 128 << 20
DEFAULT_TIMEOUT_S = 300.0
LONGEST_TIMEOUT_S = 1_000_000_000  # 31 years; a deadline in ns has 63 bits
DEFAULT_STALL_MS = 500  # of a fold that does not go on, before the others go on without its worker

# A ring holds at most as many pushes as the lane has slots, or two pushes would name one slot. Null pushes and the last
# descriptor, LEAVE, need places of their own.
assert RING_SIZE > MOST_SLOTS + 1
assert SLICE_NS <= 50_000_000
assert arena.MAX_LANES + 1 < 1 << 16


def timeout_s(given: float | None = None) -> float:
    """The timeout of all waits, in seconds: the argument, else FASTPS_TIMEOUT, else 300.

    Raises UsageError for a value that is not a number of more than 0 and at most LONGEST_TIMEOUT_S.
    """
    text = os.environ.get("FASTPS_TIMEOUT")
    if given is None and text is None:
        return DEFAULT_TIMEOUT_S
    try:
        value = float(given if given is not None else text or "")
    except ValueError:
        value = -1.0
    if not 0 < value <= LONGEST_TIMEOUT_S:
        raise UsageError(
            f"expected a timeout of more than 0 and at most {LONGEST_TIMEOUT_S:,} seconds (FASTPS_TIMEOUT or timeout_s), found"
            f" {text if given is None else given!r}"
        )
    return value


def stall_ns(given_ms: float | None = None) -> int:
    """How long a peer that holds up the others may stand still before they go on without it, in ns; 0: for ever.

    The argument, else FASTPS_STALL_MS, else 500 ms. Raises UsageError for a value that is not a number of 100 or more, or 0.
    """
    text = os.environ.get("FASTPS_STALL_MS")
    if given_ms is None and text is None:
        return DEFAULT_STALL_MS * 1_000_000
    try:
        value = float(given_ms if given_ms is not None else text or "")
    except ValueError:
        value = -1.0
    if not (value == 0 or 100 <= value < 1e9):
        found = text if given_ms is None else given_ms
        raise UsageError(f"expected a time of 100 ms or more, or 0 for none (FASTPS_STALL_MS), found {found!r}")
    return int(value * 1_000_000)


def streams(layout: "Layout", helpers: int) -> bool:
    """Whether the folds of a job use non-temporal stores, with `helpers` helpers a fold. They do not if the caches hold a fold.

    The loops of SGD and Adam store directly. Other rules write through a staging buffer, which pays only for larger models.
    """
    written_bytes = 4 * layout.buffer_floats * (1 + layout.planes)
    if layout.rule.name in ("sgd", "adam") and not layout.policy.ema:
        return 2 * written_bytes + 4 * layout.buffer_floats * layout.workers >= STREAMED_BYTES
    return written_bytes >= STAGED_BYTES and helpers > 0
