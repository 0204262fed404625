"""The buffers of one version of an arena, as an agent that folds reads and writes them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from fastps.kernels.protocol.lane import Lane
from fastps.membership.job_memory import JobMemory

_POLL_NS = 1_000_000


@dataclass
class VersionBuffers:
    """The buffers of one version: those that are read, and those that are written.

    Attributes:
        is_made: whether the buffers that are written are to be published.
        advances: whether they are another version than the one that was read.
    """

    weights_in: int
    weights_out: int
    state_in: int
    state_out: int
    is_made: bool = False
    advances: bool = True


Spare = Callable[[], AbstractContextManager[VersionBuffers]]
"""Gives the buffers of one version, which nobody reads, and publishes them after a block that has set `is_made`."""


def spare_of(store: JobMemory, lane: Lane) -> Spare:
    """A function that gives buffers outside a fold: it takes the shard lock, and holds it until its block ends."""

    @contextmanager
    def spare() -> Iterator[VersionBuffers]:
        while not lane.hold(0):
            store.clock.sleep_ns(_POLL_NS)
        buffers: VersionBuffers | None = None
        is_over = False
        try:
            weights, state = store.committed()
            free = lane.spare(0)
            buffers = VersionBuffers(weights[0], free[0], state[0], free[1])
            yield buffers
            is_over = True
        finally:
            publish = buffers is not None and buffers.is_made and is_over
            advances = buffers is not None and buffers.advances
            lane.release(publish, 0, store.clock.now_ns(), publish and advances)

    return spare
