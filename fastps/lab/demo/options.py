"""The options of a training run, from the command line to every worker."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

# With 0.05 the accuracy of four workers on MNIST-5k varies between runs if each push is folded by itself, because gradients are
# stale (docs/disciplines.md).
LEARNING_RATE = 0.03


@dataclass(frozen=True)
class TrainingOptions:
    """The options of a run.

    `straggler` maps a worker to the factor that stretches its compute time. A share `pull_delay_share` of pull responses comes
    `pull_delay_s` seconds late (PSP-SGD, section 4.2). `push_dtype` is torch's name for the type of pushed gradients.
    `warm_start` and `weights_file` name the files of initial and final weights.
    """

    sync: str = "bsp"
    workers: int = 4
    data: str = "mnist5k"
    epochs: int = 10
    batch_size: int = 16
    learning_rate: float = LEARNING_RATE
    momentum: float = 0.5
    seed: int = 0
    straggler: dict[str, float] = field(default_factory=dict)
    transfer_ms: float = 0.0
    compute_ms: float = 0.0
    warm_start: str = ""
    weights_file: str = ""
    pull_delay_share: float = 0.0
    pull_delay_s: float = 0.0
    push_dtype: str = "float32"

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> "TrainingOptions":
        """Read the file of `save`."""
        return TrainingOptions(**json.loads(path.read_text()))


def extra_wait_ns(options: TrainingOptions, rank: int, step_cpu_ns: int) -> int:
    """Return the injected wait of one step in ns: (F - 1) x the step's processor time for a straggler, plus `compute_ms`.

    >>> extra_wait_ns(TrainingOptions(straggler={"0": 3.0}, compute_ms=1.0), 0, 2_000_000)
    5000000
    """
    factor = options.straggler.get(str(rank), 1.0)
    return int((factor - 1.0) * step_cpu_ns + options.compute_ms * 1e6)
