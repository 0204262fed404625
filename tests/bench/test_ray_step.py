"""The comparison of a step under Ray Train with one under fastps.spawn runs, and finds each push counted once."""

import importlib.util
import re
import sys

import pytest

from tests.support.scripts import output


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra fastps[ray] is not installed")
@pytest.mark.timeout(300)
def test_both_ways_make_the_same_steps() -> None:
    command = [sys.executable, "-m", "fastps.bench.integrations.ray_step", "--pairs", "1", "--workers", "1", "--steps", "20"]
    found = re.search(r"^([\d.]+)\t([\d.]+)\t[\d.]+\t[\d.]+$", output(command), re.M)
    assert found and min(float(found[1]), float(found[2])) >= 10, "a step waits for 10 ms"
