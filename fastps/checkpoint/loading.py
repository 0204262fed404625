"""Finding and reading checkpoints: the newest of a directory, whole or in the shares that several nodes have written.

With homes="spread" every node writes its share of the model into a folder of its own, `share-NUMBER-of-COUNT`, in a directory
that all nodes see. The shares of one version of one run are one checkpoint. A version that some node has not written is none.
"""

import heapq
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastps.checkpoint.format import JSON_FILE, PREFIX, Array, Checkpoint, read, read_description, refused, strided, whole
from fastps.errors import CheckpointError
from fastps.job import limits
from fastps.system.time_limit import call_within

logger = logging.getLogger("fastps.checkpointing")

_OF_ONE_SHARE = ("share", "checksums", "header", "digest")
_SHARE = re.compile(r"share-(\d{1,4})-of-(\d{1,4})")
_Saved = tuple[str, int]
"""The run that wrote a share, and the share's version."""
_Shares = dict[int, dict[int, list[Path]]]
"""Number of nodes to number of the share to its checkpoints."""
_Listed = tuple[list[Path], _Shares]


def share_folder(number: int, count: int) -> str:
    """The folder in which a node keeps its shares.

    >>> share_folder(0, 3)
    'share-0-of-3'
    """
    return f"share-{number}-of-{count}"


def has_checkpoints(directory: Path) -> bool:
    """Whether a directory has checkpoints, or shares of them, be they damaged or not."""
    return directory.is_dir() and bool(whole(directory) or _shares(directory))


