"""What decides a training run: the options that the command line reads and every worker is given. Refuses to import torch."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

# With 0.05 the accuracy of four workers on MNIST-5k swings now and then where each push is folded by itself: that is what stale
# gradients do (docs/disciplines.md).
LEARNING_RATE = 0.03


@dataclass(frozen=True)
class TrainingOptions:
    """What decides a run.

    `straggler` maps a worker to the factor by which its compute time is stretched. Of the responses to pulls,
    `pull_delay_share` come `pull_delay_s` seconds late (PSP-SGD, section 4.2).
    `push_dtype` is what gradients are pushed in, by torch's name of it.
    `warm_start` and `weights_file` are files of weights to begin with and to write at the end.
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
        """Read what `save` wrote."""
        return TrainingOptions(**json.loads(path.read_text()))


def extra_wait_ns(options: TrainingOptions, rank: int, step_cpu_ns: int) -> int:
    """The honest wait of one step: (F - 1) x the step's processor time for a straggler of factor F, and injected computing.

    >>> extra_wait_ns(TrainingOptions(straggler={"0": 3.0}, compute_ms=1.0), 0, 2_000_000)
    5000000
    """
    factor = options.straggler.get(str(rank), 1.0)
    return int((factor - 1.0) * step_cpu_ns + options.compute_ms * 1e6)
