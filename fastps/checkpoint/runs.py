"""The run that wrote a checkpoint: a folder of checkpoints belongs to one run, and another run deletes none of them.

A run is one job of a launch of fastps with the workers that it replaces, or else one arena. A run that resumes goes on with
those before it: each checkpoint names its run and the earlier ones. Each further optimizer of a script has a folder of its own.
"""

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastps.checkpoint.format import Checkpoint, number_of, read_description, whole
from fastps.errors import CheckpointError
from fastps.job import limits
from fastps.membership.job_memory import JobMemory
from fastps.system.machine import boot_id
from fastps.system.time_limit import call_within

_MOST_EARLIER = 100  # of a run that is resumed again and again
_OF_JOB = "."  # between a run's launch and its job
_OF_NODE = re.compile(r"\.node\d+(?=(\.\d+)?$)")  # in the name of a leaf's job
_begun: set[str] = set()  # by this process: a script may wrap one optimizer after the other


@dataclass(frozen=True)
class Run:
    """A run, the runs from whose checkpoints it goes on, and the checkpoint and the version with which it begins."""

    id: str
    earlier: tuple[str, ...] = ()
    resumed: Path | None = None
    begins: int = 0

    @classmethod
    def of(cls, store: JobMemory, resumed: Checkpoint | None = None) -> "Run":
        """The run of a job, the same in all its workers."""
        launch = _of_launch()
        if launch:
            found = f"{launch}{_OF_JOB}{_hashed(_OF_NODE.sub('', store.job))}"
        else:  # the memory of an arena has a number that no other has until the machine starts again
            memory = os.fstat(store.descriptor)
            found = _hashed(f"{boot_id()}/{memory.st_dev}/{memory.st_ino}/{store.job}")
        _begun.add(found)
        if resumed is None:
            return cls(found)
        return cls(found, earlier_runs(resumed)[-_MOST_EARLIER:], resumed.folder.resolve(), resumed.version)

    def described(self) -> dict[str, Any]:
        """Its part of the checkpoint's JSON file."""
        return {"run": self.id, "earlier_runs": list(self.earlier)}

    def wrote(self, folder: Path) -> bool:
        """Whether this run wrote a checkpoint."""
        return run_of(folder) == self.id

    def owns(self, folder: Path) -> bool:
        """Whether this run, or one with which it goes on, wrote a checkpoint. A damaged one is nobody's."""
        return run_of(folder) in (self.id, *self.earlier)

    def may_delete(self, folder: Path) -> bool:
        """Whether this run owns a checkpoint and did not begin with it: a lost worker's replacement reads that one again."""
        return self.owns(folder) and folder.resolve() != self.resumed


def folder_of(given: Path, instance: int) -> Path:
    """Where the script's optimizer number `instance` has its checkpoints, if the launch names this folder or checkpoint.

    >>> folder_of(Path("runs/a"), 0).as_posix(), folder_of(Path("runs/a/checkpoint-000003"), 1).as_posix()
    ('runs/a', 'runs/a/optimizer1')
    """
    if instance == 0:
        return given
    return (given.parent if number_of(given) else given) / f"optimizer{instance}"


def earlier_runs(resumed: Checkpoint | None) -> tuple[str, ...]:
    """The runs with which a job goes on that resumes from this checkpoint."""
    return () if resumed is None else (*resumed.description.get("earlier_runs", ()), _named(resumed.description))


def run_of(folder: Path) -> str | None:
    """The run that wrote a checkpoint; "" for one of format 1, and None for a damaged one."""
    try:
        return _named(read_description(folder))
    except CheckpointError:
        return None


def _named(description: Mapping[str, Any]) -> str:
    return str(description.get("run", ""))


def _of_launch() -> str:
    launch = os.environ.get("FASTPS_RUN")
    return _hashed(launch) if launch else ""


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def check_folder(
    directory: Path, resumed: Checkpoint | None, *, overwrite: bool, needed_bytes: int = 0, timeout_s: float | None = None
) -> None:
    """Check that a run may write its checkpoints into a directory. With `overwrite`, delete those of other runs there.

    `needed_bytes` is the size of one checkpoint. Raises CheckpointError for a directory that has another run's, unless it is
    resumed from there, that cannot be written, has no room for one, or does not answer within the timeout.
    """
    limit_s = limits.timeout_s(timeout_s)
    try:
        others = call_within(limit_s, lambda: _others(directory, resumed, needed_bytes), f"the folder {directory} answers")
    except TimeoutError:
        raise _refused(directory, "an answer", f"none within {limit_s:g} s: its disk hangs") from None
    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"  # of torchrun: the same launch
    own = [] if resumed is None else [resumed.folder.resolve(), resumed.folder.resolve().parent]
    if not others or is_restart or directory.resolve() in own:
        return
    if not overwrite:
        raise CheckpointError(
            f"checkpoints in {directory}: expected a folder without another run's, found {others[-1].name} of an earlier run:"
            f" go on from it (--resume {directory}, resume=), delete what is there (--overwrite, FASTPS_OVERWRITE=1), or give"
            " another folder"
        )
    try:
        for folder in others:
            if folder.is_symlink():
                folder.unlink()
            else:
                shutil.rmtree(folder)
    except OSError as error:
        raise _refused(directory, "other runs' checkpoints that can be deleted", str(error)) from error


def _others(directory: Path, resumed: Checkpoint | None, needed_bytes: int) -> list[Path]:
    """The checkpoints of other runs in a directory that can be written, and the damaged ones. Raises CheckpointError."""
    _try(directory, needed_bytes)
    known = {*_begun, *earlier_runs(resumed)} | ({launch} if (launch := _of_launch()) else set())
    runs = {folder: run_of(folder) for folder in whole(directory)}
    return [folder for folder, run in runs.items() if run is None or known.isdisjoint((run, run.partition(_OF_JOB)[0]))]


def _try(directory: Path, needed_bytes: int) -> None:
    """Write a file into the directory, and ask how much room there is. Raises CheckpointError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            found = os.fstatvfs(file.fileno())
    except OSError as error:
        raise _refused(directory, "a folder that can be written", str(error)) from error
    if (free := found.f_bavail * found.f_frsize) < needed_bytes:
        raise _refused(directory, f"{needed_bytes / 1e6:.0f} MB of room for a checkpoint", f"{free / 1e6:.0f} MB")


def _refused(directory: Path, expected: str, found: str) -> CheckpointError:
    return CheckpointError(f"checkpoints in {directory}: expected {expected}, found {found}; give another folder, or none")
