"""Files of the source tree as modules: those in no package, and the names of those in one; programs of tests as files."""

import importlib.util
import pkgutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


def loaded(path: Path) -> Any:
    """The module of such a file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def program(folder: Path, text: str, name: str = "script.py") -> list[str]:
    """The command that runs a program, once it is written into a folder."""
    (folder / name).write_text(text)
    return [sys.executable, str(folder / name)]


def started(command: Sequence[str | Path], **how: Any) -> "subprocess.Popen[str]":
    """A program that runs, with pipes for the text that it writes; `how` has other arguments of Popen."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **{**pipes, **how})


def output(command: Sequence[str | Path], **how: Any) -> str:
    """What a program, which must succeed, writes to standard output; `how` has other arguments of Popen."""
    ended: subprocess.CompletedProcess[str] = subprocess.run(command, capture_output=True, text=True, check=False, **how)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def modules_of(package: ModuleType) -> Iterator[str]:
    """The names of the modules below a package. `pkgutil.walk_packages` would import them, and some import a framework."""
    yield from _below(package.__path__[0], package.__name__)


def _below(folder: str, name: str) -> Iterator[str]:
    for module in pkgutil.iter_modules([folder], f"{name}."):
        if module.name != "fastps.bench" and not module.name.endswith(".__main__"):
            yield module.name
            if module.ispkg:
                yield from _below(f"{folder}/{module.name.rpartition('.')[2]}", module.name)
