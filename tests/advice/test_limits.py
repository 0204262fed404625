"""What bounds a run, on traces with known times."""

import pytest

from fastps.advice.limits import limits
from fastps.errors import UsageError
from tests.report.traces import asp, bsp


def test_without_waits_each_worker_would_have_its_own_speed() -> None:
    rows = {row["name"]: row["steps_per_s"] for row in limits(bsp([10, 30], 60))}
    assert rows["measured"] == pytest.approx(2 / 0.0306, rel=0.03)
    assert rows["no waiting"] == pytest.approx(1 / 0.0101 + 1 / 0.0301, rel=0.03)


def test_the_cores_limit_is_the_cores_over_the_processor_time_of_a_step() -> None:
    rows = {row["name"]: row for row in limits(asp([10, 10], 60))}
    assert rows["cores"]["core_ms"] == pytest.approx(5.15, rel=0.02), "half of each step, push and fold"
    assert rows["cores"]["steps_per_s"] == pytest.approx(8 / 5.15e-3, rel=0.02)
    assert rows["measured"]["steps_per_s"] == pytest.approx(rows["no waiting"]["steps_per_s"], rel=0.05)


def test_a_short_run_has_no_limits() -> None:
    with pytest.raises(UsageError, match="record longer"):
        limits(bsp([10, 10], 3))
