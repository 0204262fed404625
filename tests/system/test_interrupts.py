"""Ctrl-C as a count: it is raised at the context's end, after what the context has to do."""

import os
import signal
import threading
from types import FrameType

import pytest

from fastps.system.interrupts import counted_interrupts


def _interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_interrupts_are_raised_once_the_context_is_left() -> None:
    before, reached = signal.getsignal(signal.SIGINT), 0
    with pytest.raises(KeyboardInterrupt):
        with counted_interrupts() as interrupts:
            _interrupt()
            _interrupt()
            reached = interrupts.count
    assert reached == 2
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupt_takes_the_place_of_an_error_that_it_caused() -> None:
    with pytest.raises(KeyboardInterrupt):
        with counted_interrupts():
            _interrupt()
            raise ValueError


def test_error_passes_where_nobody_interrupts() -> None:
    with pytest.raises(ValueError):
        with counted_interrupts():
            raise ValueError


def test_handler_of_the_program_is_called_too() -> None:
    called: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        called.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        with pytest.raises(KeyboardInterrupt):
            with counted_interrupts():
                _interrupt()
                assert called == []
        assert called == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is note
    finally:
        signal.signal(signal.SIGINT, before)


def test_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with counted_interrupts() as interrupts:
            _interrupt()
        assert interrupts.count == 0
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_have_no_signal_handler() -> None:
    counts: list[int] = []

    def enter() -> None:
        with counted_interrupts() as interrupts:
            counts.append(interrupts.count)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert counts == [0]
