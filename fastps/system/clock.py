"""The one clock: everything below the command line that needs the time takes a Clock, or a time that came from one.

Refuses to know the wall clock's date: a job measures durations, and a stepped wall clock must not disturb it.
"""

import os
import threading
import time
from pathlib import Path
from typing import Protocol

import psutil


class Clock(Protocol):
    """What a store, a worker or a launcher asks for the time."""

    def now_ns(self) -> int:
        """Nanoseconds on a clock that never goes back, the same for all processes of this machine."""
        ...

    def sleep_ns(self, duration_ns: int) -> None:
        """Let `duration_ns` nanoseconds pass."""
        ...

    def thread_cpu_ns(self) -> int:
        """Nanoseconds that the calling thread has spent on a core."""
        ...

    def thread_queue_ns(self) -> int:
        """Nanoseconds that the calling thread could have run but had no core; -1 where the machine does not tell."""
        ...

    def process_cpu_ns(self) -> int:
        """Nanoseconds that all threads of this process have spent on cores."""
        ...

    def machine_cpu_ns(self) -> int:
        """Nanoseconds that everybody on this machine has spent on cores, in steps of some ms."""
        ...


class MonotonicClock:
    """CLOCK_MONOTONIC: shared by every process of the machine, so that times in descriptors can be compared.

    >>> clock = MonotonicClock()
    >>> clock.now_ns() <= clock.now_ns()
    True
    """

    now_ns = staticmethod(time.monotonic_ns)  # since an arbitrary moment of this boot; a step reads it several times

    def sleep_ns(self, duration_ns: int) -> None:
        """Sleep; a duration of zero or less returns at once."""
        if duration_ns > 0:
            time.sleep(duration_ns / 1e9)

    def thread_cpu_ns(self) -> int:
        """Processor time of the calling thread."""
        return time.thread_time_ns()

    def thread_queue_ns(self) -> int:
        """What Linux counts for every task (proc_pid_schedstat(5)): the second number of /proc/thread-self/schedstat."""
        file = getattr(_local, "schedstat", None)
        if file is None:
            try:
                file = _local.schedstat = Path("/proc/thread-self/schedstat").open("rb", buffering=0)  # noqa: SIM115
            except OSError:
                return -1
        return int(os.pread(file.fileno(), 64, 0).split()[1])

    def process_cpu_ns(self) -> int:
        """Processor time of this process."""
        return time.process_time_ns()

    def machine_cpu_ns(self) -> int:
        """All but idle time of all cores; what a hypervisor took away counts as spent."""
        times = psutil.cpu_times()._asdict()
        # guest times are part of user and nice already.
        return int(1e9 * sum(value for name, value in times.items() if name not in ("idle", "iowait", "guest", "guest_nice")))


def _forget_schedstat() -> None:
    """A forked child's own file is another."""
    _local.__dict__.pop("schedstat", None)


_local = threading.local()
os.register_at_fork(after_in_child=_forget_schedstat)

SYSTEM_CLOCK: Clock = MonotonicClock()
