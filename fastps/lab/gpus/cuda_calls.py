"""A record of every CUDA call that a process makes, for the check against the rules of CUDA.

The layer is thin: it calls what it wraps, and notes the call with its process, thread, arguments, result and time.
"""

import os
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastps.device.cuda import Cuda
from fastps.kernels.cuda import host_fold, launch_args
from fastps.system.clock import SYSTEM_CLOCK, Clock


class Call(NamedTuple):
    """One call that succeeded. Addresses, streams and events count within their process."""

    ended_ns: int
    process: int
    thread: int
    name: str
    arguments: tuple[Any, ...]
    result: Any = None


class RecordedCuda:
    """A Cuda that records its calls in `calls`. Calls that fail raise as before, and are not recorded.

    A launch is recorded with the addresses of its work item and tiles; `compute_stream` with the stream.
    """

    def __init__(self, real: Cuda, clock: Clock = SYSTEM_CLOCK) -> None:
        self.calls: list[Call] = []
        self.runtime = _RecordedRuntime(real.runtime, self)
        self._real = real
        self._clock = clock

    def note(self, name: str, arguments: tuple[Any, ...], result: Any = None) -> None:
        """Record a call that ended now."""
        self.calls.append(Call(self._clock.now_ns(), os.getpid(), threading.get_ident(), name, arguments, result))

    def launch_fold(self, device: int, rule: int, dtype: str, order: int, tiles: int, blocks: int, stream: int) -> None:
        """See Cuda."""
        self._real.launch_fold(device, rule, dtype, order, tiles, blocks, stream)
        spans = ((order, launch_args.HEAD_BYTES), (tiles, blocks * host_fold.TILE_BYTES))
        self.note("launch_fold", (device, spans, stream))

    def use_rule(self, device: int, text: str) -> None:
        """See Cuda."""
        self._real.use_rule(device, text)

    def launch_check(self, device: int, dtype: str, args: int, tiles: int, blocks: int, stream: int) -> None:
        """See Cuda."""
        self._real.launch_check(device, dtype, args, tiles, blocks, stream)
        spans = ((args, launch_args.CHECK_BYTES), (tiles, blocks * host_fold.TILE_BYTES))
        self.note("launch_check", (device, spans, stream))

    def array(self, device: int, address: int, length: int, dtype: str, owner: object) -> Any:
        """See Cuda."""
        return self._real.array(device, address, length, dtype, owner)

    def compute_stream(self, device: int) -> int:
        """See Cuda."""
        stream = self._real.compute_stream(device)
        self.note("compute_stream", (device,), stream)
        return stream


@dataclass
class _RecordedRuntime:
    """The functions of a runtime, recorded."""

    real: Any
    record: RecordedCuda

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.real, name)
        if isinstance(function, type):
            return function  # an error's class

        def call(*arguments: Any) -> Any:
            result = function(*arguments)
            self.record.note(name, arguments, result)
            return result

        return call


def merged(*records: list[Call]) -> list[Call]:
    """The calls of several processes in the order in which they ended.

    >>> early, late = Call(1, 10, 1, "malloc", (256,), 4096), Call(2, 11, 1, "getDeviceCount", (), 1)
    >>> [call.name for call in merged([late], [early])]
    ['malloc', 'getDeviceCount']
    """
    return sorted((call for record in records for call in record), key=lambda call: call.ended_ns)
