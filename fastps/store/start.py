"""The state from which a new store resumes, as an interface: a checkpoint implements it."""

from typing import Any, Protocol

from fastps.job.layout import Layout
from fastps.membership.job_memory import JobMemory


class StartState(Protocol):
    """A state from which a new store can resume. `fastps.Checkpoint` implements it."""

    @property
    def has_average(self) -> bool:
        """Whether the state has the moving average of the weights."""

    def check_layout(self, layout: Layout) -> None:
        """Raise CheckpointError if the state belongs to another model or rule."""

    def beginning(self, layout: Layout) -> dict[str, Any]:
        """The versions of the shards, the clocks of the workers, and the samples drawn, as keyword arguments."""

    def write_into(self, store: JobMemory) -> None:
        """Write weights and optimizer state into the first buffers of a store that no worker has joined yet."""
