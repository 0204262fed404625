"""What workers leave behind: their own processes, which end with a worker that failed, and zombies.

A worker leads a process group, which its children are in. A child that has left the group (a session of its own) becomes this
process's child when its parent ends, since the launcher adopts orphans. Its variables name the worker that has started it.
Where they do not (in a fork, or after `env -i`), an orphan that was seen before a worker's end is not from it.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Collection
from pathlib import Path

from fastps.system import proc
from fastps.system.clock import Clock

_LOOK_NS = 100_000_000  # between two looks
_ROUND_NS = 5_000_000
_ROUNDS, _LAST_ROUNDS = 5, 200  # a child that left the group may have children that left its own


class LeftBehind:
    """The orphans that this process adopts during a job.

    In all methods `own` are the children of this process that others wait for.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._before = set(_adopted(()))  # children of the program that launches
        self._looked_ns = 0
        self._seen: set[int] = set()
        self._known: set[int] = set()  # orphans of workers that run, or that have ended well

    def check(self, own: Collection[int]) -> None:
        """Reap the orphans that have ended, and note the others.

        An orphan that two looks have seen is not from a worker that ends later.
        """
        if self._clock.now_ns() - self._looked_ns < _LOOK_NS:
            return
        self._looked_ns = self._clock.now_ns()
        running = self._running(own)
        self._known, self._seen = running & self._seen, running

    def end_with(self, worker: int, job: str, rank: int, own: Collection[int]) -> None:
        """Kill what the worker of this rank has left, which has failed. It is not yet reaped: nobody else has its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker, signal.SIGKILL)
        self._kill(own, lambda orphan: self._is_from(orphan, job, rank), _ROUNDS)

    def end(self, own: Collection[int]) -> None:
        """Kill all orphans, at the end of a job that did not end well."""
        self._kill(own, lambda orphan: True, _LAST_ROUNDS)

    def _is_from(self, orphan: int, job: str, rank: int) -> bool:
        found = proc.variables(orphan, ("FASTPS_JOB", "FASTPS_RANK"))
        if found.get("FASTPS_JOB") == job and "FASTPS_RANK" in found:
            return found["FASTPS_RANK"] == str(rank)
        return orphan not in self._known

    def _kill(self, own: Collection[int], is_meant: Callable[[int], bool], rounds: int) -> None:
        for _ in range(rounds):
            orphans = set(filter(is_meant, self._running(own)))
            for orphan in orphans:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(orphan, signal.SIGKILL)
            if not orphans:
                break
            self._clock.sleep_ns(_ROUND_NS)

    def _running(self, own: Collection[int]) -> set[int]:
        return {orphan for orphan in _adopted(own) if orphan not in self._before and not _is_reaped(orphan)}


def _adopted(own: Collection[int]) -> list[int]:
    """The children of this process outside its own process group, which what it starts for other ends stays in."""
    found: list[int] = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            found += [int(number) for number in (thread / "children").read_text().split()]
    return [child for child in found if child not in own and _group(child) != os.getpgrp()]


def _group(process_id: int) -> int:
    try:
        return os.getpgid(process_id)
    except ProcessLookupError:
        return os.getpgrp()


def _is_reaped(child: int) -> bool:
    """Whether the child has ended; if so, this call reaps it."""
    try:
        return os.waitpid(child, os.WNOHANG)[0] == child
    except ChildProcessError:
        return True
