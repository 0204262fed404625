"""Finding and reading checkpoints: a folder of one, or the newest of a directory."""

import logging
import os
from pathlib import Path

from fastps.checkpoint.format import JSON_FILE, PREFIX, Checkpoint, read, whole
from fastps.errors import CheckpointError
from fastps.job import limits
from fastps.system.time_limit import call_within

logger = logging.getLogger("fastps.checkpointing")


def has_checkpoints(directory: Path) -> bool:
    """Whether a directory has checkpoints, be they damaged or not."""
    return directory.is_dir() and bool(whole(directory))


def load(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint: a folder that `save` returned, or the newest whole one in a directory of checkpoints.

    The newest has the highest number. A warning names each newer one that is damaged. Raises CheckpointError that names the
    missing, damaged or foreign field or tensor, what was expected and what was found, for each checkpoint of a directory, or
    that its disk hangs (FASTPS_TIMEOUT).
    """
    limit_s = limits.timeout_s()
    try:
        return call_within(limit_s, lambda: _load(Path(path)), f"the checkpoint {path} is read")
    except TimeoutError:
        raise CheckpointError(
            f"checkpoint {path}: expected it to be read within {limit_s:g} s, found that its disk hangs, or is slow: raise"
            " FASTPS_TIMEOUT if it is slow"
        ) from None
    except OSError as error:
        raise CheckpointError(f"checkpoint {path}: expected a folder that can be read, found {error}") from error


def _load(folder: Path) -> Checkpoint:
    if (folder / JSON_FILE).is_file():
        return read(folder)
    listed: list[Path] = []
    while listed != (listed := _listed(folder)):  # what a run that goes on has removed meanwhile is not damaged
        damage: list[str] = []
        found = _newest(listed, damage)
        if found is not None and not damage:
            return found
    if found is None:
        raise CheckpointError(f"checkpoint {folder}: expected a whole one, found none: {'; '.join(damage)}")
    logger.warning("%s; the newest whole one is taken: %s, version %d", "; ".join(damage), found.folder, found.version)
    return found


def _listed(folder: Path) -> list[Path]:
    """The checkpoints of a directory. Raises CheckpointError if there are none."""
    if not has_checkpoints(folder):
        raise CheckpointError(f"checkpoint {folder}: expected {JSON_FILE} or folders {PREFIX}NUMBER there, found neither")
    return whole(folder)


def _newest(folders: list[Path], damage: list[str]) -> Checkpoint | None:
    """The newest checkpoint of these that can be read. Adds what cannot to `damage`."""
    for folder in reversed(folders):
        try:
            return read(folder)
        except CheckpointError as error:
            damage.append(str(error))
    return None
