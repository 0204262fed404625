"""Users' rules that are compiled at their first use: each process of a parallel run imports every test module."""

import functools
from collections.abc import Callable
from typing import Any

import fastps


def lazy_rule(**options: Any) -> Callable[[Callable[..., Any]], Callable[[], fastps.UserRule]]:
    """Like `fastps.rule`, for a function without arguments that returns the rule."""
    return lambda function: functools.cache(lambda: fastps.rule(**options)(function))
