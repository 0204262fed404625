"""What hangs is left at its limit: a late result is not lost, errors come through, and the log says what is waited for."""

import contextlib
import threading
from pathlib import Path

import pytest

from fastps.system.time_limit import call_within, ends_within, locked


def test_a_call_that_hangs_is_left_and_its_late_result_is_thrown_away(caplog: pytest.LogCaptureFixture) -> None:
    release, thrown = threading.Event(), threading.Event()

    def hang() -> int:
        release.wait(10)
        return 3

    with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
        call_within(0.05, hang, discard=lambda late: thrown.set())
    release.set()
    assert thrown.wait(5)
    with pytest.raises(ZeroDivisionError):
        call_within(1, lambda: 1 // 0)
    assert not caplog.text


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


def test_a_lock_is_waited_for_until_it_is_free_or_the_limit_has_passed(tmp_path: Path) -> None:
    first = contextlib.ExitStack()
    first.enter_context(locked(tmp_path, 1))
    with pytest.raises(TimeoutError, match=r"another process has written there for more than 0.1 s"), locked(tmp_path, 0.1):
        pass
    releases = threading.Timer(0.1, first.close)
    releases.start()
    with locked(tmp_path, 60):
        releases.join()
