"""The job of a process's next optimizer in a launch: JOB for the script's first optimizer, JOB.1 for the next, and so on.

Each process counts its own optimizers. If the counts differ because one process lives longer than another (a pool, a Ray
actor), the process joins a job that still expects a worker of this rank. Jobs that the script names (`job=`) are not counted.
"""

from fastps.errors import ArenaError, AttachError
from fastps.job.environment import Identity
from fastps.kernels.shm.arena import LANE_FREE
from fastps.membership import discovery
from fastps.system.clock import Clock

_POLL_NS = 10_000_000
_ASK_S = 0.2

_next = [0]


def count_next() -> int:
    """The number of this process's next optimizer. Each call advances the count."""
    _next[0] += 1
    return _next[0] - 1


def find_job(identity: Identity, timeout_s: float, clock: Clock) -> Identity:
    """Wait for the job to join: the job that the count names, else the first that expects this worker.

    The count continues from the job that is found. After the timeout, return the job that the count names, although it does not
    exist.
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
    """Whether the job has a lane of this rank to which no worker has attached yet."""
    try:
        arena = discovery.arena_of(identity.name, _ASK_S, clock)
    except (AttachError, ArenaError):
        return False
    return identity.rank < arena.lanes and arena.lane_state(identity.rank) == LANE_FREE
