"""What a terminal, or a file, shows of several workers that write at the same time."""

import io
import json
import os
import re
import signal
import sys
from datetime import datetime
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.console import Console

from fastps.processes.launcher import Launcher
from fastps.processes.outcome import LaunchedWorker, Outcome, failure_panel
from fastps.processes.output import JobOutput, LogOptions
from fastps.processes.worker_output import ErrorLines, Lines
from fastps.system.clock import Clock
from fastps.system.memory_limits import oom_reason
from tests.support.commands import fastps, refused
from tests.support.scripts import program


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


class Steps(Clock):
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
    output.end(1, terminal)
    assert terminal.shown() == ["[1] a loss of 0.5", "[0] 100%", "[1] 40%"]


@pytest.mark.parametrize(("variable", "value", "bars", "shown"), [
    pytest.param("COLUMNS", "20", [(0, "x" * 100)] * 3, ["[0] " + "x" * 15], id="a bar wider than the terminal"),
    pytest.param(
        "LINES", "6", [(rank, "10%") for rank in range(8)], ["[0] 10%", "[1] 10%", "[2] 10%", "... and 5 more"],
        id="more bars than the terminal has rows",
    ),
    pytest.param(
        "COLUMNS", "11", [(0, "\x1b[32m12345\x1b[0m"), (1, "\u5b66\u4e60\u7387\u5b66")],
        ["[0] \x1b[32m12345\x1b[0m", "[1] \u5b66\u4e60\u7387"], id="colours and wide characters",
    ),
])  # fmt: skip
def test_bars_take_the_room_that_they_take_a_line_each_and_no_more_than_there_is(
    variable: str, value: str, bars: list[tuple[int, str]], shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    terminal, output = Terminal(), JobOutput(Steps())
    for rank, bar in bars:
        output.write(rank, bar + "\r", terminal)
    assert terminal.shown() == shown


def test_bars_are_lines_of_a_file_one_a_second_and_the_last() -> None:
    file, clock = io.StringIO(), Steps()
    output = JobOutput(clock)
    for percent in range(0, 100, 10):
        clock.time_ns = percent * 20_000_000
        output.write(0, f"{percent}%\r", file)
        output.write(1, f"{percent}%\r", file)
    output.write(0, "100%\n", file)
    output.end(0, file)
    output.end(1, file)
    assert file.getvalue().splitlines() == ["[0] 0%", "[1] 0%", "[0] 50%", "[1] 50%", "[0] 100%", "[1] 90%"]


# What tqdm writes, in pieces as they come through a pipe: a bar begins with its carriage return.
ONE_LOOP = [b"\r  0%", b"\r 50%", b"\r100%", b"\n"]
NESTED_LOOPS = [
    *(b"\repochs 0%", b"\n\rsteps 0%\x1b[A", b"\n\rsteps 50%\x1b[A", b"\n\r         \x1b[A", b"\repochs 50%"),
    *(b"\n\rsteps 0%\x1b[A", b"\n\rsteps 50%\x1b[A", b"\n\r         \x1b[A", b"\repochs 100%", b"\n"),
]


def _pass_on(pieces: list[bytes], output: JobOutput, sink: io.StringIO, clock: Steps | None = None, seconds: float = 0) -> None:
    """As the launcher does, with so many seconds before each piece."""
    lines = Lines()
    for piece in pieces:
        if clock is not None:
            clock.time_ns += int(seconds * 1e9)
        for line in [*lines.feed(piece), *([lines.bar + b"\r"] if lines.bar else [])]:
            output.write(0, line.decode(), sink)


def test_long_line_stays_whole_up_to_a_mebibyte_and_is_passed_on_in_parts_beyond() -> None:
    lines = Lines()
    pieces = [lines.feed(b"x" * (1 << 16)) for _ in range(16)]
    assert pieces == [[]] * 16
    assert lines.feed(b"y\n") == [b"x" * (1 << 20) + b"y\n"]
    assert [*lines.feed(b"z" * (1 << 20)), *lines.feed(b"z")] == [b"z" * ((1 << 20) + 1)]


def test_bar_that_begins_with_its_carriage_return_is_shown_at_once() -> None:
    for shown, until in (["[0]   0%"], 1), (["[0]  50%"], 2), (["[0] 100%"], 4):
        terminal, output = Terminal(), JobOutput(Steps())
        _pass_on(ONE_LOOP[:until], output, terminal)
        assert terminal.shown() == shown


@pytest.mark.parametrize(("pieces", "seconds", "shown"), [
    pytest.param(ONE_LOOP, 1.0, ["[0]   0%", "[0]  50%", "[0] 100%"], id="slow"),
    pytest.param(ONE_LOOP, 0.1, ["[0]   0%", "[0] 100%"], id="fast"),
    pytest.param(ONE_LOOP[:3], 0.0, ["[0]   0%", "[0] 100%"], id="without an end"),
])  # fmt: skip
def test_bar_in_a_file_has_its_last_update_and_neither_empty_lines_nor_a_line_twice(
    pieces: list[bytes], seconds: float, shown: list[str]
) -> None:
    file, clock = io.StringIO(), Steps()
    output = JobOutput(clock)
    _pass_on(pieces, output, file, clock, seconds)
    output.end(0, file)
    assert file.getvalue().splitlines() == shown


def test_nested_bars_are_one_line_below_the_outer_loops_and_move_no_cursor() -> None:
    terminal, output = Terminal(), JobOutput(Steps())
    output.write(1, "1%\r", terminal)
    _pass_on(NESTED_LOOPS[:3], output, terminal)
    assert terminal.shown() == ["[0] epochs 0%", "[0] steps 50%", "[1] 1%"]
    file, output = io.StringIO(), JobOutput(Steps())
    _pass_on(NESTED_LOOPS, output, file)
    output.end(0, file)
    assert file.getvalue().splitlines() == ["[0] epochs 0%", "[0] epochs 50%", "[0] epochs 100%"]
    assert "\x1b" not in file.getvalue()


def test_line_on_the_other_stream_leaves_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, output = Terminal(), JobOutput(Steps())
    errors = Terminal()
    errors.write = terminal.write  # type: ignore[method-assign]  # one terminal, two streams
    monkeypatch.setattr(sys, "stderr", errors)
    output.write(0, "10%\r", errors)
    output.write(0, "a loss of 0.5\n", terminal)
    assert terminal.shown() == ["[0] a loss of 0.5", "[0] 10%"]
    output.end(0, terminal)
    output.write(0, "100%\n", errors)
    assert terminal.shown() == ["[0] a loss of 0.5", "[0] 100%"]


def test_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    terminal, output = Terminal(), JobOutput(Steps())
    _pass_on(ONE_LOOP, output, terminal)
    assert terminal.getvalue() == "[0]   0%\n[0] 100%\n"


def test_lines_of_others_do_not_get_between_the_bars() -> None:
    terminal, output = Terminal(), JobOutput(Steps())
    output.write(0, "10%\r", terminal)
    output.hide_bars()
    terminal.write("worker 1 ended by SIGKILL; started another\n")
    output.write(0, "20%\r", terminal)
    assert terminal.shown() == ["worker 1 ended by SIGKILL; started another", "[0] 20%"]


def test_launcher_shows_a_bar_before_its_next_update_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script.py").write_text(
        "import os, sys, time\nprint('\\r50%', end='', flush=True)\nfor _ in range(200):\n    time.sleep(0.05)\n"
        "    if os.path.exists('seen'):\n        sys.exit()\nsys.exit('not seen')\n"
    )
    monkeypatch.chdir(tmp_path)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)

    def look() -> None:
        if terminal.shown() == ["[0] 50%"]:
            (tmp_path / "seen").touch()

    assert Launcher([sys.executable, "script.py"], 1).run(look).exit_code == 0
    assert terminal.shown() == ["[0] 50%"]


