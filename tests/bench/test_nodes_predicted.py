"""Predictions from measured links come near to live runs of nodes. The bounds are generous, because the cores are shared."""

import pytest

from fastps.bench.nodes_predicted import compare
from fastps.lab.measuring.namespaces import missing_reason
from fastps.lab.papers.live_nodes import LiveJob


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.timeout(300)
def test_two_nodes_on_a_slow_link_are_predicted() -> None:
    reason = missing_reason()
    if reason:
        pytest.skip(reason)
    rows = compare(100, ["bsp", "asp"], LiveJob("bsp", (1, 1), 500_000, 100.0, 6.0), repeats=1, most=2)
    assert [row["sync"] for row in rows] == ["bsp", "asp"]
    for row in rows:
        assert 0.6 < row["predicted"] / row["live"] < 1.6, row
        assert 0.6 < row["advised"] / row["live"] < 1.6, row
