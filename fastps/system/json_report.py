"""The JSON report of every command: the command, the version, the machine, and the rows."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastps.errors import UsageError
from fastps.system.machine import machine
from fastps.version import __version__


def _finite(value: Any) -> Any:
    """The value with null in place of each infinity and NaN, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def write_json(command: str, rows: Sequence[Mapping[str, Any]], target: str) -> None:
    """Write `{"command", "version", "machine", "rows"}` to a file, or to stdout for "-"; null is a number that is not finite.

    Raises:
        UsageError: it cannot be written.
    """
    report = {"command": command, "version": __version__, "machine": machine(), "rows": _finite(rows)}
    text = json.dumps(report, indent=2, allow_nan=False)
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
