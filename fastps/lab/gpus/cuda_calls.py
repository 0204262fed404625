"""A record of every CUDA call that a process makes, for the check against the rules of CUDA.

The layer is thin: it calls what it wraps, and notes the call with its process, thread, arguments, result and time.
"""

import os
import threading
from typing import Any, NamedTuple

from fastps.device.cuda import CupyCuda
from fastps.system.clock import SYSTEM_CLOCK, Clock

_UNRECORDED = {"array", "empty_cache", "prepare"}  # no calls of CUDA's runtime


class Call(NamedTuple):
    """One call that succeeded. Addresses, streams and events count within their process."""

    ended_ns: int
    process: int
    thread: int
    name: str
    arguments: tuple[Any, ...]
    result: Any = None


class RecordedCuda:
    """A CUDA that records the calls of it and of its runtime in `calls`. Calls that fail raise, and are not recorded."""

    def __init__(self, real: Any, clock: Clock = SYSTEM_CLOCK) -> None:
        self.calls: list[Call] = []
        self._real = real
        self._clock = clock

    @property
    def runtime(self) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._real if hasattr(CupyCuda, name) else self._real.runtime, name)

        def call(*arguments: Any) -> Any:
            result = function(*arguments)
            if name not in _UNRECORDED:
                self.calls.append(Call(self._clock.now_ns(), os.getpid(), threading.get_ident(), name, arguments, result))
            return result

        return call


def merged(*records: list[Call]) -> list[Call]:
    """The calls of several processes in the order in which they ended.

    >>> early, late = Call(1, 10, 1, "malloc", (256,), 4096), Call(2, 11, 1, "getDeviceCount", (), 1)
    >>> [call.name for call in merged([late], [early])]
    ['malloc', 'getDeviceCount']
    """
    return sorted((call for record in records for call in record), key=lambda call: call.ended_ns)
