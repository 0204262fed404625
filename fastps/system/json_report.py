"""The reports of every command: in JSON the command, the version, the machine and the rows; in CSV the rows."""

import csv
import io
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastps.errors import UsageError
from fastps.system.machine import machine
from fastps.version import __version__


def finite(value: Any) -> Any:
    """The value with null in place of each infinity and NaN, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list | tuple) else value


def write_json(command: str, rows: Sequence[Mapping[str, Any]], target: str) -> None:
    """Write `{"command", "version", "machine", "rows"}` to a file, or to stdout for "-"; null is a number that is not finite.

    Raises:
        UsageError: it cannot be written.
    """
    report = {"command": command, "version": __version__, "machine": machine(), "rows": finite(rows)}
    _write(json.dumps(report, indent=2, allow_nan=False) + "\n", "--json", target)


def write_csv(rows: Sequence[Mapping[str, Any]], target: str) -> None:
    """Write the rows to a file, or to stdout for "-": a column for each key, a nested key as `least.seconds`, a list as JSON.

    Raises:
        UsageError: it cannot be written.
    """
    flat = [dict(_flat(finite(row))) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    _write(text.getvalue(), "--csv", target)


def _flat(row: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """The columns of a row.

    >>> dict(_flat({"sync": "asp", "least": {"seconds": 1.5}, "seeds": [0, 1], "reason": None}))
    {'sync': 'asp', 'least.seconds': 1.5, 'seeds': '[0, 1]', 'reason': ''}
    """
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{within}{name}.")
        else:
            text = json.dumps(value) if isinstance(value, list | tuple) else value
            yield f"{within}{name}", "" if text is None else text


def _write(text: str, option: str, target: str) -> None:
    if target == "-" and sys.stdout is None:
        raise UsageError(f"{option} -: expected an open standard output, found a closed one; give a file")
    try:
        if target == "-":
            sys.stdout.write(text)
            sys.stdout.flush()
        else:
            Path(target).write_text(text)
    except BrokenPipeError:  # the reader has had enough
        raise
    except OSError as error:
        raise UsageError(f"{option} {target}: cannot be written: {error.strerror}; choose another file") from None