@pytest.mark.slow
@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "before", [["python"], ["python3"], [sys.executable], ["python", "-u"], ["python", "-m"], ["environment/bin/python"]]
)
def test_interpreter_before_the_script_is_this_one(before: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "environment/bin").mkdir(parents=True)
    (tmp_path / "environment/bin/python").symlink_to(sys.executable)
    (tmp_path / "script.py").write_text("import sys\nprint(sys.argv[1:], sys.executable)\n")
    monkeypatch.chdir(tmp_path)
    script = "script" if before[-1] == "-m" else "script.py"
    ended = fastps("run", "-n", "1", *before, script, "--flag")
    assert ended.stdout == f"[0] ['--flag'] {sys.executable}\n", ended.stderr


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["python", "./python", "folder/python"])
def test_script_that_is_called_python_is_a_script(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / name).write_text("import sys\nprint(sys.argv[1:])\n")
    monkeypatch.chdir(tmp_path)
    ended = fastps("run", "-n", "1", name, "x.py")
    assert ended.stdout == "[0] ['x.py']\n", ended.stderr


def test_interpreter_that_is_not_there_is_wrong_usage() -> None:
    ended = fastps("run", "-n", "1", "/nowhere/bin/python", "x.py")
    assert (ended.returncode, "found no file '/nowhere/bin/python'" in ended.stderr) == (2, True)


