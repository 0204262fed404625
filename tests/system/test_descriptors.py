"""A job that needs more descriptors than the soft limit raises it; the hard one is a named error before anything starts."""

import os
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fastps import SGD, Store
from fastps.errors import UsageError
from fastps.processes.launcher import Launcher
from fastps.system.descriptors import reserve
from tests.support import descriptors, processes


def _within(soft: int, hard: int, what: Callable[[], object]) -> processes.Child:
    """A forked child that calls `what` with these limits."""

    def work() -> object:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        what()
        return resource.getrlimit(resource.RLIMIT_NOFILE)

    return processes.ended(work)


def test_a_low_soft_limit_is_raised_as_far_as_needed() -> None:
    opened = len(descriptors.opened()) + 4
    soft, hard = _within(opened + 10, opened + 500, lambda: reserve(100, "a test")).outcome
    assert opened + 10 < soft <= hard == opened + 500
    assert soft < opened + 200


def test_a_low_hard_limit_is_named() -> None:
    limit = len(descriptors.opened()) + 20
    kind, text = _within(limit, limit, lambda: reserve(100, "a test")).outcome
    assert kind == "UsageError"
    assert f"descriptors for a test, found {limit}, of which" in text


def test_many_workers_under_a_low_limit_are_refused_before_any_starts() -> None:
    """24 workers and a limit of 64 ended in a raw OSError, with some of them started."""
    limit = len(descriptors.opened()) + 40
    launcher = Launcher(["true"], 24, start_method="spawn")
    kind, text = _within(limit, limit, launcher.run).outcome
    assert (kind, "the pipes of 24 workers" in text) == ("UsageError", True), text


def test_enough_is_left_alone() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    reserve(1, "a test")
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
    if before[1] != resource.RLIM_INFINITY:
        with pytest.raises(UsageError, match="ulimit -n"):
            reserve(before[1], "a test")


def test_arena_is_no_standard_stream_of_a_process_that_has_closed_them() -> None:
    def work() -> list[str]:
        for number in range(3):
            os.close(number)
        with Store.create({"w": np.zeros(3, np.float32)}, SGD(lr=1.0)):
            return [str(Path(f"/proc/self/fd/{number}").readlink()) for number in range(3)]

    assert processes.ended(work).outcome == [os.devnull] * 3
