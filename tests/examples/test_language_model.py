"""The language model learns, and a run that stops and goes on ends as one that did not stop: to the bit, its average, too."""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.support import example_programs

SMALL = ("--steps", "16", "--width", "32", "--heads", "2", "--context", "32", "--batch-size", "4", "--lr", "0.01")
CHARACTERS = 103


def _figures(*arguments: str) -> tuple[dict[str, Any], str]:
    return example_programs.figures("fastps run", "language_model.py", *SMALL, *arguments)


@pytest.mark.slow
def test_a_run_that_stopped_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    whole, _ = _figures()
    assert whole["version"] == 16
    assert whole["held_out"] < 0.95 * math.log(CHARACTERS), "a guess without any learning"
    saved = ("--checkpoint", str(tmp_path / "saved"), "--every", "8")
    stopped, _ = _figures(*saved, "--until", "8")
    assert stopped["version"] == 8
    assert stopped["weights"] != whole["weights"]
    resumed, output = _figures("--resume", str(tmp_path / "saved"))
    assert "goes on at step 8" in output
    for figure in ("version", "weights", "held_out", "held_out_of_average"):
        assert resumed[figure] == whole[figure], figure
