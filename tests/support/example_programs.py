"""Run a program of examples/ as a user does: alone, under `fastps run`, or under torchrun."""

import subprocess
import sys
from pathlib import Path

from tests.support import commands

EXAMPLES = Path(__file__).parents[2] / "examples"
WAYS = ("alone", "fastps run")

_ALONE = (
    "import runpy, sys; from pathlib import Path; sys.argv = sys.argv[1:];"
    " sys.path.insert(0, str(Path(sys.argv[0]).parent)); runpy.run_path(sys.argv[0], run_name='__main__')"
)


def run(way: str, program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run `examples/PROGRAM` with these arguments, alone or as two workers, and check that it succeeds."""
    file = str(EXAMPLES / program)
    if way == "alone":
        ended = commands.fastps(file, *arguments, code=_ALONE)
    elif way == "fastps run":
        ended = commands.fastps("run", "-n", "2", file, *arguments)
    else:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        ended = subprocess.run([*launch, file, *arguments], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended


def workers_of(way: str) -> int:
    """How many workers a way starts."""
    return 1 if way == "alone" else 2
