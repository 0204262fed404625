"""Whether more workers would pay: a script's first steps with 1, 2 and 4 workers, and what bounds them, in three sentences.

Each trial is a job of `fastps run` that is recorded and ended by SIGTERM, as early as its steps tell enough.
"""

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from fastps.advice.advise import advise
from fastps.advice.replay import limits
from fastps.errors import AttachError, UsageError
from fastps.processes.launcher import Launcher
from fastps.store.observer import observe
from fastps.tracing.file import TraceError, read
from fastps.tracing.summary import summary_row, worker_rows

WORKERS = (1, 2, 4)
STEPS, MOST_S = 200, 20.0  # of each worker: a trial ends at the first of the two
FIRST_STEP_S = 120.0  # until every worker has made one, imports included
_NEAR = 0.85  # the share of a limit from which on it bounds a job
_BUSY = 0.15  # the share of the cores that others may use without a word
_LOOK_S = 0.5
_GAIN = 1.1  # times the speed: less is no help


@dataclass(frozen=True)
class Trial:
    """The steady part of one job.

    Attributes:
        steps_per_s: pushes of all workers per second; `cores_steps_per_s`: as many as the cores that others left could make.
        core_ms, blocked_ms: of a step, in the mean: processor time, and time in which it needed no core (data, files, sleeps).
        wait_share: the workers' time that they waited for each other.
        memory_bytes: the proportional set size of all processes.
        advised: the discipline that the trace advises, and the reason; for one worker "".
    """

    workers: int
    steps_per_s: float
    cores_steps_per_s: float
    core_ms: float
    blocked_ms: float
    wait_share: float
    memory_bytes: int
    advised: str = ""
    reason: str = ""


def try_script(command: Sequence[str], tick: Callable[[int], None] | None = None) -> list[Trial]:
    """Run the script's first steps with 1, 2 and 4 workers. `tick` is called with each number before its trial.

    Raises UsageError for a script that ends, fails or does not use fastps before its steps tell enough.
    """
    found = []
    for workers in WORKERS:
        if tick is not None:
            tick(workers)
        found.append(_try(command, workers))
    return found


def _try(command: Sequence[str], workers: int) -> Trial:
    with tempfile.TemporaryDirectory(prefix="fastps-trial-") as folder:
        trace = Path(folder, "trial.trace")
        launcher = Launcher(command, workers, sync="bsp", trace=trace)
        watch = _Watch(launcher.job, workers)
        outcome = launcher.run(watch.tick)
        if outcome.ended_by and not watch.is_over:
            raise KeyboardInterrupt
        if outcome.first_failure is not None:
            failed = outcome.first_failure
            raise UsageError(
                f"expected a script that trains with -n {workers}, found that worker {failed.rank} ended ({failed.ending})"
            )
        if not trace.exists():
            raise UsageError(
                f"expected a script that makes {STEPS} steps of fastps or more, found none: does it wrap its optimizer?"
            )
        try:
            recorded = read(trace)
            bounds = limits(recorded)
        except (TraceError, UsageError) as error:
            raise UsageError(f"expected a script that makes {STEPS} steps of fastps or more, found: {error}") from None
    best = next((row for row in advise(recorded) if row["recommended"]), None) if workers > 1 else None
    blocked = [row["blocked_ms_mean"] for row in worker_rows(recorded)]
    return Trial(
        workers,
        bounds["measured"]["steps_per_s"],
        bounds["cores"]["steps_per_s"],
        bounds["cores"]["core_ms"],
        sum(blocked) / len(blocked),
        summary_row(recorded)["wait_share"],
        watch.memory_bytes,
        best["sync"] if best else "",
        best["reason"] if best else "",
    )


