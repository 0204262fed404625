"""Programs of other frameworks: `make test-all` alone runs them, because it installs the frameworks."""

import pytest

from tests.support.own_processes import own_processes as own_processes


@pytest.hookimpl(tryfirst=True)  # before pytest reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all of these tests as slow."""
    for item in items:
        if "clients" in item.path.parts:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(300))
