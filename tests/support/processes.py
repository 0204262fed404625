"""Helpers for tests with real processes: fork workers of a store, and collect their results or exit codes."""

import contextlib
import itertools
import os
import pickle
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.support import stacks

_jobs = itertools.count()


@dataclass
class Child:
    """A forked worker: its process id, and the pipe on which it sends one object."""

    process_id: int
    reader: int
    received: bytes = b""
    outcome: Any = None
    exit_code: int | None = None
    ended_at: float = field(default=0.0)


def start(work: Callable[[], Any]) -> Child:
    """Fork a child that runs `work` and sends its result, or its exception's class name and text."""
    reader, writer = os.pipe()
    process_id = os.fork()
    if process_id:
        os.close(writer)
        os.set_blocking(reader, False)
        return Child(process_id, reader)
    code = 1
    try:
        stacks.answer()
        os.close(reader)
        try:
            message: Any = work()
            code = 0
        except BaseException as error:
            message = (type(error).__name__, str(error))
            _kept = error  # and what its frames hold: Gloo's destructors may wait for ever
            if os.environ.get("FASTPS_TEST_TRACE"):
                traceback.print_exc()
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(message, pipe)  # read only by this test
    finally:
        os._exit(code)


def finish(children: list[Child], timeout_s: float) -> None:
    """Wait for all children. Print where those that still run after the time are, and kill them, as their exit codes show."""
    deadline = time.monotonic() + timeout_s
    pending = [child for child in children if child.exit_code is None]
    while pending:
        for child in list(pending):
            process_id, status = os.waitpid(child.process_id, os.WNOHANG)
            with contextlib.suppress(BlockingIOError):  # also before it ends: a pipe holds less than some outcomes
                while data := os.read(child.reader, 1 << 20):
                    child.received += data
            if process_id:
                os.close(child.reader)
                child.exit_code, child.ended_at = os.waitstatus_to_exitcode(status), time.monotonic()
                child.outcome = pickle.loads(child.received) if child.received else None
                pending.remove(child)
        if pending and time.monotonic() > deadline:
            stacks.show((child.process_id for child in pending), f"still running after {timeout_s} s")
            for child in pending:
                os.kill(child.process_id, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.002)


def ended(work: Callable[[], Any], timeout_s: float = 60.0) -> Child:
    """Fork a child that runs `work`, and wait for its end."""
    child = start(work)
    finish([child], timeout_s)
    return child


def start_ready(work: Callable[[Callable[[], object]], Any]) -> Child:
    """Fork a child, and wait until it calls the function that `work` gets."""
    mine, theirs = os.pipe()
    child = start(lambda: work(lambda: os.write(theirs, b"r")))
    os.close(theirs)
    assert os.read(mine, 1), "the child ended before it was ready"
    os.close(mine)
    return child


def kill(*children: Child) -> None:
    """Kill children, and wait for their ends."""
    for child in children:
        os.kill(child.process_id, signal.SIGKILL)
    finish(list(children), 10)


def start_each(work: Callable[[int], Any], count: int) -> list[Child]:
    """Fork a child for each rank."""
    return [start(partial(work, rank)) for rank in range(count)]


def start_job(work: Callable[[int], Any], workers: int) -> list[Child]:
    """Fork the workers of a new job, each with the variables that a launcher would give it."""
    job = f"test-{os.getpid()}-{next(_jobs)}"

    def live(rank: int) -> Any:
        os.environ.update(FASTPS_JOB=job, FASTPS_RANK=str(rank), FASTPS_WORKERS=str(workers))
        return work(rank)

    return start_each(live, workers)


def results(children: list[Child], timeout_s: float) -> list[Any]:
    """Wait for all children, none of which may fail; what each returned."""
    finish(children, timeout_s)
    assert [child.exit_code for child in children] == [0] * len(children), [child.outcome for child in children]
    return [child.outcome for child in children]


def wait_until(condition: Callable[[], object], timeout_s: float = 20.0, what: str = "waited too long") -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


def kill_later(child: Child, after_s: float) -> tuple[threading.Timer, list[float]]:
    """Kill a child soon; the list gets the time at which it is gone: a process with much memory takes long to end."""
    gone: list[float] = []

    def kill_it() -> None:
        process = os.pidfd_open(child.process_id)
        os.kill(child.process_id, signal.SIGKILL)
        select.select([process], [], [])
        gone.append(time.monotonic())
        os.close(process)

    killer = threading.Timer(after_s, kill_it)
    killer.start()
    return killer, gone


def stop(process_id: int) -> None:
    """Stop a process, and wait until none of its threads runs: `os.kill` returns before the signal takes effect."""
    os.kill(process_id, signal.SIGSTOP)
    await_stop(process_id)


def await_stop(process_id: int) -> None:
    """Wait until no thread of a process runs, some time after a stop signal was sent."""
    while not is_stopped(process_id):
        time.sleep(0.0005)


def is_stopped(process_id: int) -> bool:
    """Whether all threads of a process are stopped. Raises ProcessLookupError if it has ended."""
    threads = Path(f"/proc/{process_id}/task").iterdir()
    states = {(thread / "stat").read_bytes().rpartition(b") ")[2][:1] for thread in threads}
    if states <= {b"Z", b"X"}:
        raise ProcessLookupError(f"process {process_id} has ended")
    return states == {b"T"}


def runs(process_id: int) -> bool:
    """Whether a process runs; a zombie, which its parent has not waited for, does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(") ")[2][:1] not in "ZX"
    return False


def children_of(process_id: int) -> list[int]:
    """The children of all threads of a process."""
    threads = Path(f"/proc/{process_id}/task").iterdir()
    return [int(number) for thread in threads for number in (thread / "children").read_text().split()]


@contextlib.contextmanager
def stopped(process_id: int, unless: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Keep a process stopped inside the block. If `unless()` is true after a stop, let it run on and stop it again."""
    try:
        stop(process_id)
        while unless():
            os.kill(process_id, signal.SIGCONT)
            time.sleep(0.0005)
            stop(process_id)
        yield
    finally:
        os.kill(process_id, signal.SIGCONT)


@contextlib.contextmanager
def busy_core(loops: int = 4) -> Iterator[None]:
    """Share one core with that many endless loops inside the block, each of which runs for a whole time slice."""

    def loop() -> None:
        while True:
            pass

    own = os.sched_getaffinity(0)
    children: list[Child] = []
    os.sched_setaffinity(0, {min(own)})
    try:
        children += [start(loop) for _ in range(loops)]
        yield
    finally:
        kill(*children)
        os.sched_setaffinity(0, own)


def kill_one(children: list[Child], victim: int, where: str = "") -> None:
    """Kill one worker, and check the others as `finish_after_a_death` does."""
    others = [child for rank, child in enumerate(children) if rank != victim]
    os.kill(children[victim].process_id, signal.SIGKILL)
    finish_after_a_death(others, f"worker {victim} (", where)
    finish([children[victim]], 10)


def finish_after_a_death(children: list[Child], name: str, where: str = "") -> None:
    """Check that all children end within two seconds by WorkerDiedError, and that at least one error has `name`."""
    died_at = time.monotonic()
    finish(children, 20)
    for child in children:
        assert child.exit_code == 1, f"{where}a survivor had to be killed"
        assert child.ended_at - died_at < 2.0, f"{where}took {child.ended_at - died_at:.2f} s"
        assert child.outcome[0] == "WorkerDiedError", f"{where}{child.outcome}"
    # The first survivor to raise fails its own lane, and another survivor's error may name that lane.
    assert any(name in child.outcome[1] for child in children), f"{where}{[child.outcome for child in children]}"
