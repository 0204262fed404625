"""For tests that compare measured times: a machine that does other work may spoil a run, but not the same law three times."""

import functools
from collections.abc import Callable
from typing import ParamSpec

Arguments = ParamSpec("Arguments")


def in_one_of_three_runs(test: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Run the test again, up to three times in all, when an assertion about times fails; the last failure is the test's."""

    @functools.wraps(test)
    def attempt(*arguments: Arguments.args, **named: Arguments.kwargs) -> None:
        for _ in range(2):
            try:
                return test(*arguments, **named)
            except AssertionError:
                continue
        return test(*arguments, **named)

    return attempt
