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
    """Restarts, losses, checkpoints and injected faults of a launched job.

    Attributes:
        restarts: number of lost workers to replace; more than 0 lets the job go on after a loss.
        on_worker_loss: "stop" or "continue"; "" leaves the choice to the script, or to `restarts`.
        nonfinite: "reject", "raise" or "allow"; "" leaves the choice to the script.
        max_workers: the most workers attached at a time; 0: as many as at the start.
        checkpoint: directory for checkpoints; "": no checkpoints.
        every: updates between two checkpoints.
        overwrite: whether to delete the checkpoints of other runs in that directory.
        resume: checkpoint, or directory of checkpoints, to resume from; "": start anew.
        faults: faults to inject; None: none.
        grace_s: how long workers may take to end after a signal, before SIGKILL.
        server: the processes that fold, "workers" or "process"; "" leaves the choice to the script.

    Raises UsageError for values out of range.

    >>> JobOptions(restarts=3).environment()
    {'FASTPS_ON_WORKER_LOSS': 'continue'}
    """

    restarts: int = 0
    on_worker_loss: str = ""
    nonfinite: str = ""
    max_workers: int = 0
    checkpoint: str = ""
    every: int = 0
    overwrite: bool = False
    resume: str = ""
    faults: FaultPlan | None = None
    server: str = ""
    grace_s: float = GRACE_S

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
