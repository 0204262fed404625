"""What is read from /proc about processes. Their names hold any bytes, and a process may end before or while it is read."""

import os
from collections.abc import Collection
from pathlib import Path

_MOST_BYTES = 1 << 20  # that are read of a process's variables
_STATE, _USER_TICKS, _SYSTEM_TICKS = 0, 11, 12  # columns of /proc/PID/stat behind the name in brackets


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
