"""Signals that end a command: no tracebacks of its processes, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

BENCH = ["bench", "step", "--workers", "2", "--parameters", "1e6", "--against", "limit"]


@pytest.mark.parametrize(
    "arguments", [pytest.param(BENCH, marks=pytest.mark.slow), ["chaos", "--nodes", "3", "--seeds", "1000000"]]
)
def test_ctrl_c_ends_a_command_and_its_processes_without_a_word_of_these(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "fastps", *arguments]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, start_new_session=True) as process:
        while len(psutil.Process(process.pid).children(recursive=True)) < 3:  # one is multiprocessing's
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate()
    assert (process.returncode, output) == (130, "")
    assert "Traceback" not in errors and errors.count("\n") <= 1


@pytest.mark.sampled(4)
@pytest.mark.parametrize("module", ["errno", "fastps.cli.commands", "fastps.cli.tables", "rich.console", "typer"])
def test_ctrl_c_during_the_imports_of_the_command_line_leaves_no_traceback(module: str, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nclass Finder:\n    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        f"sys.modules.pop({module!r}, None)\nsys.meta_path.insert(0, Finder())\nfrom fastps.cli.main import main\nmain()"
    )
    ended = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


def test_sigterm_ends_a_command_in_order(tmp_path: Path) -> None:
    code = (
        "import sys, tempfile, time\nfrom fastps.cli import main\n@main.app.command()\ndef wait():\n"
        "    with tempfile.TemporaryDirectory(dir=sys.path.pop()):\n        print(flush=True)\n        time.sleep(600)\n"
        "sys.path.append(sys.argv.pop())\nmain.main()"
    )
    command = [sys.executable, "-c", code, "wait", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline()
        assert list(tmp_path.iterdir())
        process.terminate()
        assert process.communicate() == ("", "")
    assert process.returncode == 143 and not list(tmp_path.iterdir())
