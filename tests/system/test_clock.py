"""The system's clock: it never goes back, it counts a thread's time on a core, and a fork has counts of its own."""

import gc
import threading
import warnings

from fastps.system.clock import SYSTEM_CLOCK, Clock
from tests.support import processes


def test_a_sleep_lasts_at_least_as_long_as_asked_for_and_takes_no_core() -> None:
    clock = Clock()
    began_ns, cpu_ns = clock.now_ns(), clock.thread_cpu_ns()
    clock.sleep_ns(30_000_000)
    assert clock.now_ns() - began_ns >= 30_000_000
    assert clock.thread_cpu_ns() - cpu_ns < 30_000_000


def test_a_sleep_of_no_time_or_less_returns() -> None:
    before_ns = SYSTEM_CLOCK.now_ns()
    for duration_ns in (0, -1, -(10**18)):
        SYSTEM_CLOCK.sleep_ns(duration_ns)
    assert SYSTEM_CLOCK.now_ns() >= before_ns


def test_work_is_counted_for_thread_process_and_machine() -> None:
    clock = Clock()
    before = clock.thread_cpu_ns(), clock.process_cpu_ns(), clock.machine_cpu_ns()
    while clock.thread_cpu_ns() - before[0] < 60_000_000:
        pass
    assert clock.process_cpu_ns() - before[1] >= 50_000_000
    assert clock.machine_cpu_ns() > before[2]


def test_processes_of_a_machine_share_the_time() -> None:
    before_ns = SYSTEM_CLOCK.now_ns()
    childs_ns = processes.ended(SYSTEM_CLOCK.now_ns).outcome
    assert before_ns <= childs_ns <= SYSTEM_CLOCK.now_ns()


def test_a_fork_reads_its_own_queueing_time() -> None:
    parents_ns = SYSTEM_CLOCK.thread_queue_ns()  # opens the parent's file
    assert processes.ended(lambda: SYSTEM_CLOCK.thread_queue_ns() >= 0).outcome is (parents_ns >= 0)


def test_a_threads_file_is_closed_with_the_thread_without_a_warning() -> None:
    gc.collect()  # what other tests have left
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        thread = threading.Thread(target=SYSTEM_CLOCK.thread_queue_ns)
        thread.start()
        thread.join()
        del thread
        gc.collect()
    assert not found
