"""The folder for what fastps makes once on a machine: compiled loops and kernels."""

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_folder() -> Path:
    """The folder for what fastps builds on this machine. A relative XDG_CACHE_HOME is ignored, as its specification asks."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if given.startswith("/") else Path.home() / ".cache") / "fastps"


def kept(name: str, make: Callable[[], bytes]) -> bytes:
    """The contents of a file of the cache folder, which `make` makes where there is none.

    Processes may call it at the same time. A folder that cannot be written keeps nothing.
    """
    path = cache_folder() / name
    with contextlib.suppress(OSError):
        return path.read_bytes()
    made = make()
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            whole = Path(folder) / "whole"
            whole.write_bytes(made)
            whole.replace(path)  # so that no process sees a part of it
    return made
