"""Fault handling and checkpoints of a launched job: options of the command line, passed to workers by the environment."""

from collections.abc import Mapping
from dataclasses import dataclass

from fastps.errors import UsageError
from fastps.job.fault_policy import FaultPolicy
from fastps.job.options import value_of
from fastps.processes.fault_injection import FaultPlan

GRACE_S = 30.0  # as Kubernetes and SLURM give by default
_LONGEST_GRACE_S = 86_400


@dataclass(frozen=True)
class JobOptions:
    """Restarts, losses, checkpoints and injected faults of a launched job. "" leaves a choice to the script.

    Raises UsageError for values out of range.

    >>> JobOptions(restarts=3).environment()
    {'FASTPS_ON_WORKER_LOSS': 'continue'}
    """

    restarts: int = 0  # number of lost workers to replace; more than 0 lets the job go on after a loss
    on_worker_loss: str = ""  # "stop" or "continue"
    nonfinite: str = ""  # "reject", "raise" or "allow"
    max_workers: int = 0  # the most workers attached at a time; 0: as many as at the start
    checkpoint: str = ""  # directory for checkpoints
    every: int = 0  # updates between two checkpoints
    overwrite: bool = False  # whether to delete the checkpoints of other runs in that directory
    resume: str = ""  # checkpoint, or directory of checkpoints, to resume from
    faults: FaultPlan | None = None  # to inject
    server: str = ""  # the processes that fold: "workers" or "process"
    grace_s: float = GRACE_S  # how long workers may take to end after a signal, before SIGKILL

    def __post_init__(self) -> None:
        if self.restarts < 0:
            raise UsageError(f"--restarts: expected 0 or more, found {self.restarts}")
        if self.every < 0 or (self.every and not self.checkpoint):
            raise UsageError(f"--every: expected a number of updates, and --checkpoint DIR with it, found {self.every}")
        if self.restarts and self.on_worker_loss == "stop":
            raise UsageError("--restarts replaces lost workers, --on-worker-loss stop ends the job: expected one of the two")
        if not 0 <= self.grace_s <= _LONGEST_GRACE_S:
            raise UsageError(f"--grace: expected 0 to {_LONGEST_GRACE_S} seconds, found {self.grace_s:g}")
        value_of("FASTPS_SERVER", self.server)
        FaultPolicy(self.on_worker_loss or "stop", self.nonfinite or "reject", self.max_workers)

    @property
    def continues(self) -> bool:
        """Whether the job goes on after a loss, as far as the launcher knows."""
        return self.restarts > 0 or self.on_worker_loss == "continue"

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
        }
        return {name: value for name, value in values.items() if value}
