"""The limits and defaults of fastps, and the relations between them, asserted at import.

What a user may change comes from the environment, read when it is asked for. Refuses to hold a job's own settings.
"""

import os
from typing import TYPE_CHECKING

from fastps.errors import UsageError
from fastps.job.policy import MOST_SLOTS
from fastps.kernels.shm import arena

if TYPE_CHECKING:
    from fastps.job.layout import Layout

RING_SIZE = 8  # descriptors of a lane's ring
SLICE_NS = 20_000_000  # no wait is longer without a look at the peers (protocol A.8: 50 ms), so a death is told within 100 ms
OVERDUE_NS = 200_000  # a wait for a timer that is overdue: whoever holds the turn will fire it
LIVENESS_NS = 50_000_000  # a worker that never waits looks at its peers this often
SPINS = 4_000  # looks before a worker goes to sleep: about the cost of one sleeping wake-up (anchors: 500 spins = 48 us)
# Where workers outnumber the cores, who waits lets others run before it sleeps, if its last wait was shorter than this: to
# sleep and be woken takes long beside the steps of small models, and nothing beside those of large ones
# (docs/experiments).
SHORT_WAIT_NS = 1_000_000
POLLS_AWAKE = 4  # between two looks at the clock
ROUNDS_AWAKE = 10  # of so many looks, at most
STREAMED_BYTES = (
    28 << 20
)  # read and written by a fold: from here stores past the caches pay (docs/experiments/non-temporal-stores.md)
STAGED_BYTES = 128 << 20  # written by a fold of a rule whose results go through a stage: the same, where two cores share it
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


def streams(layout: "Layout", helpers: int) -> bool:
    """Whether a job's folds store past the caches, where so many help with one: not when the results fit there.

    The loops of SGD and Adam do so by themselves; what other rules write goes through a stage, which pays late.
    """
    written_bytes = 4 * layout.buffer_floats * (1 + layout.planes)
    if layout.rule.name in ("sgd", "adam") and not layout.policy.ema:
        return 2 * written_bytes + 4 * layout.buffer_floats * layout.workers >= STREAMED_BYTES
    return written_bytes >= STAGED_BYTES and helpers > 0
