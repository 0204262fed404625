"""The slices of the slow tests: together all of them, each once, whatever the times say; and what a failure in one does."""

import argparse
import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripts import loaded

ROOT = Path(__file__).parents[1]
TOOL = ROOT / "tools" / "slices.py"
pytestmark = pytest.mark.skipif(not TOOL.exists(), reason="tests run without the source tree")


@pytest.fixture(scope="module")
def tool() -> Any:
    """tools/slices.py as a module."""
    return loaded(TOOL)


def test_six_slices_are_all_test_files_each_once(tool: Any) -> None:
    expected = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("**/test_*.py"))
    assert expected and "tests/crash/test_chaos.py" in expected
    for count in (1, 6):
        dealt = [file for each in tool.deal(tool.test_files(), tool.read_times(), count) for file in each]
        assert sorted(dealt) == expected


@pytest.mark.parametrize("seed", range(5))
def test_a_file_stays_in_its_slice_whoever_else_is_there_and_a_new_one_has_one(tool: Any, seed: int) -> None:
    draw = random.Random(seed)
    files = [f"tests/room/test_{number}.py" for number in range(40)]
    times_s = {file: draw.random() * 60 for file in files[:30]}
    whole = tool.deal(files, times_s, 6)
    assert sorted(file for each in whole for file in each) == sorted(files)
    assert tool.deal(draw.sample(files, 40), times_s, 6) == whole, "the order in which the files are found changes nothing"


def test_slices_take_about_as_long_as_each_other(tool: Any) -> None:
    times_s = tool.read_times()
    assert set(times_s) <= set(tool.test_files()), "make slow-times renews the times"
    loads_s = [sum(times_s.get(file, 0.0) for file in each) for each in tool.deal(tool.test_files(), times_s, 6)]
    assert max(loads_s) <= 1.1 * min(loads_s), loads_s


@pytest.mark.parametrize("text", ["0/6", "7/6", "2", "a/6", "1/0", "-1/6", ""])
def test_what_is_no_slice_is_refused(tool: Any, text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected a slice such as 2/6"):
        tool.parse_slice(text)


def test_times_come_from_reports_of_pytest(tool: Any, tmp_path: Path) -> None:
    report = '<testsuites><testsuite><testcase file="tests/a/test_b.py" name="x" time="1.5"/></testsuite></testsuites>'
    for name in ("one", "two"):
        (tmp_path / name).write_text(report)
    assert tool.measured_s([tmp_path / "one", tmp_path / "two"]) == {"tests/a/test_b.py": 3.0}
