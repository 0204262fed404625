"""What a terminal, or a file, shows of several workers that write at the same time."""

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastps.clock import MonotonicClock
from fastps.job_output import JobOutput


class Terminal(io.StringIO):
    """A terminal that obeys what JobOutput sends it: up some lines, and clear what is below."""

    def isatty(self) -> bool:
        return True

    def shown(self) -> list[str]:
        lines = [""]
        for piece in re.split(r"(\x1b\[\d+F|\x1b\[J|\n)", self.getvalue()):
            if piece == "\n":
                lines.append("")
            elif up := re.fullmatch(r"\x1b\[(\d+)F", piece):
                del lines[len(lines) - 1 - int(up[1]) :]
                lines.append("")
            elif piece != "\x1b[J":
                lines[-1] += piece
        return lines[:-1]


class Steps(MonotonicClock):
    """A clock that shows what it is told to."""

    time_ns = 0

    def now_ns(self) -> int:
        return self.time_ns


def test_bars_of_two_workers_keep_a_line_each_on_a_terminal() -> None:
    terminal, output = Terminal(), JobOutput(Steps())
    output.write(0, "10%\r", terminal)
    output.write(1, "20%\r", terminal)
    assert terminal.shown() == ["[0] 10%", "[1] 20%"]
    output.write(0, "30%\r", terminal)
    output.write(1, "a loss of 0.5\n", terminal)
    assert terminal.shown() == ["[1] a loss of 0.5", "[0] 30%"]
    output.write(1, "40%\r", terminal)
    output.write(0, "100%\n", terminal)
    output.end(1)
    assert terminal.shown() == ["[1] a loss of 0.5", "[0] 100%", "[1] 40%"]


def test_bar_wider_than_the_terminal_takes_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    terminal, output = Terminal(), JobOutput(Steps())
    for _ in range(3):
        output.write(0, "x" * 100 + "\r", terminal)
    assert terminal.shown() == ["[0] " + "x" * 15]


def test_bars_are_lines_of_a_file_one_a_second_and_the_last() -> None:
    file, clock = io.StringIO(), Steps()
    output = JobOutput(clock)
    for percent in range(0, 100, 10):
        clock.time_ns = percent * 20_000_000
        output.write(0, f"{percent}%\r", file)
        output.write(1, f"{percent}%\r", file)
    output.write(0, "100%\n", file)
    output.end(0)
    output.end(1)
    assert file.getvalue().splitlines() == ["[0] 0%", "[1] 0%", "[0] 50%", "[1] 50%", "[0] 100%", "[1] 90%"]


@pytest.mark.parametrize("before", [["python"], ["python3"], [sys.executable], ["python", "-u"], ["python", "-m"]])
def test_interpreter_before_the_script_is_this_one(before: list[str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys\nprint(sys.argv[1:], sys.executable)\n")
    script = "script" if before[-1] == "-m" else "script.py"
    command = [sys.executable, "-m", "fastps.cli", "run", "-n", "1", *before, script, "--flag"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert ended.stdout == f"[0] ['--flag'] {sys.executable}\n", ended.stderr


def test_traceback_of_a_worker_is_printed_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("def fail():\n    raise ValueError('no luck')\nfail()\n")
    command = [sys.executable, "-m", "fastps.cli", "run", "-n", "1", str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr.count("in fail") == 1
    assert "its last line: ValueError: no luck" in ended.stderr
