"""Processes are looked at by their files under /proc: their names are anybody's, and they may end meanwhile."""

import ctypes
import signal
import subprocess
from collections.abc import Callable

import pytest

from fastps.system import proc
from tests.support import processes


@pytest.mark.parametrize("name", [b"a) T 1", b"\xff\xfe", b"x\ny", b") ) )", b" "])
def test_a_name_with_anything_in_it_does_not_hide_what_a_process_does(name: bytes) -> None:
    def work(ready: Callable[[], object]) -> None:
        ctypes.CDLL(None).prctl(15, name, 0, 0, 0)  # PR_SET_NAME
        ready()
        signal.pause()

    child = processes.start_ready(work)
    try:
        assert proc.processor_time(child.process_id) not in ("", "stopped")
        processes.stop(child.process_id)
        assert proc.processor_time(child.process_id) == "stopped"
    finally:
        processes.kill(child)
    assert proc.processor_time(child.process_id) == "", "it has ended"


@pytest.mark.parametrize("stat", [b"", b"7 (x)", b"7 (x) R 1 2", b"\xff" * 100, b"7 (x) R" + b" 1" * 10])
def test_a_file_that_ends_early_tells_nothing(stat: bytes) -> None:
    assert proc.processor_time_in(stat) == ""


def test_variables_of_a_process_are_those_that_its_program_has_begun_with() -> None:
    environment = {b"A": b"x=\xff", b"B" * 9: b"y" * (1 << 16), b"C": b""}
    with subprocess.Popen(["cat"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as child:
        assert child.stdin and child.stdout
        child.stdin.write(b"x")
        assert child.stdout.read(1) == b"x", "the program runs: while it is being started, its variables cannot be read"
        assert proc.variables(child.pid, ["A", "C", "D"]) == {"A": "x=\udcff", "C": ""}
        child.kill()
    assert proc.variables(child.pid, ["A"]) == {}
