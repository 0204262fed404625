"""A stream that takes nothing, or refuses, costs lines, which are counted; it neither blocks nor ends the launcher."""

import io
import logging
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from fastps.processes.launcher import Launcher
from fastps.processes.output_thread import MOST_BYTES, StandardStreams, Stream
from tests.support.processes import wait_until
from tests.support.scripts import program, started

RUN = [sys.executable, "-m", "fastps.cli", "run", "--quiet"]
NOBODY = (
    "no worker made a fastps.DistributedOptimizer: each of the 2 has run the script for itself; wrap the script's optimizer"
    " (docs/how-to/own-script.md)"
)


def _script(folder: Path, text: str) -> str:
    return program(folder, f"import os, signal, sys, time\nfolder = {str(folder)!r}\n{text}")[1]


def test_a_stream_that_nobody_reads_holds_nobody_up_and_its_lost_lines_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = os.pipe()
    line = "x" * 999 + "\n"
    count = 2 * MOST_BYTES // len(line)
    with os.fdopen(writer, "w", encoding="ascii") as unread, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", unread)
        streams = StandardStreams()
        with caplog.at_level(logging.WARNING, "fastps"), streams.carrying_logs(lambda: True):
            for _ in range(count):
                streams.thread_of(streams.out).put(lambda: streams.out.write(line), streams.out, len(line))
    os.close(reader)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.endswith("lines to standard output were lost: nobody has taken them")
    assert 0 < count - int(said.split()[0]) < 70, "what a pipe holds"


def test_logs_of_the_launcher_keep_their_order_and_their_handlers(caplog: pytest.LogCaptureFixture) -> None:
    streams, of_fastps = StandardStreams(), logging.getLogger("fastps")
    before = of_fastps.handlers, of_fastps.propagate
    with caplog.at_level(logging.INFO, "fastps"), streams.carrying_logs(lambda: False):
        for number in range(100):
            logging.getLogger("fastps.launch").info("line %d", number)
    assert [record.getMessage() for record in caplog.records] == [f"line {number}" for number in range(100)]
    assert (of_fastps.handlers, of_fastps.propagate) == before


def test_a_stream_without_a_file_gets_text() -> None:
    cell = io.StringIO()
    stream = Stream(cell)
    stream.write(b"caf\xe9 \xc2\xbd\n".decode("utf-8", "surrogateescape"))
    stream.flush()
    assert cell.getvalue() == "caf\ufffd \u00bd\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_bytes_pass_as_they_are_whatever_the_streams_encoding(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = b"a legacy caf\xe9 \x8a\n" + "\u5b66\u4e60 \u00bd\n".encode() + b"\r 10% \xe9\r 20% \xe9\n"
    script = _script(tmp_path, f"os.write(1, {written!r})")
    with (tmp_path / "log").open("w", encoding=encoding) as log:
        monkeypatch.setattr(sys, "stdout", log)
        assert Launcher([sys.executable, script], 1).run().exit_code == 0
    first, second = written.split(b"\n")[:2]
    shown = (tmp_path / "log").read_bytes().splitlines()
    assert (shown[:2], shown[-1]) == ([b"[0] " + first, b"[0] " + second], b"[0]  20% \xe9")


