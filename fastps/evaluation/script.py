"""The script of `fastps evaluate`, which has the model and the evaluation. Its main part (`__main__`) does not run."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fastps.errors import UsageError
from fastps.job.environment import importing


def functions_of(script: Path, names: Sequence[str]) -> list[Callable[..., Any]]:
    """Import a script as Python imports a module of its folder, and return its functions of these names. Raises UsageError."""
    if not script.is_file():
        raise UsageError(f"expected a script, found no file {str(script)!r}")
    sys.path.insert(0, str(script.resolve().parent))
    spec = importlib.util.spec_from_file_location(script.stem, script)
    if spec is None or spec.loader is None:
        raise UsageError(f"expected a script of Python, whose name ends with .py, found {script}")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(script.stem, module)  # classes of the script pickle, for the workers of a DataLoader
    with importing(script.name):
        spec.loader.exec_module(module)
    found = [getattr(module, name, None) for name in names]
    for name, each in zip(names, found, strict=True):
        if not callable(each):
            raise UsageError(f"{script}: expected a function {name}, found none; write it, or name another with an option")
    return [each for each in found if callable(each)]
