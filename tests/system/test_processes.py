"""Processes that belong together: a child dies with its parent, and orphans find a new one."""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from fastps.processes.spawn import spawn
from fastps.system.processes import adopting_orphans, ask_to_die_with_parent, start_module
from tests.support import processes


def _orphan() -> int:
    """The process id of a child whose parent has ended; the child waits for a signal."""

    def parent() -> int:
        child = os.fork()
        if child == 0:
            os.closerange(3, 1024)  # the pipe on which its parent answers is among them
            signal.pause()
        return child

    return int(processes.ended(parent).outcome)


def test_an_orphan_becomes_a_child_of_the_process_that_adopts() -> None:
    with adopting_orphans():
        orphan = _orphan()
        assert psutil.Process(orphan).ppid() == os.getpid()
        os.kill(orphan, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(orphan, 0)[1]) == -signal.SIGTERM


def test_outside_of_the_block_orphans_go_elsewhere() -> None:
    orphan = psutil.Process(_orphan())
    try:
        assert orphan.ppid() != os.getpid()
    finally:
        orphan.kill()
        orphan.wait(60)


def test_a_child_that_asked_for_it_dies_with_its_parent() -> None:
    def parent() -> int:
        own, (reader, writer) = os.getpid(), os.pipe()
        child = os.fork()
        if child == 0:
            ask_to_die_with_parent(own)
            os.write(writer, b"!")
            os.closerange(3, 1024)
            time.sleep(60)
        os.read(reader, 1)
        return child

    with adopting_orphans():
        child = processes.ended(parent).outcome
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_a_child_whose_parent_is_another_ends_at_once() -> None:
    child = processes.ended(lambda: ask_to_die_with_parent(1 << 30))
    assert (child.exit_code, child.outcome) == (1, None)


def test_entry_of_the_import_path_that_is_no_text_is_left_out_as_python_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/tmp")])
    with start_module("this") as process:
        process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.slow
def test_a_spawned_worker_is_started_with_such_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/tmp")])
    spawn(_nothing, workers=1)


def _nothing(rank: int) -> None:
    pass
