"""How a Trainer starts its workers: the script once more for each (as Lightning's ddp), or by multiprocessing (as ddp_spawn).

Both are Lightning's own launchers. What is added: the workers' variables name the job, a worker ends with the process that has
started it, and the process waits for its workers at its end.
"""

import atexit
import contextlib
import os
import secrets
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.strategies.launchers.multiprocessing import _disable_module_memory_sharing
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher

from fastps.errors import WorkerDiedError
from fastps.job import environment, launchers
from fastps.job.limits import timeout_s
from fastps.job.nodes import nodes_of_environment
from fastps.network.meeting import join_meeting
from fastps.processes.outcome import how_it_ended
from fastps.system.processes import ask_to_die_with_parent

_STARTER = "FASTPS_STARTED_BY"  # the process id of the process that has started this worker
_GRACE_S = 5.0  # workers have this long to end after the main process has failed


class ScriptLauncher(_SubprocessScriptLauncher):
    """Starts `python SCRIPT ARGUMENTS` for each other worker; this process is worker 0. Under a launcher it starts none."""

    def __init__(self, cluster_environment: Any, num_processes: int) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes=1)
        self._failed = False
        if os.environ.get(_STARTER) == str(os.getppid()):
            ask_to_die_with_parent(os.getppid())

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        if not is_launched() and self.num_processes > 1:
            os.environ[JOB], os.environ[WORKERS] = secrets.token_hex(8), str(self.num_processes)
            os.environ[_STARTER] = str(os.getpid())
            self._call_children_scripts()
            atexit.register(self._reap)
        _set_num_threads_if_needed(num_processes=self.num_processes)  # this worker's share of the cores
        try:
            return function(*args, **kwargs)
        except BaseException:
            self._failed = True
            raise

    def check_started(self) -> None:
        """Raise WorkerDiedError if a worker has ended before it met the others."""
        for rank, process in enumerate(self.procs, 1):
            if (code := process.poll()) is not None:
                raise WorkerDiedError(
                    f"worker {rank} (process {process.pid}) {how_it_ended(code)} before it met the others: expected the script"
                    " to reach trainer.fit (or validate, test, predict) in every worker; see its own output for the reason",
                    rank,
                )

    def _reap(self) -> None:
        """At exit: wait for the workers, which may still run the rest of the script; end them if this process has failed."""
        for process in self.procs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S if self._failed else timeout_s())
        for process in self.procs:
            if process.poll() is None:
                process.kill()
                process.wait()


class ProcessLauncher(_MultiProcessingLauncher):
    """Starts all workers by multiprocessing; the results of worker 0 come back into this process."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the workers, call the function in each, and return what worker 0 returns."""
        given = {JOB: secrets.token_hex(8), WORKERS: str(self._strategy.num_processes)}
        with _variables(given):
            return super().launch(function, *args, trainer=trainer, **kwargs)

    def _wrapping_function(self, process_idx: int, trainer: Any, function: Any, args: Any, kwargs: Any, *rest: Any) -> None:
        """Run a worker. The module that it was sent lies in shared memory; each worker trains a copy."""
        if self._start_method == "forkserver":  # Lightning does the same for "spawn"
            args, kwargs = _disable_module_memory_sharing((args, kwargs))
        super()._wrapping_function(process_idx, trainer, function, args, kwargs, *rest)

    def check_started(self) -> None:
        """Do nothing: the starting process watches its workers."""


@contextlib.contextmanager
def _variables(given: dict[str, str]) -> Iterator[None]:
    names = [*given, "MASTER_PORT"]
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


JOB, WORKERS = "FASTPS_JOB", "FASTPS_WORKERS"
_TOLD_BY = ("FASTPS_RANK", "RANK", "LOCAL_RANK")


def is_launched() -> bool:
    """Whether something has started this process as a worker: `fastps run`, torchrun, srun, mpirun, or the Trainer itself."""
    return any(name in os.environ for name in _TOLD_BY) or launchers.launched() is not None


class FastpsEnvironment(ClusterEnvironment):
    """The environment of one worker. Before the Trainer has started its workers, which are on this node, it is worker 0."""

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
        nodes = nodes_of_environment()
        return self.global_rank() if nodes is None else nodes.local_rank

    def local_world_size(self) -> int:
        """The number of workers of this node."""
        nodes = nodes_of_environment()
        return self.world_size() if nodes is None else nodes.local_workers

    def node_rank(self) -> int:
        nodes = nodes_of_environment()
        return 0 if nodes is None else join_meeting(nodes, timeout_s()).number
