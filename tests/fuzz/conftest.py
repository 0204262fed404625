"""What was fuzzed is printed at the end, so that a run can be recorded and played again."""

from typing import Any

from tests.fuzz import amount


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for line in amount.counted():
        terminalreporter.write_line(line)
