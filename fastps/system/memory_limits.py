"""How much memory this process may still take, and how many processes the kernel has killed for want of it.

The machine's free memory counts, and the limits of this process's control groups (version 1 or 2) with all groups above them.
"""

import os
from pathlib import Path

import psutil

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_VMSTAT = Path("/proc/vmstat")
# By version: a group's limit, its use, and the lines of memory.stat that count page cache, which the kernel takes back.
_FILES = (
    ("memory.max", "memory.current", ("inactive_file", "active_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)
_KILLS = ("memory.events", "memory.oom_control")
OUT_OF_MEMORY = "memory ran out: use fewer workers, a smaller batch or push_dtype=torch.bfloat16, or raise the limit"


def available_bytes() -> tuple[int, str]:
    """Bytes that may still be allocated, and the limit that applies: the machine's free memory or a control group's maximum."""
    free = int(psutil.virtual_memory().available)
    limit = "free memory of the machine"
    for folder in _own_groups():
        left = _left_in(folder)
        if left is not None and left < free:
            free, limit = max(0, left), f"limit of the control group {str(folder)!r}"
    return free, limit


def _left_in(folder: Path) -> int | None:
    """What a control group may still take; None if it has no limit."""
    for limit, used, cached in _FILES:
        try:
            left = int((folder / limit).read_text()) - int((folder / used).read_text())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        found = _counts(folder / "memory.stat")
        return left + sum(found.get(name, 0) for name in cached)
    return None


def oom_kills() -> int:
    """Processes that the OOM killer has killed, of this process's control group; of the machine where no group counts them."""
    found = _kills_of_group()
    return _counts(_VMSTAT).get("oom_kill", 0) if found is None else found


def oom_reason() -> str:
    """Why a process got SIGKILL while `oom_kills` rose; behind "ended by SIGKILL"."""
    return f", {'probably ' if _kills_of_group() is None else ''}by the kernel's OOM killer"


def _kills_of_group() -> int | None:
    """The processes of the nearest control group that the OOM killer has killed; None if no group counts them."""
    counts = (_counts(folder / name).get("oom_kill") for folder in _own_groups() for name in _KILLS)
    return next((kills for kills in counts if kills is not None), None)


def _counts(file: Path) -> dict[str, int]:
    """The lines "name number" of a file of the kernel; empty if it cannot be read."""
    try:
        words = [line.split() for line in file.read_text().splitlines()]
    except (OSError, ValueError):
        return {}
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdecimal()}


def _own_groups() -> list[Path]:
    """The folders of this process's memory control groups and of those above them; empty if there are none."""
    try:
        text = os.fsdecode(_OWN.read_bytes())  # a group's name holds any byte but a line end
    except OSError:
        return []
    found: list[Path] = []
    lines = (line.split(":", 2) for line in text.split("\n"))
    for number, controllers, path in (line for line in lines if len(line) == 3):
        base = _ROOT if number == "0" else _ROOT / "memory"
        if number == "0" or "memory" in controllers.split(","):
            own = base / path.lstrip("/")
            # Without a namespace of its own, a container sees its group at the root, and here the host's path to it.
            found += [own, *(parent for parent in own.parents if parent.is_relative_to(base))]
    return found
