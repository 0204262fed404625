"""Signals are noted where they would end the program; its own handlers, other threads and forked children are left alone."""

import os
import signal
import threading

from fastps.system.noted_signals import NotedSignals


def test_a_handler_of_the_program_stays() -> None:
    came = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
    try:
        noted = NotedSignals(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        assert (came, noted.take(signal.SIGUSR1)) == ([signal.SIGUSR1], False)
        noted.close()
        assert signal.getsignal(signal.SIGUSR1) not in (before, signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_the_program_sets_later_stays_at_the_end() -> None:
    noted = NotedSignals(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    noted.close()
    assert signal.signal(signal.SIGUSR1, signal.SIG_DFL) is signal.SIG_IGN


def test_another_thread_than_the_main_one_notes_nothing() -> None:
    thread = threading.Thread(target=lambda: NotedSignals(signal.SIGUSR1).close())
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_a_forked_child_ends_by_the_signal() -> None:
    """A pool ends its workers by SIGTERM."""
    noted = NotedSignals(signal.SIGTERM)
    try:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert not noted.take(signal.SIGTERM)
    finally:
        noted.close()
