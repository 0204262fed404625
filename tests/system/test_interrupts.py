"""Ctrl-C waits: it is raised at the context's end, after what the context has to do."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from fastps.system.interrupts import deferred_interrupts, ignored_by_children


class Noted:
    def __init__(self) -> None:
        self.numbers: list[int] = []

    def __call__(self, number: int, frame: object) -> None:
        self.numbers.append(number)


def _interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_interrupts_are_raised_once_the_context_is_left() -> None:
    before, noted = signal.getsignal(signal.SIGINT), Noted()
    with pytest.raises(KeyboardInterrupt), deferred_interrupts(noted):
        _interrupt()
        _interrupt()
        assert noted.numbers == [signal.SIGINT] * 2
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupt_takes_the_place_of_an_error_that_it_caused() -> None:
    with pytest.raises(KeyboardInterrupt), deferred_interrupts(Noted()):
        _interrupt()
        raise ValueError


def test_error_passes_where_nobody_interrupts() -> None:
    with pytest.raises(ValueError), deferred_interrupts(Noted()):
        raise ValueError


def test_handler_of_the_program_is_called_too() -> None:
    note = Noted()
    before = signal.signal(signal.SIGINT, note)
    try:
        with pytest.raises(KeyboardInterrupt), deferred_interrupts(Noted()):
            _interrupt()
            assert note.numbers == []
        assert note.numbers == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is note
    finally:
        signal.signal(signal.SIGINT, before)


def test_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with deferred_interrupts(noted := Noted()):
            _interrupt()
        assert noted.numbers == []
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_have_no_signal_handler() -> None:
    def enter() -> object:
        with deferred_interrupts(Noted()):
            return signal.getsignal(signal.SIGINT)

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(enter).result() == signal.getsignal(signal.SIGINT)


def test_start_of_processes_is_not_cut_short_by_a_signal_that_another_thread_gets() -> None:
    is_over, is_started = threading.Event(), False
    thread = threading.Thread(target=is_over.wait)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt), ignored_by_children():
            signal.pthread_kill(thread.ident or 0, signal.SIGINT)
            time.sleep(0.05)
            is_started = True
        assert is_started
    finally:
        is_over.set()
        thread.join()
