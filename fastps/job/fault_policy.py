"""The fault policy of a job, as data: what happens on a lost worker, a non-finite gradient and a late joiner.

All workers of a job agree on these values, so they are part of its layout.
"""

from dataclasses import asdict, dataclass

from fastps.errors import UsageError
from fastps.job.options import value_of


@dataclass(frozen=True)
class FaultPolicy:
    """The fault policy of a job.

    Attributes:
        on_worker_loss: when a worker dies or fails, the others "stop" with an error that names it, or "continue" without it:
            no worker waits for it, quorums shrink, and another process may join in its place.
        nonfinite: a push that is non-finite, or would make the weights non-finite, is not folded: "reject" drops it and goes
            on, "raise" raises an error in every worker. "allow" folds without a check.
        max_workers: lanes of the arena, and so the most workers attached at a time; 0: as many as at the start.

    Raises UsageError for a value that is not one of these.

    >>> FaultPolicy.of(on_worker_loss="continue", max_workers=6).lanes(4)
    6
    """

    on_worker_loss: str = "stop"
    nonfinite: str = "reject"
    max_workers: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            value_of(f"FASTPS_{name.upper()}", value)

    @staticmethod
    def of(on_worker_loss: str | None = None, nonfinite: str | None = None, max_workers: int | None = None) -> "FaultPolicy":
        """The arguments, or FASTPS_ON_WORKER_LOSS, FASTPS_NONFINITE and FASTPS_MAX_WORKERS where they are None."""
        return FaultPolicy(
            value_of("FASTPS_ON_WORKER_LOSS", on_worker_loss),
            value_of("FASTPS_NONFINITE", nonfinite),
            value_of("FASTPS_MAX_WORKERS", max_workers),
        )

    def lanes(self, workers: int) -> int:
        """The lanes of a job that starts with `workers` workers. Raises UsageError if `max_workers` is less."""
        if self.max_workers and self.max_workers < workers:
            raise UsageError(f"expected max_workers of at least the {workers} workers of the start, found {self.max_workers}")
        return self.max_workers or workers

    @property
    def continues(self) -> bool:
        """Whether the job goes on without a lost worker."""
        return self.on_worker_loss == "continue"


DEFAULT_FAULTS = FaultPolicy()