def test_traceback_of_a_worker_is_printed_once(tmp_path: Path) -> None:
    ended = fastps("run", "-n", "1", program(tmp_path, "def fail():\n    raise ValueError('no luck')\nfail()\n")[1])
    assert ended.returncode == 1
    assert ended.stderr.count("in fail") == 1
    assert "the last line of its stderr: ValueError: no luck" in ended.stderr


def _panel_of(outcome: Outcome) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(failure_panel(outcome))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_panel_shows_a_last_line_as_it_was_written(tmp_path: Path) -> None:
    text = r"import sys; sys.exit('expected x[:100:] and \[red], found \x1b[31m:boom:\x1b[0m')"
    outcome = Launcher(program(tmp_path, text), 1).run()
    assert r"the last line of its stderr: expected x[:100:] and \[red], found :boom: " in _panel_of(outcome)


def test_panel_tells_of_the_memory_whatever_is_written_after_the_worker_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = iter(range(100))
    monkeypatch.setattr("fastps.processes.launcher.oom_kills", lambda: next(kills))
    text = (
        "import os, sys, time\nworker = os.getpid()\nif os.fork() == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n"
        "    while os.path.exists(f'/proc/{worker}'): time.sleep(0.01)\n    sys.exit('its daemon')\n"
        "os.wait()\ntime.sleep(1)\nos.kill(worker, 9)\n"  # the launcher has seen by then that the daemon is on its own
    )
    shown = _panel_of(Launcher(program(tmp_path, text), 1).run())
    assert f"worker 0 failed first: ended by SIGKILL{oom_reason()}" in shown
    assert "memory ran out: use fewer workers" in shown
    assert "the last line of its stderr: its daemon" in shown


def test_text_without_an_end_of_line_is_passed_on_although_a_child_keeps_the_pipe_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        "import os, subprocess, sys\nchild = subprocess.Popen(['sleep', '60'])\nprint(child.pid, flush=True)\n"
        "for number, word in enumerate(['result', 'warning'], 1): os.write(number, b'the last ' + word.encode())\n"
    )
    outcome = Launcher(program(tmp_path, text), 1, start_method="spawn").run()
    captured = capsys.readouterr()
    child, last = captured.out.splitlines()
    os.kill(int(child.removeprefix("[0] ")), signal.SIGKILL)
    assert (last, captured.err) == ("[0] the last result", "[0] the last warning\n")
    assert list(outcome.workers[0].errors.tail) == ["the last warning"]


