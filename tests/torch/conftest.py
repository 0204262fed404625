"""What these tests train, they train with one thread, so that sums have one order, and without a launcher's variables."""

import pytest

from tests.support.torch_optimizers import alone as alone


@pytest.fixture(params=["auto", "attributes"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both kinds of loops over tensors, the compiled ones and those over Python's attributes."""
    monkeypatch.setenv("FASTPS_TENSOR_LOOPS", request.param)
    return str(request.param)
