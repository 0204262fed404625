"""Fault handling and checkpoints of a launched job: options of the command line, passed to workers by the environment."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastps.errors import UsageError
from fastps.job.fault_policy import FaultPolicy
from fastps.job.options import value_of
from fastps.processes.outcome import LaunchedWorker
from fastps.system.clock import Clock

GRACE_S = 30.0  # as Kubernetes and SLURM give by default
_LONGEST_GRACE_S = 86_400


class Injector(Protocol):
    """What disturbs the workers of one job on purpose, and measures what that costs."""

    stops_ns: list[tuple[int, int, int]]  # the rank, the beginning and the end of each stop

    def tick(self, workers: Sequence[LaunchedWorker]) -> None:
        """Disturb some of the workers that run, if it is time."""

    def row(self) -> Mapping[str, Any]:
        """The faults and their cost, as a JSON row."""

    def close(self) -> None:
        """Continue every stopped worker."""


@dataclass(frozen=True)
class JobOptions:
    """Restarts, losses, checkpoints and injected faults of a launched job. "" leaves a choice to the script.

    Raises UsageError for values out of range.

    >>> JobOptions(restarts=3).environment()
    {'FASTPS_ON_WORKER_LOSS': 'continue'}
    """

    restarts: int = 0  # number of lost workers to replace; more than 0 lets the job go on after a loss
    on_worker_loss: str = ""  # "stop" or "continue"
    joins: bool = False  # whether `Launcher.join` will start workers beside them
    nonfinite: str = ""  # "reject", "raise" or "allow"
    max_workers: int = 0  # the most workers attached at a time; 0: as many as at the start
    checkpoint: str = ""  # directory for checkpoints
    every: int = 0  # updates between two checkpoints
    overwrite: bool = False  # whether to delete the checkpoints of other runs in that directory
    resume: str = ""  # checkpoint, or directory of checkpoints, to resume from
    injector: Callable[[str, int, Clock], Injector] | None = None  # made for a job's name and its number of workers
    server: str = ""  # the processes that fold: "workers" or "process"
    variables: Mapping[str, str] = field(default_factory=dict)  # further ones of the workers
    grace_s: float = GRACE_S  # how long workers may take to end after a signal, before SIGKILL

    def __post_init__(self) -> None:
        if self.restarts < 0:
            raise UsageError(f"--restarts: expected 0 or more, found {self.restarts}")
        if self.every < 0:
            raise UsageError(f"--every: expected a number of updates, found {self.every}")
        if self.restarts and self.on_worker_loss == "stop":
            raise UsageError("--restarts replaces lost workers, --on-worker-loss stop ends the job: expected one of the two")
        if not 0 <= self.grace_s <= _LONGEST_GRACE_S:
            raise UsageError(f"--grace: expected 0 to {_LONGEST_GRACE_S} seconds, found {self.grace_s:g}")
        value_of("FASTPS_SERVER", self.server)
        FaultPolicy(self.on_worker_loss or "stop", self.nonfinite or "reject", self.max_workers)

    @property
    def continues(self) -> bool:
        """Whether the job goes on after a loss, as far as the launcher knows: a script may say so itself. Raises UsageError."""
        return self.restarts > 0 or self.says_continue

    @property
    def says_continue(self) -> bool:
        """Whether the job was asked to go on without a lost worker, by that word. Raises UsageError."""
        return bool(value_of("FASTPS_ON_WORKER_LOSS", self.on_worker_loss) == "continue")

    def environment(self) -> Mapping[str, str]:
        """Return the environment variables that pass these options to the workers."""
        loss = self.on_worker_loss or ("continue" if self.restarts else "")
        values = {
            "FASTPS_ON_WORKER_LOSS": loss,
            "FASTPS_NONFINITE": self.nonfinite,
            "FASTPS_MAX_WORKERS": str(self.max_workers or ""),
            "FASTPS_CHECKPOINT": self.checkpoint,
            "FASTPS_CHECKPOINT_EVERY": str(self.every or ""),
            "FASTPS_OVERWRITE": "1" if self.overwrite else "",
            "FASTPS_RESUME": self.resume,
            "FASTPS_SERVER": self.server,
            **self.variables,
        }
        return {name: value for name, value in values.items() if value}