@pytest.mark.parametrize(("file", "reason"), [("/dev/full", "No space left on device"), (None, "it is closed")])
def test_an_output_that_takes_nothing_does_not_end_the_job(
    file: str | None, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stdout", None if file is None else open(file, "w", encoding="utf-8"))  # noqa: SIM115, PTH123
    with caplog.at_level(logging.WARNING, "fastps"):
        outcome = Launcher([sys.executable, _script(tmp_path, "print(1, 2, sep='\\n')")], 2).run()
    assert outcome.exit_code == 0
    said = [record.getMessage() for record in caplog.records]
    assert said == [NOBODY, f"4 lines to standard output were lost: {reason}"]


@pytest.mark.slow
def test_a_pipe_that_its_reader_closes_does_not_end_the_job(tmp_path: Path) -> None:
    text = "print('first', flush=True)\nwhile not os.path.exists(folder + '/closed'): time.sleep(0.02)\nprint('second')"
    process = started([*RUN, "-n", "1", _script(tmp_path, text)])
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "[0] first\n"
    process.stdout.close()
    (tmp_path / "closed").touch()
    assert process.stderr.read() == "fastps.launch: 1 lines to standard output were lost: Broken pipe\n"
    assert process.wait(60) == 0


@pytest.mark.slow
def test_a_reader_that_is_slower_than_the_workers_gets_every_line(tmp_path: Path) -> None:
    count = 3 * MOST_BYTES // 1000
    text = f"for number in range({count}): print(number, 'x' * 990)"
    with subprocess.Popen([*RUN, "-n", "1", _script(tmp_path, text)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        numbers = []
        for line in process.stdout:
            numbers.append(int(line.split()[1]))
            if len(numbers) % 5000 == 1:
                time.sleep(0.2)
    assert numbers == list(range(count))
    assert process.returncode == 0


@pytest.mark.slow
def test_closed_streams_of_the_command_take_no_pipe_of_a_worker(tmp_path: Path) -> None:
    text = "print('lost', flush=True)\nopen(folder + '/done', 'w').close()"
    command = subprocess.list2cmdline([*RUN, "-n", "2", _script(tmp_path, text)])
    ended = subprocess.run(f"exec {command} <&- >&- 2>&-", shell=True, check=False)
    assert (ended.returncode, (tmp_path / "done").exists()) == (0, True)


@pytest.mark.slow
def test_a_launcher_whose_output_nobody_reads_replaces_workers_and_obeys_signals(tmp_path: Path) -> None:
    text = (
        "if os.environ['FASTPS_RANK'] == '0':\n"
        "    for _ in range(3000): print('x' * 99); print('x' * 99, file=sys.stderr)\n"
        "    open(folder + '/flooded', 'w').close()\n    time.sleep(300)\n"
        "while not os.path.exists(folder + '/flooded'): time.sleep(0.02)\n"
        "if os.path.exists(folder + '/died'):\n    open(folder + '/replaced', 'w').close()\n    time.sleep(300)\n"
        "open(folder + '/died', 'w').close()\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [*RUN, "-n", "2", "--restarts", "1", _script(tmp_path, text)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            wait_until((tmp_path / "replaced").exists, 60, "a replacement")
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) > 0
        finally:
            process.kill()


def test_what_draws_is_left_out_while_the_terminal_takes_nothing() -> None:
    streams, goes_on, drawn = StandardStreams(), threading.Event(), []
    with streams.carrying_logs(lambda: False):
        streams.draw(goes_on.wait)
        for number in range(1000):
            streams.draw(lambda number=number: drawn.append(number))  # type: ignore[misc]
        goes_on.set()
        streams.thread_of(streams.err).put(lambda: None)
    assert drawn == []


@pytest.mark.slow
def test_a_training_on_a_terminal_that_takes_nothing_obeys_sigterm() -> None:
    """Ctrl-S, while the live table of the workers is shown."""
    reader, terminal = pty.openpty()
    other = os.open(os.ttyname(terminal), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    command = [sys.executable, "-m", "fastps.cli", "train", "--epochs", "100000", "-n", "2"]
    environment = {**os.environ, "TERM": "xterm"}
    streams: Any = {"stdin": terminal, "stdout": terminal, "stderr": terminal, "start_new_session": True}
    with subprocess.Popen(command, env=environment, **streams) as process:
        os.close(terminal)
        try:
            wait_until(lambda: len(psutil.Process(process.pid).children()) >= 3, 60, "two workers")
            with pytest.raises(BlockingIOError):
                while True:
                    os.write(other, b"x" * 100)
            time.sleep(0.5)  # it draws ten times a second
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 143
        finally:
            process.kill()
            os.close(reader)
            os.close(other)
