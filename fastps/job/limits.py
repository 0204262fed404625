"""The limits and defaults of fastps, and the relations between them, asserted at import.

Limits that a user may change come from the environment and are read at each call. The settings of a job are not here.
"""

import os
from typing import TYPE_CHECKING

from fastps.job.options import value_of
from fastps.job.policy import MOST_SLOTS
from fastps.kernels.protocol import wait
from fastps.system.processes import is_fork

if TYPE_CHECKING:
    from fastps.job.layout import Layout

ROOM_HEADER_BYTES = 128  # the words at the start of each slot of a lane's room
RING_SIZE = 8  # descriptors in a lane's ring
SLICE_NS = wait.SLICE  # a wait checks its peers this often (protocol A.8: 50 ms), so a death is reported within 100 ms
LIVENESS_NS = 50_000_000  # a worker that never waits checks its peers this often
SPINS = 4_000  # polls before a worker sleeps: about the cost of one sleep and wake-up (measured: 500 spins = 48 us)
# Bytes that a fold reads and writes. From here on non-temporal stores pay (docs/experiments/non-temporal-stores.md).
STREAMED_BYTES = 28 << 20
# The same for a rule whose results go through a staging buffer: bytes that a fold writes, if two or more cores share the fold.
STAGED_BYTES = 128 << 20

# A ring holds at most as many pushes as the lane has slots, or two pushes would name one slot. Null pushes and the last
# descriptor, LEAVE, need places of their own.
assert RING_SIZE > MOST_SLOTS + 1
assert SLICE_NS <= 50_000_000


def timeout_s(given: float | None = None) -> float:
    """The timeout of all waits, in seconds: the argument, else FASTPS_TIMEOUT, else 300. Raises UsageError."""
    return float(value_of("FASTPS_TIMEOUT", given))


def stall_ns(given_ms: float | None = None) -> int:
    """How long a peer that holds up the others may stand still before they go on without it, in ns; 0: for ever.

    The argument, else FASTPS_STALL_MS, else 500 ms. Raises UsageError.
    """
    return int(value_of("FASTPS_STALL_MS", given_ms) * 1_000_000)


def fold_threads(layout: "Layout", own: int) -> int:
    """Threads of an optimizer that runs in Python, in a job whose worker 0 has `own`.

    Worker 0 also uses the cores of those that wait, at most one thread a core: OpenMP's barriers wait for all threads. A fork
    has its own ones only. A server has those of its environment.
    """
    if layout.has_server:
        given = os.environ.get("OMP_NUM_THREADS", "")
        return int(given) if given.isdecimal() and int(given) else own
    return own if is_fork() else max(own, min(own * layout.workers, len(os.sched_getaffinity(0))))


def streams(layout: "Layout", helpers: int) -> bool:
    """Whether the folds of a job use non-temporal stores, with `helpers` helpers a fold. They do not if the caches hold a fold.

    The loops of SGD and Adam store directly. Other rules write through a staging buffer, which pays only for larger models.
    """
    written_bytes = 4 * layout.buffer_floats * (1 + layout.planes)
    if layout.rule.name in ("sgd", "adam") and not layout.policy.ema:
        return 2 * written_bytes + 4 * layout.buffer_floats * layout.workers >= STREAMED_BYTES
    return written_bytes >= STAGED_BYTES and helpers > 0
