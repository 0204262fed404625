"""The identity of this process: its rank, the number of workers and its job, from the script or the launcher's variables.

The module reads the variables of fastps' own launcher, of torchrun, of launchers that set torchrun's, and of SLURM's and MPI's.
Without any, this process is alone. One variable is set here: the process that has the identity, because a program that it
starts inherits the others. What other modules read of the environment is parsed here: a variable that holds nonsense is an
error that names it.
"""

import contextlib
import hashlib
import logging
import os
import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing import process
from pathlib import Path
from typing import Any

from fastps.errors import UsageError
from fastps.job.launchers import MOST, launched, whole
from fastps.job.options import OPTIONS, tell_misspelt, value_of

logger = logging.getLogger("fastps.job")
_imported: list[str] = []
TRACE_VARIABLE = "FASTPS_TRACE"  # the file that a launch records its trace into
# The first variable that is set counts. Lightning sets only LOCAL_RANK, the rank on one machine; others set it on each node.
_RANKS, _WORKERS = ("FASTPS_RANK", "RANK", "LOCAL_RANK"), ("FASTPS_WORKERS", "WORLD_SIZE")
_divides = False  # whether the script has asked which worker this is
LONGEST_JOB = 64  # bytes; the rest of a socket's name says which node, optimizer and place it is
_OF_TORCHRUN = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
_SPAWN = "fastps.spawn(fn, args, workers=N) starts processes that find each other"


def rank() -> int:
    """This worker's number, from 0; 0 when alone, and where no launcher has started this process.

    If neither FASTPS_RANK nor RANK has it, this is the rank in torch's process group, if there is one, else that of SLURM or
    MPI, else LOCAL_RANK. Raises UsageError if the environment has a number of workers above 1 and no rank.
    """
    note_division()
    return own_rank()


def own_rank() -> int:
    """What `rank` returns, for fastps itself: it does not say that the script divides its data. Raises UsageError."""
    if not any(name in os.environ for name in _RANKS[:2]):
        group = _process_group()
        if group is not None:
            return int(group.get_rank())
        if (found := launched()) is not None:
            return found.rank
        if "LOCAL_RANK" not in os.environ and _number(_WORKERS, 1) > 1:
            raise UsageError(
                f"the environment says {own_world_size()} workers, but not which one this is: set FASTPS_RANK (or RANK), or"
                " give rank= and workers="
            )
    return _number(_RANKS, 0)


def world_size() -> int:
    """The number of workers of the job; 1 when alone, and where no launcher has started this process."""
    note_division()
    return own_world_size()


def own_world_size() -> int:
    """What `world_size` returns to scripts, for fastps itself. Raises UsageError."""
    if any(name in os.environ for name in _WORKERS):
        return _number(_WORKERS, 1)
    group = _process_group()
    if group is not None:
        return int(group.get_world_size())
    found = launched()
    return 1 if found is None else found.workers


def _process_group() -> Any:
    """torch.distributed, if this process has imported it and initialized a process group; else None."""
    distributed = sys.modules.get("torch.distributed")
    return distributed if distributed is not None and distributed.is_available() and distributed.is_initialized() else None


def note_division() -> None:
    """Note that the script asks which worker this is, or for a share: it divides its data."""
    global _divides
    _divides = True


def is_undivided() -> bool:
    """Whether `fastps run` started this worker as one of several, and the script has not asked which one it is."""
    is_launched = "FASTPS_LAUNCHER" in os.environ and not any(name in os.environ for name in _RANKS[1:])
    return is_launched and not _divides and not is_virtual()


@dataclass(frozen=True)
class Identity:
    """The job and the rank of a process."""

    job: str  # the job's name, or the common prefix of the names of a launch's jobs; see `name`
    rank: int  # the worker's number, from 0
    workers: int
    instance: int = 0  # the number, from 0, of this optimizer in a script that names none of its jobs

    @property
    def name(self) -> str:
        """The job's name: JOB for a script's first optimizer, JOB.1 for the next."""
        return self.job if self.instance == 0 else f"{self.job}.{self.instance}"

    def of_instance(self, instance: int) -> "Identity":
        """The same worker in another of the launch's jobs."""
        return replace(self, instance=instance)


def identity(job: str | None = None, rank: int | None = None, workers: int | None = None, *, instance: int = 0) -> Identity:
    """The identity from the script's arguments (`job`, `rank`, `workers`), and from the environment where they are None.

    `instance` is the number of the optimizer in a script that names no job. Raises UsageError for a rank or a number of workers
    out of range, in a child of multiprocessing that gets its rank neither from the script nor from a launcher, and in a program
    that a worker has started and that inherited the worker's.

    >>> identity("mnist", 1, 4).name
    'mnist'
    """
    check_main_guard()
    for name in OPTIONS:
        value_of(name)
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
    count = own_world_size() if workers is None else workers
    number = (0 if workers is not None else own_rank()) if rank is None else rank
    if not 0 <= number < count:
        raise UsageError(f"expected a rank from 0 to the number of workers, less one, found rank {number} of {count} workers")
    if number == 0 and "FASTPS_LAUNCHER" not in os.environ:  # else the launcher has told of them
        tell_misspelt()
    if job is not None:
        return Identity(check_job(job), number, count)
    if workers is not None and workers > 1:
        raise UsageError(f"workers={workers} needs job=: expected a name that all {workers} processes give, found none")
    if workers is None and is_told:
        _claim(number)
    return Identity(secrets.token_hex(8) if workers == 1 else _job_of_launch(), number, count, instance)


