"""`fastps chaos` from the build that people train with: it finds the failpoint build, or says how to make it."""

import json
from pathlib import Path

import pytest

from fastps.errors import UsageError
from fastps.lab.worlds import chaos
from tests.support import commands


def test_without_the_build_the_command_says_how_to_make_it(tmp_path: Path) -> None:
    said = commands.refused("chaos", "--seeds", "1", FASTPS_HOOKS_PATH=str(tmp_path))
    assert "make hooks" in said and str(tmp_path) in said


def _needs_hooks() -> None:
    try:
        chaos.hooks_path()
    except UsageError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_rows_have_the_agreed_keys_and_exit_codes_tell_violations() -> None:
    _needs_hooks()
    (row,) = commands.rows("chaos", "--seeds", "20")
    assert {"seeds", "steps", "faults", "violations", "worst_detection_s"} <= set(row)
    assert (row["seeds"], row["violations"]) == (20, 0)
    broken = commands.fastps("chaos", "--seeds", "10", "--mutant", "flip-first", "--json", "-")
    row = json.loads(broken.stdout)["rows"][0]
    assert broken.returncode == 1
    assert row["violations"] == len(row["failing"]) == 10
    assert "seed 0 (" in broken.stderr


def test_an_unknown_mutant_is_wrong_usage_and_the_known_are_named() -> None:
    _needs_hooks()
    assert "forget-pins" in commands.refused("chaos", "--seeds", "1", "--mutant", "drop-everything")
