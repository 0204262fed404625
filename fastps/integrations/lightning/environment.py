"""Where a worker of a Trainer stands: its rank and the number of workers, as fastps reads them from a launcher's variables."""

import os

from lightning.fabric.plugins import ClusterEnvironment

from fastps.job import environment, launchers

JOB, WORKERS = "FASTPS_JOB", "FASTPS_WORKERS"
_TOLD_BY = ("FASTPS_RANK", "RANK", "LOCAL_RANK")


def is_launched() -> bool:
    """Whether something has started this process as a worker: `fastps run`, torchrun, srun, mpirun, or the Trainer itself."""
    return any(name in os.environ for name in _TOLD_BY) or launchers.launched() is not None


class FastpsEnvironment(ClusterEnvironment):
    """The environment of one worker on one machine. Before the Trainer has started its workers, this process is worker 0."""

    def __init__(self) -> None:
        super().__init__()
        self._workers = 1

    @property
    def creates_processes_externally(self) -> bool:
        return is_launched()

    @property
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        """0: the workers meet at a socket that the job names, and no port is agreed on before."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Whether Lightning should choose this environment by itself: no, the strategy brings it."""
        return False

    def world_size(self) -> int:
        return environment.world_size() if is_launched() else self._workers

    def set_world_size(self, size: int) -> None:
        self._workers = size

    def global_rank(self) -> int:
        return environment.rank() if is_launched() else 0

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the launcher gives the rank."""

    def local_rank(self) -> int:
        return self.global_rank()

    def node_rank(self) -> int:
        return 0
