"""Ctrl-C ends an example without a traceback, and leaves no process behind."""

import os
import signal
import subprocess
import sys

import pytest

from tests.support.commands import OF_A_JOB
from tests.support.example_programs import EXAMPLES

LONG = {
    "actor_learner/main.py": ("--solved", "501", "--updates", "1000000"),
    "actor_learner/plain.py": ("--solved", "501", "--updates", "1000000"),
    "hogwild_mnist/main.py": ("--epochs", "1000", "--images", "256"),
    "hogwild_mnist/plain.py": ("--epochs", "1000", "--images", "256"),
    "gnn_nodes.py": ("--steps", "1000000"),
    "language_model.py": ("--steps", "1000000", "--width", "16", "--heads", "2", "--context", "8"),
}


@pytest.mark.slow
@pytest.mark.parametrize("program", LONG)
def test_ctrl_c_ends_it_without_a_traceback(program: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in OF_A_JOB}
    command = [sys.executable, "-u", str(EXAMPLES / program), *LONG[program]]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline(), "it shows its progress"
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors, errors
