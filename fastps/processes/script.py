"""A script and its arguments on a command line, and the command that each worker runs."""

import os
import re
import sys
from pathlib import Path

from fastps.errors import UsageError


def command_of(arguments: list[str], module: bool) -> list[str]:
    """What each worker runs. A Python interpreter before the script, as for other launchers, is this one. Raises UsageError."""
    if module:
        return [sys.executable, "-m", *arguments]
    if _names_python(arguments[0]) and len(arguments) > 1:
        arguments = arguments[1:]
        if arguments[0].startswith("-"):
            return [sys.executable, *arguments]  # flags of Python's own, -m among them
    if not (script := Path(arguments[0])).is_file():
        found = "the folder" if script.is_dir() else "no file"
        raise UsageError(f"expected a script, found {found} {arguments[0]!r}; fastps run -m runs a module")
    return [sys.executable, *arguments]


def _names_python(argument: str) -> bool:
    """Whether this is an interpreter: a bare name that no script here has, or a program of that name in another folder."""
    path = Path(argument)
    if not re.fullmatch(r"python[0-9.]*", path.name):
        return False
    return not path.is_file() if path.parent == Path() else os.access(path, os.X_OK)
