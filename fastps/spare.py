"""A spare worker: a process that has imported what takes long, and waits to become the replacement of a worker that was lost.

Run by the launcher as `python -m fastps.spare MODULE...`; one line of JSON on its standard input says what to become. Refuses
to choose anything: without an order it ends.
"""

import importlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

DEFAULT_IMPORTS = ("torch", "fastps.torch")


def order(environment: dict[str, str], arguments: list[str], module: bool) -> bytes:
    """What the launcher writes to a spare: the variables that are its own, and the script or module with its arguments."""
    return json.dumps({"environment": environment, "arguments": arguments, "module": module}).encode() + b"\n"


def wait_for_order(imports: list[str]) -> dict[str, Any] | None:
    """Import, then wait; None when the launcher has gone."""
    for name in imports:
        importlib.import_module(name)
    line = sys.stdin.buffer.readline()
    return json.loads(line) if line else None


def become(found: dict[str, Any]) -> None:
    """Run the script or module as `python SCRIPT ARGUMENTS` or `python -m MODULE ARGUMENTS` would."""
    os.environ.update(found["environment"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    name, sys.argv = found["arguments"][0], list(found["arguments"])
    if found["module"]:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(name).resolve().parent)
        runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    _found = wait_for_order(sys.argv[1:])
    if _found is not None:
        become(_found)
