"""What an evaluator does, as data: which versions it takes, what it writes, and when it asks the training to stop."""

import math
from dataclasses import dataclass

from fastps.errors import UsageError
from fastps.job.options import Range

_MOST_S = 1e9
_RANGES = {
    "every": Range("1 version or more", 1, math.inf),
    "every_s": Range("0 to 1e9 seconds", 0, _MOST_S),
    "follow_s": Range("0 to 1e9 seconds", 0, _MOST_S),
    "patience": Range("0 (none) or more evaluations", 0, math.inf),
}


@dataclass(frozen=True)
class EvaluationOptions:
    """The options of `fastps.evaluator`, which describes them. Raises UsageError for a wrong one."""

    every: int = 1
    every_s: float = 0.0
    rows: str = ""
    tensorboard: str = ""
    metric: str = ""
    mode: str = ""
    best: str = ""
    patience: int = 0
    device: str = "cpu"
    follow_s: float = 0.0
    idle: bool = True
    resume: bool = False

    def __post_init__(self) -> None:
        for name, allowed in _RANGES.items():
            if not allowed.least <= getattr(self, name) <= allowed.most:
                raise UsageError(f"{name}: expected {allowed.text}, found {getattr(self, name)}")
        if self.mode not in ("", "max", "min"):
            raise UsageError(f"mode: expected max or min, found {self.mode!r}")
        needs = [name for name in ("best", "patience") if getattr(self, name)]
        if bool(self.metric) != bool(self.mode) or (needs and not self.metric):
            raise UsageError(
                f"{' and '.join(needs) or 'metric'}: expected metric and mode (max or min), which say what is better, found"
                f" metric={self.metric!r}, mode={self.mode!r}"
            )
        if self.resume and not self.rows:
            raise UsageError("resume: expected rows beside it, the file to go on with, found none")
