"""Print the fuzzed targets and seeds at the end of a run, so that it can be recorded and repeated."""

from typing import Any

from tests.fuzz import amount


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for line in amount.counted():
        terminalreporter.write_line(line)
