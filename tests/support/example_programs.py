"""Run a program of examples/ as a user does: alone, under `fastps run`, or under torchrun."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

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


def figures(way: str, program: str, *arguments: str) -> tuple[dict[str, Any], str]:
    """Run a program that writes figures with `--json`: the figures, and what it shows."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        shown = run(way, program, *arguments, "--json", str(file)).stdout
        return json.loads(file.read_text()), shown


def workers_of(way: str) -> int:
    """How many workers a way starts."""
    return 1 if way == "alone" else 2