def load(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint: a folder that `save` returned, or the newest whole one in a directory of checkpoints.

    The newest has the highest number, and of whole checkpoints and the shares of several nodes the higher version. A warning
    names each newer one that is damaged. Raises CheckpointError that names the missing, damaged or foreign field or
    tensor, what was expected and what was found, for each checkpoint of a directory, or that its disk hangs (FASTPS_TIMEOUT).
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
    listed: _Listed = ([], {})
    while listed != (listed := _listed(folder)):  # what a run that goes on has removed meanwhile is not damaged
        damage: list[str] = []
        found = _newest(folder, *listed, damage)
        if found is not None and not damage:
            return found
    if found is None:
        raise CheckpointError(f"checkpoint {folder}: expected a whole one, found none: {'; '.join(damage)}")
    logger.warning("%s; the newest whole one is taken: %s, version %d", "; ".join(damage), found.folder, found.version)
    return found


def _listed(folder: Path) -> _Listed:
    """The checkpoints of a directory, and those of shares. Raises CheckpointError if there are none."""
    alone, shares = (whole(folder), _shares(folder)) if folder.is_dir() else ([], {})
    if not (alone or shares):
        raise CheckpointError(f"checkpoint {folder}: expected {JSON_FILE} or folders {PREFIX}NUMBER there, found neither")
    return alone, shares


def _newest(folder: Path, whole_ones: list[Path], shares: _Shares, damage: list[str]) -> Checkpoint | None:
    """The newest checkpoint of these that can be read. Adds what cannot to `damage`."""
    alone = [[found] for found in reversed(whole_ones)]
    candidates = [alone, *(_of_all_nodes(folder, shares, damage) if shares else [])]  # each kind has numbers of its own
    for parts in heapq.merge(*candidates, key=_version_of, reverse=True):
        try:
            found = [read(part) for part in parts]
            return _joined(folder, found) if parts[0].parent != folder else found[0]
        except CheckpointError as error:
            damage.append(str(error))
    return None


def _version_of(parts: Sequence[Path]) -> float:
    """The version of a checkpoint; infinite for one that cannot be read, which is then the next to be tried, and named."""
    try:
        return int(read_description(parts[0])["version"])
    except CheckpointError:
        return math.inf


def _shares(directory: Path) -> _Shares:
    found: _Shares = {}
    for folder in directory.iterdir():
        match = _SHARE.fullmatch(folder.name)
        if match:
            number, count = map(int, match.groups())
            found.setdefault(count, {})[number] = whole(folder)
    return found


def _of_all_nodes(directory: Path, shares: _Shares, damage: list[str]) -> list[list[list[Path]]]:
    """For each number of nodes the shares of each version that all have written, the newest first.

    Adds what cannot be read to `damage`, and that no version is complete.
    """
    complete: list[list[list[Path]]] = []
    seen = []
    for count, by_number in shares.items():
        saved = [_saved(by_number.get(number, []), damage) for number in range(count)]
        versions = [", ".join(str(version) for _, version in each) or "none" for each in saved]
        seen += [f"{share_folder(number, count)} has {text}" for number, text in enumerate(versions)]
        of_all = [[each[key] for each in saved] for key in (saved[0] if saved else ()) if all(key in each for each in saved)]
        complete.append(of_all[::-1])  # as the first node has numbered them
    if not any(complete):
        damage[:] = [
            f"checkpoint {directory}: expected a version that every node has written, found none ({'; '.join(seen + damage)}):"
            " all nodes write into one directory that they share, or copy their share folders into one"
        ]
    return complete


def _saved(folders: Sequence[Path], damage: list[str]) -> dict[_Saved, Path]:
    found = {}
    for folder in folders:
        try:
            described = read_description(folder)
            if not isinstance(share := described.get("share"), dict):
                raise refused(folder, JSON_FILE, "the description of a share", "another")
            found[str(share.get("run")), int(described["version"])] = folder
        except CheckpointError as error:
            damage.append(str(error))
    return found


def _joined(directory: Path, shares: Sequence[Checkpoint]) -> Checkpoint:
    first = shares[0].description
    parameters = _whole_model(directory, first["share"].get("whole"))
    pieces: dict[str, list[Array]] = {}
    steps: dict[str, int] = {}
    for share in shares:
        for parameter in share.description["parameters"]:
            steps[parameter["name"]] = parameter["steps"]
        for name, array in share.tensors.items():
            if not name.startswith("buffers/"):
                pieces.setdefault(name, []).append(array)
    tensors: dict[str, Array] = {f"buffers/{name}": array for name, array in shares[0].buffers().items()}
    for parameter in parameters:
        suffix, stride = "/" + parameter["name"], parameter.pop("stride")
        for prefix in ("weights", *(f"state/{plane}" for plane in first["rule"]["planes"])):
            flat = np.concatenate(pieces[prefix + suffix]) if prefix + suffix in pieces else np.zeros(0, np.float32)
            last = sum((extent - 1) * step for extent, step in zip(parameter["shape"], stride, strict=True))
            if flat.size != math.prod(parameter["shape"]) or (flat.size and last >= flat.size):
                raise refused(
                    directory, f"tensor {prefix + suffix!r}", f"{parameter['shape']} in all shares", f"{flat.size} floats"
                )
            tensors[prefix + suffix] = strided(flat, parameter["shape"], stride)
        if parameter["name"] not in steps:
            raise refused(directory, f"parameter {parameter['name']!r}", "it in a share", "it in none")
        parameter["steps"] = steps[parameter["name"]]
    description: Mapping[str, Any] = {key: value for key, value in first.items() if key not in _OF_ONE_SHARE}
    return Checkpoint(directory, {**description, "parameters": parameters}, tensors)


def _whole_model(directory: Path, found: Any) -> list[dict[str, Any]]:
    def are_numbers(value: Any, count: int) -> bool:
        return isinstance(value, list) and len(value) == count and all(type(each) is int and each >= 0 for each in value)

    for each in found if isinstance(found, list) else [found]:
        dimensions = len(each["shape"]) if isinstance(each, dict) and isinstance(each.get("shape"), list) else -1
        is_named = isinstance(each, dict) and isinstance(each.get("name"), str) and type(each.get("group")) is int
        if not (is_named and are_numbers(each["shape"], dimensions) and are_numbers(each.get("stride"), dimensions)):
            raise refused(directory, "a share's parameter", "its name, group, shape and stride", repr(each)[:80])
    return [dict(each) for each in found]
