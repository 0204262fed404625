"""A test at two sizes: a sample in `make test`, and the full size, marked slow, in `make test-all`."""

from typing import Any

import pytest


def sample_and_full(sample: Any, full: Any, name: str = "size") -> pytest.MarkDecorator:
    """Run a test with `name` as `sample` each time, and as `full` where slow tests run."""
    whole = pytest.param(full, id="full", marks=[pytest.mark.slow, pytest.mark.timeout(600)])
    return pytest.mark.parametrize(name, [pytest.param(sample, id="sample"), whole])
