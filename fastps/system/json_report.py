"""The JSON report of every command: the command, the version, the machine, and the rows."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastps.system.machine import machine
from fastps.version import __version__


def write_json(command: str, rows: Sequence[Mapping[str, Any]], target: str) -> None:
    """Write `{"command", "version", "machine", "rows"}` to a file, or to stdout for "-"."""
    text = json.dumps({"command": command, "version": __version__, "machine": machine(), "rows": rows}, indent=2)
    if target == "-":
        sys.stdout.write(text + "\n")
    else:
        Path(target).write_text(text + "\n")
