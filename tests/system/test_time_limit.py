"""Calls with a time limit: a late result is not lost, and errors come through."""

import threading

import pytest

from fastps.system import time_limit


def test_a_call_that_hangs_is_left_and_its_late_result_is_thrown_away() -> None:
    release, thrown = threading.Event(), threading.Event()

    def hang() -> int:
        release.wait(10)
        return 3

    with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
        time_limit.call_within(0.05, hang, lambda late: thrown.set())
    release.set()
    assert thrown.wait(5)
    with pytest.raises(ZeroDivisionError):
        time_limit.call_within(1, lambda: 1 // 0, lambda late: None)
