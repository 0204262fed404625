"""Nothing may be left behind: every test is checked for processes, descriptors and shared memory that outlive it."""

import contextlib
import gc
import importlib
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fastps.system import garbage
from tests.support import guardian, huge_pages, skips, stacks
from tests.support.commands import server_process_ids
from tests.support.kinds import add_markers
from tests.support.sizes import mark_unsampled

os.environ.setdefault("FASTPS_TIMEOUT", "60")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell ignores it for what it starts in the background, and so would every process that a test of Ctrl-C starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


guardian.guard()
_frozen, _freeze = threading.Event(), gc.freeze


def _noted_freeze() -> None:
    """Freeze, and note it: `gc.get_freeze_count()` would walk over a million frozen objects."""
    _frozen.set()
    _freeze()


gc.freeze = _noted_freeze
# A forked child must not collect the parent's garbage: a C++ destructor there may join a thread that only the parent has.
os.register_at_fork(after_in_child=garbage.freeze)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--complete", action="store_true", help="fail if a test is skipped for want of what can be installed")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With --complete, fail a run that skipped a test which could have run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.getoption("--complete") and reporter is not None and not hasattr(session.config, "workerinput"):
        for line in (found := skips.missing(reporter.stats.get("skipped", []))):
            reporter.write_line(f"MISSING {line}")
        if found and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by what they use; a test that compares times may fail twice on a busy machine."""
    mark_unsampled(items)
    for item in items:
        add_markers(item)
        if item.get_closest_marker("timing"):
            item.add_marker(pytest.mark.flaky(reruns=2, only_rerun=["AssertionError"]))


def pytest_collection_finish() -> None:
    """Leave what the collection made out of garbage collections: they would pass over a million objects, here and in forks."""
    if "torch" in sys.modules:  # torch imports it with the first optimizer, so every forked child would again
        importlib.import_module("torch._dynamo")
    gc.collect()
    garbage.freeze()
    huge_pages.collapse()


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer() -> Iterator[None]:
    """Before a test's time limit ends it, print where the processes are that it runs."""
    yield
    end_test = signal.getsignal(signal.SIGALRM)

    def show_and_end(number: int, frame: types.FrameType | None) -> None:
        stacks.show((child.pid for child in _children()), "running at the test's time limit")
        assert callable(end_test)
        end_test(number, frame)

    if callable(end_test):
        signal.signal(signal.SIGALRM, show_and_end)


def _shared_memory() -> set[str]:
    """Files under /dev/shm; not those of semaphores, and of benchmarks and MPI jobs that the next process may run."""
    others = "sem.", "mpich_shm", "fastps-bench-"
    return {entry.name for entry in Path("/dev/shm").iterdir() if not entry.name.startswith(others)}


def _descriptors() -> dict[str, int]:
    """What this process has open, by kind: memfds, sockets and pidfds of ours are of interest."""
    counts: dict[str, int] = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        kind = "memfd" if "memfd:fastps" in target else "pidfd" if "pidfd" in target else None
        if kind:
            counts[kind] = counts.get(kind, 0) + 1
    return counts


def _children() -> list[psutil.Process]:
    """Processes that this one started and that still run; not the resource tracker, the server of commands and the guardian."""
    ours, found = {*server_process_ids(), *guardian.process_ids()}, []
    for process_id in stacks.descendants(os.getpid()):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if process_id not in ours:
                found.append(psutil.Process(process_id))
    return [child for child in found if "resource_tracker" not in _command(child)]


def _handled_signals() -> set[str]:
    """The signals that fastps handles in this process."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    return {each.name for each in numbers if getattr(signal.getsignal(each), "__module__", "").startswith("fastps")}


def _left_behind(memory: set[str], descriptors: dict[str, int]) -> str:
    """What is here that was not before, in words; empty if nothing is."""
    children, shared, now = _children(), _shared_memory() - memory, _descriptors()
    opened = {kind: now[kind] - descriptors.get(kind, 0) for kind in now if now[kind] > descriptors.get(kind, 0)}
    found = {"running": [_command(child) for child in children], "shared memory": shared, "open": opened}
    return ", ".join(f"{what}: {things}" for what, things in found.items() if things)


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Compare before and after; children get a moment to be reaped, and what only garbage holds is collected."""
    memory, descriptors = _shared_memory(), _descriptors()
    _frozen.clear()
    yield
    if _frozen.is_set():  # in later tests each look at all objects would freeze them
        gc.collect()
        garbage.freeze()
    deadline = time.monotonic() + 5
    while (left := _left_behind(memory, descriptors)) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    if left:
        stacks.show((child.pid for child in _children()), "left behind")
    for child in _children() if left else ():  # or the next test would fail, too
        with contextlib.suppress(psutil.Error):
            child.kill()
            child.wait(10)
    assert not left, f"left behind: {left}"
    assert not _handled_signals(), "fastps handles signals still"


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return "resource_tracker"  # gone already
