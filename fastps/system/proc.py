"""What is read from /proc about processes. Their names hold any bytes, and a process may end before or while it is read."""

from pathlib import Path

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