def _claim(rank: int) -> None:
    """Note that this process has the environment's identity. Raises UsageError if the process that has started it has it."""
    values = [os.environ.get(name, "") for name in (*_RANKS, *_WORKERS, "FASTPS_JOB", *_OF_TORCHRUN)]
    mark = hashlib.sha256(os.fsencode("\0".join([*values, repr(launched())]))).hexdigest()[:16]
    owner, _, found = os.environ.get("FASTPS_PROCESS", "").partition(" ")
    if found == mark and owner != str(os.getpid()):
        raise UsageError(
            f"this process was started by worker {rank} (process {owner}), whose rank and job it has inherited: give workers=1"
            " to train alone here, or start it without the launcher's variables (FASTPS_*, RANK, WORLD_SIZE, MASTER_*)"
        )
    os.environ["FASTPS_PROCESS"] = f"{os.getpid()} {mark}"


@contextlib.contextmanager
def importing(script: str) -> Iterator[None]:
    """Inside the block a script is imported for its functions, and may begin no job."""
    _imported.append(script)
    try:
        yield
    finally:
        _imported.pop()


def check_main_guard() -> None:
    """Raise UsageError in a process that runs a script from its first line only to have its functions."""
    if _imported:
        raise UsageError(
            f'{_imported[-1]} trains when it is imported for its functions: put what trains under `if __name__ == "__main__":`'
        )
    if getattr(process.current_process(), "_inheriting", False):
        raise UsageError(
            "a child of multiprocessing (a DataLoader's worker, say) runs this script from its first line, and came to fastps:"
            ' guard your script, so that only functions and imports are outside of `if __name__ == "__main__":`; the start'
            " methods spawn and forkserver need that"
        )


def _job_of_launch() -> str:
    """The job name that all workers of this launch derive, and no other launch does.

    It comes from FASTPS_JOB, else from SLURM or MPI, else from torchrun's run id, address and restart count. It is random when
    this process is alone.
    """
    own = os.environ.get("FASTPS_JOB")
    if own is None and (found := launched()) is not None and _process_group() is None:
        text = found.job or os.environ.get("FASTPS_RENDEZVOUS", "")
        if not text:
            raise UsageError(
                f"{found.launcher} started {found.workers} processes and gives their launch no name: set FASTPS_JOB to the same"
                " text for all of them"
            )
        own = hashlib.sha256(os.fsencode(text)).hexdigest()[:16]
    if own is None:
        values = [os.environ.get(key, "") for key in _OF_TORCHRUN]
        if not any(values[:3]):
            if own_world_size() > 1:
                raise UsageError(
                    f"WORLD_SIZE is {own_world_size()}, but neither FASTPS_JOB nor torchrun's variables say which job this is:"
                    " start with `fastps run -n N script.py` or torchrun, or give job=, or set FASTPS_JOB, to the same"
                    " text for all"
                )
            return secrets.token_hex(8)
        own = hashlib.sha256(os.fsencode("\0".join(values))).hexdigest()[:16]
    return check_job(own)


def check_job(name: str, most: int = LONGEST_JOB) -> str:
    """Return a job's name. Raises UsageError if it is empty, has more than `most` bytes, or cannot be printed."""
    if not name.isprintable() or not 1 <= len(os.fsencode(name)) <= most:
        raise UsageError(
            f"expected a job's name (job=, FASTPS_JOB) of 1 to {most} bytes of printable text, found {name[:100]!r}; give the"
            " job another name"
        )
    return name


def job_name(instance: int) -> str:
    """The name of the launch's job number `instance`. All workers of this launch derive the same, and no other launch does."""
    return Identity(_job_of_launch(), 0, 1, instance).name


def joins() -> bool:
    """Whether the launcher started this worker to replace a lost one, in a job whose other workers still run."""
    return _number(("FASTPS_JOINS",), 0) > 0


def is_virtual() -> bool:
    """Whether this worker's job runs in virtual time (`fastps simulate --script`, `fastps replay`)."""
    return bool(os.environ.get("FASTPS_VIRTUAL"))


def checkpoints_of(directory: str | os.PathLike[str]) -> Path:
    """Where a script's checkpoints go: in virtual time into a folder that ends with the run, and not beside a real run's."""
    return Path(os.environ["FASTPS_VIRTUAL"], *Path(directory).absolute().parts[1:]) if is_virtual() else Path(directory)


def pauses(worker: int, step: int) -> bool:
    """Whether this step of this worker runs under pdb (`fastps replay --pause`)."""
    return os.environ.get("FASTPS_PAUSE") == f"{worker}:{step}"


def sync_of(given: Any) -> Any:
    """The discipline of a job: the script's, else FASTPS_SYNC, else "bsp". In virtual time the script's own does not count."""
    wanted = os.environ.get("FASTPS_SYNC", "")
    if given is None or is_virtual():
        return wanted or "bsp"
    own = str(getattr(given, "spec", given))
    if wanted and own != wanted and os.environ.get("FASTPS_RANK") == "0":
        logger.warning("the script's own sync=%s counts, and --sync %s (FASTPS_SYNC) has no effect", own, wanted)
    return given


def _number(names: tuple[str, ...], default: int) -> int:
    name = next((name for name in names if name in os.environ), None)
    if name is None:
        return default
    if (found := whole(os.environ[name])) is None:
        raise UsageError(
            f"expected the environment variable {name} to be a whole number, found {os.environ[name][:40]!r}; the largest is"
            f" {MOST:,}"
        )
    return found
