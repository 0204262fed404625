"""What a store begins with where it does not begin at version 0: a checkpoint, as the store sees it."""

from typing import Any, Protocol

from fastps.job.layout import Layout
from fastps.membership.job_memory import JobMemory


class StartState(Protocol):
    """A state that a new store can begin with; `fastps.Checkpoint` is one."""

    @property
    def has_average(self) -> bool:
        """Whether it holds the moving average of the weights."""

    def check_layout(self, layout: Layout) -> None:
        """Raise CheckpointError where the state belongs to another model or rule."""

    def beginning(self, layout: Layout) -> dict[str, Any]:
        """Versions of the shards, clocks of the workers, samples drawn."""

    def write_into(self, store: JobMemory) -> None:
        """Write weights and the rule's state into the first buffers of a store that no worker has joined yet."""
