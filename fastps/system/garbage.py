"""What the garbage collector tracks, also when the program has frozen it (`gc.freeze`, before data loaders fork, say)."""

import gc
from typing import Any

# An object that `gc.get_objects` shows unless somebody has frozen since; None if that was before this import.
_newest: list[Any] | None = None if gc.get_freeze_count() else []


def freeze() -> None:
    """Freeze what exists, so that a fork's collections leave shared pages alone; `objects` then passes over it."""
    global _newest
    gc.freeze()
    _newest = []


def objects() -> list[Any]:
    """All objects that the collector tracks, except those that `freeze` hides.

    >>> found = {"a": []}
    >>> gc.freeze()
    >>> any(each is found for each in gc.get_objects()), any(each is found for each in objects())
    (False, True)
    """
    found = gc.get_objects()
    if any(each is _newest for each in reversed(found)):
        return found
    found.clear()
    gc.unfreeze()
    gc.collect()  # or garbage would be frozen, too: the arena of a job that is over
    found = gc.get_objects()
    gc.freeze()
    return found
