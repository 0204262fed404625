"""The clock of a job. All code below the command line takes a Clock, or a time that was read from one."""

import io
import os
import threading
import time

import psutil


class _ThreadsFile(io.FileIO):
    """A file that is closed with the thread that keeps it, without a ResourceWarning."""

    def __del__(self) -> None:
        self.close()


class Clock:
    """What a store, a worker or a launcher reads the time from, in ns. A test gives a subclass.

    `now_ns` is monotonic, because a job measures durations, which a step of the wall clock must not disturb. All processes of
    the machine share it, so times in descriptors can be compared. `unix_ns`, since 1970, may jump: it labels what others
    read. `thread_cpu_ns` is the CPU time of the calling thread, `process_cpu_ns` that of all threads of this process.

    >>> clock = Clock()
    >>> clock.now_ns() <= clock.now_ns()
    True
    """

    now_ns = staticmethod(time.monotonic_ns)
    unix_ns = staticmethod(time.time_ns)
    thread_cpu_ns = staticmethod(time.thread_time_ns)
    process_cpu_ns = staticmethod(time.process_time_ns)

    def sleep_ns(self, duration_ns: int) -> None:
        """Sleep for `duration_ns` nanoseconds. Return at once if the duration is zero or less."""
        if duration_ns > 0:
            time.sleep(duration_ns / 1e9)

    def thread_queue_ns(self) -> int:
        """Nanoseconds that the calling thread was runnable but had no core; -1 if the machine does not report it.

        It is the second number of schedstat, the run-queue wait of a task; see proc_pid_schedstat(5).
        """
        file = getattr(_local, "schedstat", None)
        if file is None:
            try:
                file = _local.schedstat = _ThreadsFile("/proc/thread-self/schedstat")
            except OSError:
                return -1
        try:
            return int(os.pread(file.fileno(), 64, 0).split()[1])
        except (OSError, IndexError, ValueError):
            return -1

    def machine_cpu_ns(self) -> int:
        """The time of all cores except idle time, with a resolution of some ms. What a hypervisor stole counts as spent."""
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


_PAIRS = 5
_local = threading.local()
os.register_at_fork(after_in_child=lambda: _local.__dict__.clear())  # the file belongs to the parent's thread

SYSTEM_CLOCK = Clock()
