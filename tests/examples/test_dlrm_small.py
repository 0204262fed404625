"""The small DLRM learns most of what can be learned of synthetic clicks, however it is started."""

import re

import pytest

from tests.support import example_programs


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fastps run", "torchrun"])
def test_most_of_what_can_be_learned_is_learned(way: str) -> None:
    ended = example_programs.run(way, "dlrm_small.py", "--rows", "300", "--batch-size", "256", "--steps", "200", "--lr", "0.02")
    found = re.search(r"loss (\S+), at best (\S+), of the mean alone (\S+): (\d+) % learned", ended.stdout)
    assert found, ended.stdout
    loss, best, constant = map(float, found.groups()[:3])
    assert best < loss < constant
    assert int(found[4]) >= 60
