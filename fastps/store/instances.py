"""Which of a launch's jobs a process's next optimizer belongs to: JOB for a script's first, JOB.1 for the next, and so on.

Each process counts its own optimizers. Where the counts differ, since one process lives longer than another (a pool, a Ray
actor), the arenas tell: a job that still expects a worker of this rank is the one to join. Names that a script gives itself
(`job=`) are not counted.
"""

import os

from fastps.errors import ArenaError, AttachError, LayoutError
from fastps.job.environment import Identity
from fastps.kernels.shm.arena import LANE_FREE, Arena
from fastps.membership import discovery
from fastps.system import shared_memory as memory_of
from fastps.system.clock import Clock

_POLL_NS = 10_000_000
_ASK_S = 0.2

_next = [0]


def following() -> int:
    """The number of the optimizer that this process makes next; counts on."""
    _next[0] += 1
    return _next[0] - 1


def expected(identity: Identity, timeout_s: float, clock: Clock) -> Identity:
    """The job of this launch to join, as soon as there is one: the one that is counted, else one that expects this worker.

    The process counts on from it. After the timeout: the one that is counted, which then nobody has made.
    """
    deadline_ns = clock.now_ns() + int(timeout_s * 1e9)
    while True:
        instances = discovery.instances_of(identity.job)
        if identity.instance in instances:
            return identity
        for instance in sorted(instances):
            if _expects(identity.of_instance(instance), clock):
                _next[0] = instance + 1
                return identity.of_instance(instance)
        if clock.now_ns() >= deadline_ns:
            return identity
        clock.sleep_ns(_POLL_NS)


def _expects(identity: Identity, clock: Clock) -> bool:
    """Whether a job has been made for a worker of this rank that has never attached."""
    try:
        answer = discovery.find(identity.name, None, _ASK_S, clock)
    except (AttachError, LayoutError):
        return False
    os.close(answer.pidfd)
    try:
        arena = Arena(memory_of.map_shared(answer.memfd, writable=False))
    except (ValueError, ArenaError):
        return False
    finally:
        os.close(answer.memfd)
    return identity.rank < arena.lanes and arena.lane_state(identity.rank) == LANE_FREE
