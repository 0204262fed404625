"""Which worker this process is, and which job it belongs to: said by the script, else read from what a launcher set.

Understands fastps' own launcher, torchrun, and whatever sets torchrun's variables; without any, this process is alone. Changes
nothing of the environment.
"""

import hashlib
import os
import secrets
import sys
from dataclasses import dataclass, replace
from multiprocessing import process
from typing import Any

from fastps.errors import UsageError

TRACE_VARIABLE = "FASTPS_TRACE"  # the file that a launch records its trace into
# The first that is set counts. Lightning gives its processes LOCAL_RANK alone, which on one machine is the rank.
_RANKS, _WORKERS = ("FASTPS_RANK", "RANK", "LOCAL_RANK"), ("FASTPS_WORKERS", "WORLD_SIZE")
_SPAWN = "fastps.spawn(fn, args, workers=N) starts processes that find each other"


def rank() -> int:
    """This worker's number, from 0; 0 when alone. Raises UsageError where the environment says how many there are, and no rank.

    Of a process that no variable numbers, its number in torch's process group, if it is in one.
    """
    if not any(name in os.environ for name in _RANKS):
        group = _process_group()
        if group is not None:
            return int(group.get_rank())
        if _number(_WORKERS, 1) > 1:
            raise UsageError(
                f"the environment says {world_size()} workers, but not which one this is: set FASTPS_RANK (or RANK), or give"
                " rank= and workers="
            )
    return _number(_RANKS, 0)


def world_size() -> int:
    """Number of workers of the job; 1 when alone."""
    group = None if any(name in os.environ for name in _WORKERS) else _process_group()
    return _number(_WORKERS, 1) if group is None else int(group.get_world_size())


def _process_group() -> Any:
    """torch.distributed, where this process has imported it and begun a process group."""
    distributed = sys.modules.get("torch.distributed")
    return distributed if distributed is not None and distributed.is_available() and distributed.is_initialized() else None


_rank = rank  # `identity` has an argument of that name


@dataclass(frozen=True)
class Identity:
    """Which worker of which job a process is.

    Attributes:
        job: the job's name, or what the names of a launch's jobs begin with; see `name`.
        rank, workers: its number, from 0, and how many there are.
        instance: counts the optimizers of a script that names none of its jobs, from 0.
    """

    job: str
    rank: int
    workers: int
    instance: int = 0

    @property
    def name(self) -> str:
        """The job's name: a script's first optimizer has the launch's own, the next JOB.1."""
        return self.job if self.instance == 0 else f"{self.job}.{self.instance}"

    def of_instance(self, instance: int) -> "Identity":
        """The same worker in another of the launch's jobs."""
        return replace(self, instance=instance)


def identity(job: str | None = None, rank: int | None = None, workers: int | None = None, *, instance: int = 0) -> Identity:
    """What the script says (`job`, `rank`, `workers`), and of the rest what the environment says.

    `instance` counts the optimizers of a script that names no job. Raises UsageError for numbers that no worker can have, and
    in a child of multiprocessing where neither the script nor a launcher says which worker it is.

    >>> identity("mnist", 1, 4).name
    'mnist'
    """
    check_main_guard()
    is_child = process.parent_process() is not None
    is_told = any(name in os.environ for name in (*_RANKS, *_WORKERS)) or _process_group() is not None
    if is_child and rank is None and workers is None and not is_told:
        raise UsageError(
            "this process was started by multiprocessing, and nobody has said which worker it is: expected rank= and workers="
            " (DistributedOptimizer(..., job='any name', rank=rank, workers=N)), found neither them nor a launcher's variables,"
            f" so that it would train alone; {_SPAWN}, and workers=1 lets a process train alone"
        )
    if (rank is None) != (workers is None) and workers != 1:
        raise UsageError(f"expected rank= and workers= together, found rank={rank} and workers={workers}")
    count = world_size() if workers is None else workers
    number = (0 if workers is not None else _rank()) if rank is None else rank
    if not 0 <= number < count:
        raise UsageError(f"expected a rank from 0 to the number of workers, less one, found rank {number} of {count} workers")
    if job is not None:
        return Identity(job, number, count)
    if workers is not None and workers > 1:
        raise UsageError(f"workers={workers} needs job=: expected a name that all {workers} processes give, found none")
    return Identity(secrets.token_hex(8) if workers == 1 else _job_of_launch(), number, count, instance)


def check_main_guard() -> None:
    """Raises UsageError in a child of multiprocessing that is only about to begin, and runs its parent's script to that end."""
    if getattr(process.current_process(), "_inheriting", False):
        raise UsageError(
            "a child of multiprocessing (a DataLoader's worker, say) runs this script from its first line, and came to fastps:"
            ' guard your script, so that only functions and imports are outside of `if __name__ == "__main__":`; the start'
            " methods spawn and forkserver need that"
        )


def _job_of_launch() -> str:
    """The name that all workers of this launch derive, and no other launch does.

    From FASTPS_JOB, else from torchrun's run id, address and restart count; random when alone.
    """
    own = os.environ.get("FASTPS_JOB")
    if own is None:
        keys = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
        values = [os.environ.get(key, "") for key in keys]
        if not any(values[:3]):
            if world_size() > 1:
                raise UsageError(
                    f"WORLD_SIZE is {world_size()}, but neither FASTPS_JOB nor torchrun's variables say which job this is:"
                    " start with `fastps run -n N script.py` or torchrun, or give job=, or set FASTPS_JOB, to the same"
                    " text for all"
                )
            return secrets.token_hex(8)
        own = hashlib.sha256("\0".join(values).encode()).hexdigest()[:16]
    return own


def job_name(instance: int) -> str:
    """The name that all workers of this launch derive for their `instance`-th optimizer, and no other launch does."""
    return Identity(_job_of_launch(), 0, 1, instance).name


def joins() -> bool:
    """Whether this worker was started in the place of one that was lost, while others of its job are there to be joined."""
    return _number(("FASTPS_JOINS",), 0) > 0


def _number(names: tuple[str, ...], default: int) -> int:
    """The first of these variables that is set."""
    name = next((name for name in names if name in os.environ), None)
    if name is None:
        return default
    text = os.environ[name]
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"expected the environment variable {name} to be a whole number, found {text!r}") from None
