"""Programs of other frameworks: `make test-all` alone runs them, because it installs the frameworks."""

import sys
from collections.abc import Iterator

import pytest

from tests.support.own_processes import own_processes as own_processes


@pytest.hookimpl(tryfirst=True)  # before pytest reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all of these tests as slow."""
    for item in items:
        if "integrations" in item.path.parts:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(autouse=True, scope="session")
def without_the_folder_kernels() -> Iterator[None]:
    """Hide the repository's folder `kernels`, which is on the path of a test: transformers looks for a package of that name."""
    sys.modules["kernels"] = None  # type: ignore[assignment]  # importing it then says that it does not exist
    yield
    del sys.modules["kernels"]
