"""Cheap forks: a process of tests has hundreds of MB of its own, and a fork copies a table entry for each page."""

import ctypes
from pathlib import Path

_HUGE = 1 << 21
_MADV_COLLAPSE = 25
_LARGEST = 1 << 30  # a sanitizer reserves terabytes, of which it uses little


def collapse() -> None:
    """Move this process's heap into huge pages, which have a table entry for each 2 MB. A kernel that cannot, refuses."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, _, _, _, *name = line.split()
        first, last = (int(address, 16) for address in span.split("-"))
        first, last = -(-first // _HUGE) * _HUGE, last // _HUGE * _HUGE
        if access == "rw-p" and name in ([], ["[heap]"]) and 0 < last - first < _LARGEST:
            madvise(first, last - first, _MADV_COLLAPSE)