class _Watch:
    """Ends a trial by SIGTERM, as a user would, once each worker has made enough steps; counts the memory in its steps."""

    def __init__(self, job: str, workers: int) -> None:
        self._job, self._workers = job, workers
        self._began_s, self._first_s = time.monotonic(), 0.0
        self.is_over = False
        self.memory_bytes = 0

    def tick(self) -> None:
        """Look at the job."""
        if self.is_over:
            return
        now_s, steps = time.monotonic(), 0
        with contextlib.suppress(AttachError), contextlib.closing(observe(self._job, timeout_s=0.0)) as observer:
            steps = min(worker.steps for worker in observer.statistics()[: self._workers])
        if steps and not self._first_s:
            self._first_s, self.memory_bytes = now_s, _memory_of_descendants()  # a short script ends before the next look
        if not self._first_s and now_s - self._began_s > FIRST_STEP_S:
            raise UsageError(
                f"expected a step of fastps within {FIRST_STEP_S:g} s, found none: does the script wrap its optimizer?"
            )
        if steps >= STEPS or (self._first_s and now_s - self._first_s > MOST_S):
            self.is_over, self.memory_bytes = True, _memory_of_descendants()
            os.kill(os.getpid(), signal.SIGTERM)


def _memory_of_descendants() -> int:
    """The proportional set sizes of the workers and what they have started, in bytes."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total


def others_use() -> str:
    """A sentence about what other programs take of the cores now, if that is enough to change what a trial says; or ""."""
    share = psutil.cpu_percent(_LOOK_S) / 100
    if share < _BUSY:
        return ""
    return (
        f"Other programs use {share:.0%} of the cores: a worker of several threads is then slow, so 1 worker may"
        " look slower than it is; try again while they rest."
    )


def verdict(trials: Sequence[Trial]) -> list[str]:
    """Three sentences: whether more workers help, what bounds them, and what the largest job takes and should run under.

    >>> one = Trial(1, 100.0, 200.0, 10.0, 0.0, 0.0, 400_000_000)
    >>> four = Trial(4, 190.0, 200.0, 10.0, 0.0, 0.05, 900_000_000, "asp", "the fastest by far")
    >>> for sentence in verdict([one, four]):
    ...     print(sentence)
    More workers help: 4 make 1.9 times the steps of 1 in a second (batches of the same size each).
    The cores bound 4 workers: a step needs 10.0 ms of a core, and 95% of what the free cores can do is reached.
    4 workers take 900 MB of memory (1: 400 MB); their trace advises --sync asp: the fastest by far.
    """
    alone, best, most = trials[0], max(trials, key=lambda trial: trial.steps_per_s), trials[-1]
    gain = best.steps_per_s / alone.steps_per_s
    if best is alone or gain < _GAIN:
        helps = f"More workers do not help: {most.workers} make {most.steps_per_s / alone.steps_per_s:.1f} times the steps of 1"
    else:
        helps = f"More workers help: {best.workers} make {gain:.1f} times the steps of 1"
    taken = [f"{trial.memory_bytes / 1e6:,.0f}" if trial.memory_bytes else "an unknown number of" for trial in (most, alone)]
    takes = f"{most.workers} workers take {taken[0]} MB of memory (1: {taken[1]} MB)"
    advised = f"; their trace advises --sync {most.advised}: {most.reason}" if most.advised else ""
    return [f"{helps} in a second (batches of the same size each).", _bound(alone, most), f"{takes}{advised}."]


def _bound(alone: Trial, most: Trial) -> str:
    """What bounds the largest job."""
    share = most.steps_per_s / most.cores_steps_per_s
    workers, needs = f"{most.workers} workers", f"a step needs {most.core_ms:.1f} ms of a core"
    if share >= _NEAR and most.core_ms > 1.5 * alone.core_ms:
        return f"Memory or caches bound {workers}: {needs}, and {alone.core_ms:.1f} ms in one worker alone."
    if share >= _NEAR:
        return f"The cores bound {workers}: {needs}, and {share:.0%} of what the free cores can do is reached."
    if most.wait_share >= 0.2:
        return f"Waiting bounds {workers}: they wait for each other for {most.wait_share:.0%} of their time under bsp."
    if most.blocked_ms > most.core_ms:
        return f"The data pipeline, files or sleeps bound {workers}: {needs}, and {most.blocked_ms:.1f} ms without one."
    return f"Nothing bounds {workers} yet: {share:.0%} of what the free cores can do is reached."
