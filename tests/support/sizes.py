"""A sample in `make test`, and all of it, marked slow, in `make test-all`: a test at two sizes, or some of its cases."""

from collections import Counter
from typing import Any

import pytest


def sample_and_full(sample: Any, full: Any, name: str = "size") -> pytest.MarkDecorator:
    """Run a test with `name` as `sample` each time, and as `full` where slow tests run."""
    whole = pytest.param(full, id="full", marks=[pytest.mark.slow, pytest.mark.timeout(600)])
    return pytest.mark.parametrize(name, [pytest.param(sample, id="sample"), whole])


def mark_unsampled(items: list[Any]) -> None:
    """Mark all but every n-th case of a test marked `sampled(n)` as slow; leave out those whose full size is slow anyway.

    The case that is kept moves on by one in every group of n, so it is not always the same value of the last parameter.
    """
    cases: Counter[str] = Counter()
    kept = []
    for item in items:
        if marker := item.get_closest_marker("sampled"):
            test, _, parameters = item.nodeid.partition("[")
            group, place = divmod(cases[test], marker.args[0])
            cases[test] += 1
            if (group + place) % marker.args[0]:
                if "sample" in parameters.rstrip("]").split("-"):
                    continue
                item.add_marker(pytest.mark.slow)
        kept.append(item)
    items[:] = kept
