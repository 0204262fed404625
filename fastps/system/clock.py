"""The clock of a job. All code below the command line takes a Clock, or a time that was read from one.

The clock is monotonic: a job measures durations, and a step of the wall clock must not disturb it.
"""

import os
import threading
import time
from pathlib import Path
from typing import Protocol

import psutil


class Clock(Protocol):
    """The interface through which a store, a worker or a launcher reads the time."""

    def now_ns(self) -> int:
        """Nanoseconds on a monotonic clock that all processes of this machine share."""

    def unix_ns(self) -> int:
        """Nanoseconds since 1970. It may jump: use it to label what other programs read, and never for durations."""

    def sleep_ns(self, duration_ns: int) -> None:
        """Sleep for `duration_ns` nanoseconds."""

    def thread_cpu_ns(self) -> int:
        """CPU time of the calling thread, in nanoseconds."""

    def thread_queue_ns(self) -> int:
        """Nanoseconds that the calling thread was runnable but had no core; -1 if the machine does not report it."""

    def process_cpu_ns(self) -> int:
        """CPU time of all threads of this process, in nanoseconds."""

    def machine_cpu_ns(self) -> int:
        """CPU time of all processes of this machine, in nanoseconds, with a resolution of some ms."""


class MonotonicClock:
    """CLOCK_MONOTONIC. All processes of the machine share it, so times in descriptors can be compared.

    >>> clock = MonotonicClock()
    >>> clock.now_ns() <= clock.now_ns()
    True
    """

    now_ns = staticmethod(time.monotonic_ns)  # since an arbitrary moment of this boot; a step reads it several times
    unix_ns = staticmethod(time.time_ns)
    thread_cpu_ns = staticmethod(time.thread_time_ns)
    process_cpu_ns = staticmethod(time.process_time_ns)

    def sleep_ns(self, duration_ns: int) -> None:
        """Sleep. Return at once if the duration is zero or less."""
        if duration_ns > 0:
            time.sleep(duration_ns / 1e9)

    def thread_queue_ns(self) -> int:
        """The run-queue wait that Linux counts for each task: the second number of schedstat; see proc_pid_schedstat(5)."""
        file = getattr(_local, "schedstat", None)
        if file is None:
            try:
                file = _local.schedstat = Path("/proc/thread-self/schedstat").open("rb", buffering=0)  # noqa: SIM115
            except OSError:
                return -1
        try:
            return int(os.pread(file.fileno(), 64, 0).split()[1])
        except (OSError, IndexError, ValueError):
            return -1

    def machine_cpu_ns(self) -> int:
        """The time of all cores except idle time. Time that a hypervisor stole counts as spent."""
        times = psutil.cpu_times()._asdict()
        # The user and nice times already include the guest times.
        return int(1e9 * sum(value for name, value in times.items() if name not in ("idle", "iowait", "guest", "guest_nice")))


def unix_offset_ns(clock: Clock) -> int:
    """The Unix time less the clock's own, in ns: the mean of the closest of some pairs of readings, good to about 1 us.

    >>> abs(unix_offset_ns(SYSTEM_CLOCK) + SYSTEM_CLOCK.now_ns() - SYSTEM_CLOCK.unix_ns()) < 1_000_000_000
    True
    """
    found = []
    for _ in range(_PAIRS):
        before_ns, unix_ns, after_ns = clock.now_ns(), clock.unix_ns(), clock.now_ns()
        found.append((after_ns - before_ns, unix_ns - (before_ns + after_ns) // 2))
    return min(found)[1]


def _forget_schedstat() -> None:
    """Drop the inherited file in a forked child: it belongs to the parent's thread."""
    _local.__dict__.pop("schedstat", None)


_PAIRS = 5
_local = threading.local()
os.register_at_fork(after_in_child=_forget_schedstat)

SYSTEM_CLOCK: Clock = MonotonicClock()
