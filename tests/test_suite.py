"""What the suite promises about itself: nothing outlives its process, and a test that hangs says where."""

import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fastps.network.tcp_store import connect_store
from tests.support import nodes, processes
from tests.support.sizes import mark_unsampled

ROOT = Path(__file__).parents[1]

STARTS = """
import os, pathlib, subprocess, sys, time
import pytest

folder = pathlib.Path(__file__).parent

@pytest.mark.parametrize("number", [0, 1])
def test_that_starts_processes(number):
    program = "import subprocess, sys; print(subprocess.Popen(['sleep', '300']).pid, flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    launcher = subprocess.Popen([sys.executable, "-c", program], start_new_session=True, **pipes)
    forked = os.fork()
    if forked == 0:
        time.sleep(300)
    started = [launcher.pid, int(launcher.stdout.readline()), forked]
    (folder / f"pending-{number}").write_text(" ".join(map(str, started)))
    (folder / f"pending-{number}").rename(folder / f"started-{number}")
    time.sleep(300)
"""

HANGS = """
import time
import pytest
from tests.support import processes
from tests.support.sizes import mark_unsampled

def wait_for_what_never_comes():
    time.sleep(300)

def test_whose_child_hangs():
    child = processes.start(wait_for_what_never_comes)
    processes.results([child], 1)

@pytest.mark.timeout(2)
def test_that_hangs_with_its_child():
    processes.start(wait_for_what_never_comes)
    time.sleep(300)
"""


SKIPS = """
import pytest

@pytest.mark.skip("frobnicate is not installed")
def test_that_lacks_a_program():
    pass

@pytest.mark.skip("there is a GPU here")
def test_that_lacks_what_cannot_be_installed():
    pass
"""


@contextlib.contextmanager
def _pytest(folder: Path, text: str, *options: str) -> Iterator["subprocess.Popen[str]"]:
    """A run of pytest over one file, with the suite's conftest."""
    (folder / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.conftest"]
    command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), *options, str(folder / "test_it.py")]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, **pipes) as run:
        try:
            yield run
        finally:
            run.kill()


@pytest.mark.parametrize(("number", "parallel"), [
    pytest.param(signal.SIGKILL, [], id="SIGKILL"),
    pytest.param(signal.SIGINT, ["-n", "2"], id="SIGINT under xdist", marks=pytest.mark.slow),
    pytest.param(signal.SIGTERM, [], id="SIGTERM", marks=pytest.mark.slow),
])  # fmt: skip
def test_what_tests_start_ends_with_their_process(tmp_path: Path, number: signal.Signals, parallel: list[str]) -> None:
    with _pytest(tmp_path, STARTS, *parallel) as run:
        deadline = time.monotonic() + 60
        while len(files := list(tmp_path.glob("started-*"))) < (2 if parallel else 1):
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        started = [int(word) for file in files for word in file.read_text().split()]
        assert all(map(processes.runs, started))
        run.send_signal(number)
        processes.wait_until(lambda: not any(map(processes.runs, started)), 30, f"some of these still run: {started}")


@pytest.mark.slow
def test_a_hang_says_where_every_process_is(tmp_path: Path) -> None:
    with _pytest(tmp_path, HANGS) as run:
        said, _ = run.communicate(timeout=100)
    assert said.count("wait_for_what_never_comes (test_it.py:") + said.count('"test_it.py", line') >= 2, said
    assert "still running after 1 s: process" in said
    assert "running at the test's time limit: process" in said


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["one process", "xdist"])
def test_a_complete_run_fails_for_a_test_that_lacks_what_can_be_installed(tmp_path: Path, options: tuple[str, ...]) -> None:
    with _pytest(tmp_path, SKIPS, "--complete", *options) as run:
        said, _ = run.communicate(timeout=100)
    assert run.returncode == 1, said
    assert re.findall("MISSING .*", said) == [
        "MISSING test_it.py::test_that_lacks_a_program: Skipped: frobnicate is not installed"
    ]
    with _pytest(tmp_path, SKIPS, *options) as run:
        said, _ = run.communicate(timeout=100)
    assert run.returncode == 0, said


def test_a_forked_child_destroys_nothing_that_its_parent_left_in_cycles() -> None:
    destroyed_in: list[int] = []

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            destroyed_in.append(os.getpid())

    def destroyed_here() -> bool:
        gc.collect()
        return os.getpid() in destroyed_in

    Cycle()
    child = processes.start(destroyed_here)
    processes.finish([child], 10)
    assert child.outcome is False


def test_a_worker_that_is_forked_while_others_come_to_the_rendezvous_comes_too() -> None:
    def come(rank: int, port: int) -> str:
        connect_store("127.0.0.1", port, 30.0).set(f"{rank}", "")
        return "came"

    with nodes.rendezvous() as port:
        assert processes.results([processes.start(partial(come, rank, port)) for rank in range(40)], 30) == ["came"] * 40


class Case(pytest.Item):
    def runtest(self) -> None:
        """Nothing: it is only marked."""


def test_of_a_test_with_many_cases_every_third_runs_each_time_and_the_others_are_slow(request: pytest.FixtureRequest) -> None:
    cases = [Case.from_parent(request.session, name=f"test[{outer}{inner}]") for outer in range(3) for inner in range(3)]
    for case in cases:
        case.add_marker(pytest.mark.sampled(3))
    mark_unsampled(cases)
    assert [case.name for case in cases if not case.get_closest_marker("slow")] == ["test[00]", "test[12]", "test[21]"]
