"""What is read from /proc about processes. Their names hold any bytes, and a process may end before or while it is read."""

import os
from collections.abc import Collection
from pathlib import Path

_MOST_BYTES = 1 << 20  # that are read of a process's variables
_STATE, _PARENT, _USER_TICKS, _SYSTEM_TICKS, _BEGAN_TICKS = (
    0,
    1,
    11,
    12,
    19,
)  # columns of /proc/PID/stat behind the name in brackets


def processor_time(process_id: int) -> str:
    """What changes while a process runs: "stopped", or its processor time; "" if it cannot be told.

    >>> import os
    >>> processor_time(os.getpid()) not in ("", "stopped"), processor_time(0)
    (True, '')
    """
    try:
        return processor_time_in(Path(f"/proc/{process_id}/stat").read_bytes())
    except OSError:
        return ""


def is_stopped(process_id: int) -> bool:
    """Whether a process is known to be stopped, by a signal or a debugger."""
    return processor_time(process_id) == "stopped"


def has_ended(process_id: int) -> bool:
    """Whether a process of this PID namespace has ended, or is a zombie."""
    try:
        return (Path("/proc") / str(process_id) / "stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except (OSError, IndexError):
        return True


def processor_time_in(stat: bytes) -> str:
    """The same from the contents of /proc/PID/stat.

    >>> processor_time_in(b"7 (a) b\\n) T 1 7 7 0 -1 4194304 1 0 0 0 12 3 0 0")
    'stopped'
    """
    columns = stat.rpartition(b")")[2].split()
    if len(columns) <= _SYSTEM_TICKS:
        return ""
    if columns[_STATE] in (b"T", b"t"):  # by a signal, by a debugger
        return "stopped"
    return b" ".join((columns[_USER_TICKS], columns[_SYSTEM_TICKS])).decode("ascii", "replace")


def variables(process_id: int, names: Collection[str]) -> dict[str, str]:
    """Those of these variables that a process's program has begun with; none if they cannot be read. A fork keeps its parent's.

    >>> variables(0, ["PATH"])
    {}
    """
    try:
        with Path(f"/proc/{process_id}/environ").open("rb") as file:
            entries = os.fsdecode(file.read(_MOST_BYTES)).split("\0")
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in entries)
    return {name: value for name, _, value in pairs if name in names}


def command_line(process_id: int) -> list[str]:
    """The words with which a process's program was started, as bytes that anybody may have chosen; none if it cannot be read.

    >>> command_line(0)
    []
    """
    try:
        with Path(f"/proc/{process_id}/cmdline").open("rb") as file:
            return os.fsdecode(file.read(_MOST_BYTES)).rstrip("\0").split("\0")
    except OSError:
        return []


def parent(process_id: int) -> int:
    """The parent of a process; 0 if it cannot be told.

    >>> import os
    >>> parent(os.getpid()) == os.getppid()
    True
    """
    column = _column(process_id, _PARENT)
    return 0 if column is None else column


def age_s(process_id: int) -> float | None:
    """The seconds since a process began; None if they cannot be told.

    >>> import os
    >>> 0 <= age_s(os.getpid()) < 1e9, age_s(0)
    (True, None)
    """
    began = _column(process_id, _BEGAN_TICKS)
    try:
        up_s = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return None if began is None else max(0.0, up_s - began / os.sysconf("SC_CLK_TCK"))


def _column(process_id: int, number: int) -> int | None:
    """A number in /proc/PID/stat, counted behind the name in brackets; None if it cannot be read."""
    try:
        return column_in(Path(f"/proc/{process_id}/stat").read_bytes(), number)
    except OSError:
        return None


def column_in(stat: bytes, number: int) -> int | None:
    """The same from the contents of /proc/PID/stat.

    >>> column_in(b"7 (a) b\\n) T 1 7 7 0", 1), column_in(b"7 (a) T x", 1)
    (1, None)
    """
    try:
        return int(stat.rpartition(b")")[2].split()[number])
    except (ValueError, IndexError):
        return None
