"""Retries for tests that compare measured times, because other load on the machine can spoil a run."""

import functools
from collections.abc import Callable
from typing import ParamSpec

Arguments = ParamSpec("Arguments")


def in_one_of_three_runs(test: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Decorate a test to run up to three times while an assertion fails; the third failure is the test's."""

    @functools.wraps(test)
    def attempt(*arguments: Arguments.args, **named: Arguments.kwargs) -> None:
        for _ in range(2):
            try:
                return test(*arguments, **named)
            except AssertionError:
                continue
        return test(*arguments, **named)

    return attempt
