"""An environment in which only the test says what a process is."""

from collections.abc import Callable, Mapping

import pytest

from tests.support.variables import VARIABLES

Environment = Callable[..., None]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Environment:
    """Sets the variables of mappings, where nobody else has set any."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def add(*variables: Mapping[str, str]) -> None:
        for each in variables:
            for name, value in each.items():
                monkeypatch.setenv(name, value)

    return add
