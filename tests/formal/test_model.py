"""The Promela model of lanes, shard lock, commit and pins: spin visits every interleaving, and finds each mutant.

Skipped without spin (`apt-get install spin`), which nothing else needs.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).with_name("protocol.pml")
MUTANTS = ["FORGET_PENDING", "FLIP_FIRST", "FORGET_RECHECK", "FORGET_PINS", "KEEP_TURN"]

pytestmark = pytest.mark.skipif(
    shutil.which("spin") is None or shutil.which("cc") is None, reason="needs spin and a C compiler: apt-get install spin"
)


def _verify(folder: Path, *definitions: str) -> tuple[int, int, str]:
    """The number of states, the number of errors and the verifier's output for the model with these definitions."""
    flags = [f"-D{definition}" for definition in definitions]
    subprocess.run(["spin", *flags, "-a", str(MODEL)], cwd=folder, check=True, capture_output=True)
    subprocess.run(["cc", "-O2", "-DSAFETY", "-DCOLLAPSE", "-o", "pan", "pan.c"], cwd=folder, check=True, capture_output=True)
    ended = subprocess.run([str(folder / "pan"), "-m200000"], cwd=folder, capture_output=True, text=True, check=False)
    states = re.search(r"(\d+)(?:\.\d+e\+\d+)? states, stored", ended.stdout)
    errors = re.search(r"errors: (\d+)", ended.stdout)
    assert states and errors, ended.stdout + ended.stderr
    assert "max search depth too small" not in ended.stdout
    return int(states[1]), int(errors[1]), ended.stdout


@pytest.mark.slow
def test_no_interleaving_and_no_death_loses_a_push_or_spoils_a_pinned_buffer(tmp_path: Path) -> None:
    states, errors, words = _verify(tmp_path)
    assert errors == 0, words
    assert states > 1_000_000, words


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_model_finds_a_mutant(tmp_path: Path, mutant: str) -> None:
    _, errors, words = _verify(tmp_path, mutant)
    assert errors == 1, words
