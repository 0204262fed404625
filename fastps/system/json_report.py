"""The JSON report of every command: the command, the version, the machine, and the rows."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastps.errors import UsageError
from fastps.system.machine import machine
from fastps.version import __version__


def write_json(command: str, rows: Sequence[Mapping[str, Any]], target: str) -> None:
    """Write `{"command", "version", "machine", "rows"}` to a file, or to stdout for "-". Raises UsageError if it cannot."""
    text = json.dumps({"command": command, "version": __version__, "machine": machine(), "rows": rows}, indent=2)
    if target == "-" and sys.stdout is None:
        raise UsageError("--json -: expected an open standard output, found a closed one; give a file")
    try:
        if target == "-":
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
        else:
            Path(target).write_text(text + "\n")
    except BrokenPipeError:  # the reader has had enough
        raise
    except OSError as error:
        raise UsageError(f"--json {target}: cannot be written: {error.strerror}; choose another file") from None
