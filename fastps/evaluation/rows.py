"""The rows of an evaluation: a file with one line of JSON for each version that was evaluated.

A line is written by one call, and a reader takes whole lines only: a writer that is killed leaves a file that can be read.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastps.errors import UsageError
from fastps.system.json_report import finite

Row = dict[str, Any]
OWN = ("version", "unix_s", "seconds", "tag", "is_best", "is_stop_asked")
"""The keys of a row that are no metrics: the version, when its evaluation ended, how long it took, what its publisher gave with
it, and whether it is the best so far and the training was asked to stop."""


def metrics_of(row: Mapping[str, Any]) -> dict[str, float]:
    """What the user's function has returned; NaN where JSON has none.

    >>> metrics_of({"version": 3, "seconds": 0.1, "loss": 0.5, "accuracy": None})
    {'loss': 0.5, 'accuracy': nan}
    """
    return {name: float("nan") if value is None else value for name, value in row.items() if name not in OWN}


def read(file: str | os.PathLike[str], offset: int = 0) -> tuple[list[Row], int]:
    """The whole rows of a file from a place in bytes on, and the place behind them; nothing of a file that does not exist.

    Raises UsageError for a line that is no row.
    """
    try:
        with Path(file).open("rb") as stream:
            stream.seek(offset)
            text = stream.read()
    except FileNotFoundError:
        return [], offset
    whole = text[: text.rfind(b"\n") + 1]
    found = []
    for line in whole.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("version"), int):
            raise UsageError(f"{file}: expected rows that an evaluator wrote, found {line[:80]!r}; give another file")
        found.append(row)
    return found, offset + len(whole)


class RowsFile:
    """Rows that are written into a file, or to the standard output for "-". Raises UsageError if it cannot be opened.

    With `resume` the rows that are there stay, and `found` has them; else the file begins anew.
    """

    def __init__(self, file: str, *, resume: bool) -> None:
        self.found: list[Row] = []
        self._descriptor = -1
        if file == "-":
            return
        end = 0
        if resume:
            self.found, end = read(file)
        try:
            self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            os.ftruncate(self._descriptor, end)  # a line that was cut short by a kill goes
        except OSError as error:
            raise UsageError(f"rows {file}: expected a file that can be written, found: {error.strerror}") from None

    def add(self, row: Mapping[str, Any]) -> None:
        """Write a row. Raises OSError."""
        line = json.dumps(finite(row), allow_nan=False) + "\n"
        if self._descriptor >= 0:
            os.write(self._descriptor, line.encode())
        else:
            sys.stdout.write(line)
            sys.stdout.flush()

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
