"""Make malloc keep the memory that one backward pass frees, for the gradients of the next.

Otherwise a gradient of 32 MiB or more is mapped, faulted in page by page and unmapped at every step, which can take as long as
computing it. An allocator that the user has configured, or that is not glibc's, stays untouched.
"""

import ctypes
import logging
import os
import platform

_log = logging.getLogger(__name__)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
_WORTH_BYTES = 4 << 20
_MOST = (1 << 31) - 1  # mallopt takes an int


def keep_freed_memory(model_bytes: int) -> bool:
    """Set malloc to keep freed memory, up to 2 GiB, if the model has 4 MiB or more. Return whether that was done.

    `FASTPS_KEEP_MEMORY=0` disables this, and so does any malloc setting in the environment.

    >>> keep_freed_memory(1000)
    False
    """
    is_configured = any(name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD") for name in os.environ)
    if model_bytes < _WORTH_BYTES or is_configured or os.environ.get("FASTPS_KEEP_MEMORY", "1") == "0":
        return False
    if platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    told = bool(library.mallopt(_M_MMAP_THRESHOLD, _MOST)) and bool(library.mallopt(_M_TRIM_THRESHOLD, _MOST))
    _log.debug("malloc %s freed memory for the next step", "keeps" if told else "would not keep")
    return told
