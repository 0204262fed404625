"""Run a program as a user does: a script under `fastps run`, or alone."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients import digits

_TESTS = Path(__file__).parents[1]


def needs(*packages: str) -> None:
    """Skip a module whose programs need packages that are not installed. They are not imported here, which takes seconds."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: it belongs to the extra fastps[clients]", allow_module_level=True)


def run(script: str, folder: Path, *arguments: str, workers: int = 0, env: str = "auto", sync: str = "asp") -> Any:
    """Run a script that writes `result-RANK.json`; with `workers`, under `fastps run`. Returns the ended process."""
    file = folder / "program.py"
    file.write_text(script)
    command = [sys.executable, str(file), *arguments]
    if workers:
        launch = [sys.executable, "-m", "fastps.cli", "run", "-n", str(workers), "--sync", sync, "--env", env]
        command = [*launch, str(file), *arguments]
    # The programs import the task; the repository's root also has a package `kernels`, as other projects may.
    (folder / "tests").symlink_to(_TESTS)
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def results(folder: Path) -> list[dict[str, Any]]:
    """The contents of each worker's `result-RANK.json`, in rank order."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("result-*.json"))]


def check_two_workers(script: str, folder: Path, *arguments: str, workers: int = 2) -> None:
    """Two workers of a script learn what the plain program learns. With `workers` 0 the script starts them."""
    ended = run(script, folder, *arguments, workers=workers)
    assert ended.returncode == 0, ended.stderr
    found = results(folder)
    assert len(found) == 2
    assert found[0]["accuracy"] >= digits.least_accuracy()
    assert found[0]["version"] == sum(each["steps"] for each in found), "every push of every worker is an update, once"
