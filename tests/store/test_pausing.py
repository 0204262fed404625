"""A step under pdb: the debugger asks at the terminal and stops in the script's own frame."""

import fcntl
import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

from tests.support.commands import OF_A_JOB
from tests.support.scripts import program

SCRIPT = """
from fastps.store import pausing

def train():
    loss = 41
    pausing.pause(2, 140)
    loss += 1
    print("loss", loss)

train()
"""


def answers(command: list[str], said: bytes) -> tuple[str, int]:
    """What a process in a session of its own shows at its terminal, where `said` is typed, and its exit code."""
    controller, terminal = pty.openpty()

    def own_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    environment = {name: value for name, value in os.environ.items() if name not in OF_A_JOB}
    streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    process = subprocess.Popen(command, env=environment, preexec_fn=own_terminal, **streams)
    os.close(terminal)
    os.write(controller, said)
    shown = b""
    try:
        while part := os.read(controller, 4096):
            shown += part
    except OSError:  # the terminal's last process has ended
        pass
    finally:
        os.close(controller)
    return shown.decode(), process.wait(60)


def test_pdb_stops_in_the_script_and_reads_from_the_terminal(tmp_path: Path) -> None:
    shown, code = answers(program(tmp_path, SCRIPT), b"p 'found', loss\nn\np 'then', loss\nc\n")
    assert code == 0, shown
    assert "(worker 2, step 140)" in shown and "-> loss += 1" in shown
    assert "('found', 41)" in shown and "('then', 42)" in shown and "loss 42" in shown


def test_breakpoint_asks_at_the_launchers_terminal_in_each_worker_and_gives_it_back(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, signal, sys, time\nrank = int(os.environ['FASTPS_RANK'])\nbreakpoint()\nprint('rank', rank, flush=True)\n"
        "terminal = os.open('/dev/tty', os.O_RDONLY)\n"
        "while os.tcgetpgrp(terminal) != os.getpgid(os.getppid()): time.sleep(0.01)\n"
    )
    command = [sys.executable, "-m", "fastps", "run", "-n", "2", "--start-method", "spawn", str(tmp_path / "script.py")]
    shown, code = answers(command, b"rank += 10\nc\nrank += 10\nc\n")
    assert code == 0 and "[0] rank 10" in shown and "[1] rank 11" in shown, shown
    assert "(worker 0) " in shown and "(worker 1) " in shown


def test_without_a_terminal_the_step_cannot_be_paused(tmp_path: Path) -> None:
    found = subprocess.run(
        program(tmp_path, SCRIPT),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, start_new_session=True, check=False,
    )  # fmt: skip
    assert found.returncode == 1
    assert found.stderr.splitlines()[-1].endswith(
        "worker 2, step 140: expected a terminal for pdb, found none (No such device or address)"
    )