# -- files and JSON --------------------------------------------------------------------------------


def test_each_rank_has_a_file_for_each_stream_without_bars_and_its_replacement_goes_on_there(tmp_path: Path) -> None:
    stream, output = io.StringIO(), JobOutput(Steps(), LogOptions(tmp_path / "a" / "logs"))
    output.write_all(1, ["one\n", "50%\r", "caf\udce9\r\n"], stream)  # type: ignore[arg-type]
    output.write_all(1, ["bad\n"], stream, "stderr")  # type: ignore[arg-type]
    again = JobOutput(Steps(), LogOptions(tmp_path / "a" / "logs"))
    again.write_all(1, ["two"], stream)  # type: ignore[arg-type]
    assert (tmp_path / "a" / "logs" / "1" / "stdout.log").read_bytes() == b"one\ncaf\xe9\ntwo\n"
    assert (tmp_path / "a" / "logs" / "1" / "stderr.log").read_text() == "bad\n"
    assert "[1] 50%\n" in stream.getvalue()


def test_a_launch_in_json_writes_an_object_a_line_its_own_sentences_too(tmp_path: Path) -> None:
    text = "import os, sys\nprint('[x]', end='\\r'); print('done')\nsys.exit('full' if os.environ['FASTPS_RANK'] == '1' else 0)"
    command, rows = ("--log-format", "json", "--log-dir", str(tmp_path / "logs")), tmp_path / "rows.json"
    ended = fastps("run", "-n", "2", *command, "--job", f"{os.getpid()}-json", "--json", str(rows), program(tmp_path, text)[1])
    assert ended.returncode == 1
    out, err = ([json.loads(line) for line in stream.splitlines()] for stream in (ended.stdout, ended.stderr))
    assert sorted((each["rank"], each["stream"], each["text"]) for each in out) == [(r, "stdout", "done") for r in range(2)]
    assert all(datetime.fromisoformat(each["time"]).tzinfo is not None for each in [*out, *err])
    assert err[0]["job"] == f"{os.getpid()}-json" and "2 workers" in err[0]["message"]
    assert {"rank": 1, "stream": "stderr", "text": "full"}.items() <= err[1].items()
    assert (err[-1]["level"], "worker 1 failed first: exit code 1" in err[-1]["message"]) == ("ERROR", True)
    found = {row["worker"]: row for row in json.loads(rows.read_text())["rows"]}
    assert (found[1]["reason"], found[1]["last_error"], found[1]["job"]) == ("exit code 1", "full", f"{os.getpid()}-json")
    assert 0 < found[1]["began_s"] < found[1]["ended_s"] < 60
    assert (tmp_path / "logs" / "0" / "stdout.log").read_text() == "done\n"


@pytest.mark.slow
def test_a_folder_for_logs_that_cannot_be_made_and_another_format_are_refused(tmp_path: Path) -> None:
    script = program(tmp_path, "")[1]
    assert "--log-dir /dev/null/x: expected a folder to write to, found: Not a directory" in refused(
        "run", "--log-dir", "/dev/null/x", script
    )
    assert "--log-dir /sys/kernel: expected a folder to write to, found: " in refused("run", "--log-dir", "/sys/kernel", script)
    assert "--log-format: expected text or json, found 'xml'" in refused("run", "--log-format", "xml", script)


def test_a_loss_is_one_also_where_torch_distributed_writes_a_rank_before_each_line() -> None:
    """As it does once a process group has begun: then the end of a node is no error of the script."""
    said = "Traceback (most recent call last):", '  File "x"', "fastps.errors.NodeLostError: node 1 was lost"
    for prefix in ("", "[rank0]: "):
        errors = ErrorLines()
        shown = errors.feed([f"{prefix}{line}\n".encode() for line in said])
        assert shown == [b"fastps.errors.NodeLostError: node 1 was lost\n"]
        assert LaunchedWorker(0, Mock(), exit_code=1, errors=errors).was_lost
