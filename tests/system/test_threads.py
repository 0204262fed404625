"""A wait for a thread that hangs ends, and says what it waits for."""

import threading

import pytest

from fastps.system.threads import ends_within


def test_a_thread_that_ends_is_waited_for_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    assert ends_within(thread, 60, "it ends")
    assert not caplog.text


def test_a_thread_that_hangs_is_left_at_the_limit_and_named_before(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait, daemon=True)
    thread.start()
    assert not ends_within(thread, 0.5, "the disk answers")
    assert "waiting for at most 0.5 s until the disk answers" in caplog.text
    release.set()
    assert ends_within(thread, 60, "the disk answers")
