"""How each worker of a recorded run ended, and when a worker stood still.

The launcher adds what it saw of each process to the trace's header: the exit code, the time of the end, and the stops that
it injected. Without a launcher of fastps the end of a worker is that of its last record.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastps.system.processes import name_of_signal
from fastps.tracing.file import Trace
from fastps.tracing.summary import blocked_ns

ENDED, FAILED, KILLED, CUT_SHORT, ABSENT = "ended", "failed", "killed", "cut short", "absent"
_LEAST_PAUSE_NS = 500_000_000
_LEAST_TIMES_MEDIAN = 10
_FIRST_STEPS = 2  # they include one-time costs of libraries


@dataclass(frozen=True)
class Ending:
    """The end of one worker."""

    worker: int  # its number in the trace
    # "ended" by itself; "failed" with an error; "killed" by a signal; "cut short": its records end, for an unknown reason;
    # "absent": it recorded nothing.
    kind: str
    at_ns: int  # when the process ended, or where that is unknown, the last time of the worker's records; -1: no record
    how: str = ""  # the signal's name, the exit code or the error; may be empty
    is_exact: bool = False  # whether `at_ns` is the end of the process

    @property
    def is_lost(self) -> bool:
        """Whether the worker did not end by itself."""
        return self.kind in (FAILED, KILLED, CUT_SHORT)


@dataclass(frozen=True)
class Pause:
    """A time in which a worker neither computed nor waited for others; `is_known` if the launcher stopped it."""

    worker: int
    begin_ns: int
    end_ns: int
    is_known: bool = False


def endings(trace: Trace) -> list[Ending]:
    """Return how each worker ended, by its number."""
    return [_ending(trace, worker) for worker in range(trace.workers)]


def _ending(trace: Trace, worker: int) -> Ending:
    note: Mapping[str, Any] = trace.header["of_worker"].get(str(worker)) or {}
    last_ns = _last_ns(trace, worker, int(note.get("began_ns") or -1))
    if worker not in trace.header["recorded"]:
        return Ending(worker, ABSENT, -1)
    end = note.get("end") or {}
    code = end.get("exit_code")
    at_ns, is_exact = (int(end["at_ns"]), True) if "at_ns" in end else (last_ns, False)
    if code is not None and code < 0:
        return Ending(worker, KILLED, at_ns, name_of_signal(-code), is_exact)
    if note.get("failure"):
        return Ending(worker, FAILED, at_ns, str(note["failure"]), is_exact)
    if code:
        return Ending(worker, FAILED, at_ns, f"exit code {code}", is_exact)
    if not note.get("finished", worker not in trace.header["unfinished"]):  # the last owner of a lane, also of a replaced one
        return Ending(worker, CUT_SHORT, at_ns, "", is_exact)
    return Ending(worker, ENDED, last_ns)


def _last_ns(trace: Trace, worker: int, began_ns: int) -> int:
    """The last time of a worker's records; of a worker without a step, when it began to record."""
    steps = trace.steps_of(worker)
    return int(max(steps["end_ns"].max(), steps["pushed_ns"].max())) if len(steps) else began_ns


def pauses(trace: Trace) -> list[Pause]:
    """Return the times in which a worker stood still, in order of time.

    Those are the stops that the launcher injected, and steps in which a worker was blocked for half a second and ten times its
    median step or more.
    """
    found = []
    for worker in range(trace.workers):
        note: Mapping[str, Any] = trace.header["of_worker"].get(str(worker)) or {}
        known = [Pause(worker, int(begin_ns), int(end_ns), True) for begin_ns, end_ns in note.get("stops") or ()]
        found += known
        steps = trace.steps_of(worker)[_FIRST_STEPS:]
        if not len(steps):
            continue
        least_ns = max(_LEAST_PAUSE_NS, _LEAST_TIMES_MEDIAN * float(np.median(steps["computed_ns"] - steps["begin_ns"])))
        for step in steps[blocked_ns(steps) >= least_ns]:
            begin_ns, end_ns = int(step["begin_ns"]), int(step["computed_ns"])
            if not any(pause.begin_ns < end_ns and begin_ns < pause.end_ns for pause in known):
                found.append(Pause(worker, begin_ns, end_ns))
    return sorted(found, key=lambda pause: pause.begin_ns)
