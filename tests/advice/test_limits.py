"""What bounds a run, on traces with known times."""

import pytest

from fastps.advice.replay import limits
from fastps.errors import UsageError
from tests.report.traces import asp, bsp


def test_a_run_is_measured_by_the_steps_of_its_steady_part() -> None:
    assert limits(bsp([10, 30], 60))["measured"]["steps_per_s"] == pytest.approx(2 / 0.0306, rel=0.03)


def test_the_cores_limit_is_the_cores_over_the_processor_time_of_a_step() -> None:
    found = limits(asp([10, 10], 60))
    assert found["cores"]["core_ms"] == pytest.approx(5.15, rel=0.02), "half of each step, push and fold"
    assert found["cores"]["steps_per_s"] == pytest.approx(8 / 5.15e-3, rel=0.02)
    assert found["measured"]["steps_per_s"] == pytest.approx(2 / 0.0101, rel=0.05)


def test_a_short_run_has_no_limits() -> None:
    with pytest.raises(UsageError, match="record longer"):
        limits(bsp([10, 10], 3))
