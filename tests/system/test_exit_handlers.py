"""What a process does for its open workers when it ends: how it ended is told to each of them."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from fastps.system import exit_handlers

class Owner:
    pass

closed, open_one = Owner(), Owner()
exit_handlers.register(closed, lambda failure: print("closed:", failure))
exit_handlers.register(open_one, lambda failure: print("open:", failure))
exit_handlers.forget(closed)
"""


@pytest.mark.parametrize(("ending", "exit_code", "told"), [
    ("", 0, "open: None\n"),
    ("sys.exit(0)", 0, "open: None\n"),
    ("raise ValueError('no luck')", 1, "open: ValueError: no luck\n"),
])  # fmt: skip
def test_an_owner_that_is_open_is_told_how_the_program_ended(ending: str, exit_code: int, told: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM + ending], capture_output=True, text=True, check=False, env=os.environ.copy()
    )
    assert (ended.returncode, ended.stdout) == (exit_code, told)
    assert ended.stderr.count("Traceback") == exit_code, "Python's own report stays"
