"""A script's worker processes under a driver, which a thread of the calling process has: for simulations and replays."""

import contextlib
import os
import secrets
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from fastps.errors import UsageError
from fastps.lab.demo.runs import RunFailedError
from fastps.lab.virtual.driver import Driver, Listener, WorkerLostError
from fastps.processes.launcher import Launcher
from fastps.processes.options import JobOptions
from fastps.processes.outcome import Outcome, failure_panel
from fastps.system.clock import SYSTEM_CLOCK, Clock

_LAST_ONLY = 1 << 50  # updates between two checkpoints, where only the last is wanted


def job_options(
    checkpoint: Path | None, threads: str = "", nonfinite: str = "", changes: bool = False, pause: str = ""
) -> JobOptions:
    """The options of a job in virtual time, whose server saves its last version if a folder for checkpoints is given.

    `threads`: of a worker's arithmetic, where they are known; else the environment's, or 1. `changes`: whether workers die or
    join. `pause`: the worker and the step that runs under pdb.

    Raises UsageError for a folder that has checkpoints: these commands can neither go on from them nor delete them.
    """
    if checkpoint is not None and (others := sorted(checkpoint.glob("checkpoint-*"))):
        raise UsageError(
            f"--checkpoint: expected a folder without another run's checkpoints, found {others[-1]}: delete it, or give another"
            " folder"
        )
    variables = {
        "FASTPS_PAUSE": pause,
        # Threads decide the order of sums, and the hash seed that of sets.
        "OMP_NUM_THREADS": threads or os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
    }
    every = _LAST_ONLY if checkpoint is not None else 0
    return JobOptions(
        server="process",
        on_worker_loss="continue" if changes else "",
        joins=changes,
        nonfinite=nonfinite,
        checkpoint=str(checkpoint or ""),
        every=every,
        variables=variables,
    )


@dataclass
class Hosting:
    """Runs `command`, a script with its arguments as for `Launcher`, as `workers` processes of a job in virtual time.

    Attributes:
        play: plays the job until every worker has left, or until it returns.
        error: what ended it, or None.
        fold_threads: those of a step() of an optimizer that runs in Python.
    """

    command: Sequence[str]
    workers: int
    sync: str
    options: JobOptions
    play: Callable[[Driver], None]
    clock: Clock = SYSTEM_CLOCK
    fold_threads: int = 1
    error: BaseException | None = field(default=None, init=False)
    _joins: "deque[int]" = field(default_factory=deque, init=False)
    _has_played: bool = field(default=False, init=False)
    _kept: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, init=False)

    def run(self, tick: Callable[[], None], *, silent: bool = True) -> Outcome:
        """Run it; `tick` is called from time to time. Returns the workers' outcome.

        Raises RunFailedError, after it has shown the failure, if a worker fails; UsageError for a script that does not use
        fastps; and what `play` raises.
        """
        with tempfile.TemporaryDirectory(prefix="fastps-virtual-") as own:
            variables = {**self.options.variables, "FASTPS_VIRTUAL": own}
            return self._run(tick, replace(self.options, variables=variables), silent)

    def _run(self, tick: Callable[[], None], options: JobOptions, silent: bool) -> Outcome:
        job = secrets.token_hex(8)
        launcher = Launcher(
            self.command, self.workers, sync=self.sync, job=job, options=options, silent=silent, clock=self.clock
        )
        listener = Listener(job, range(self.workers))
        thread = threading.Thread(target=self.drive, args=(listener,), name="fastps-driver", daemon=True)
        thread.start()

        def on_tick() -> None:
            while self._joins:
                listener.awaited.add(worker := self._joins.popleft())
                launcher.join(worker)
            if launcher.blame(listener.awaited):
                listener.close()
            launcher.draw(tick)

        try:
            outcome = launcher.run(on_tick)
        finally:
            listener.close()
            thread.join()
            listener.free()
            self.free()
        if self.error is not None and not outcome.ended_by:
            raise self.error
        if outcome.exit_code:
            if outcome.first_failure is not None:
                Console(stderr=True).print(failure_panel(outcome))
            raise RunFailedError(outcome)
        if not self._has_played:
            raise UsageError(
                f"{self.command[1]}: expected every worker to wrap its optimizer in fastps.DistributedOptimizer, found one that"
                " ended without"
            )
        return outcome

    def join(self, worker: int) -> None:
        """Start a worker that joins the job, soon. From any thread."""
        self._joins.append(worker)

    def drive(self, listener: Listener) -> None:
        """Serve the job until it has been played. An error is kept in `error`."""
        store = None
        try:
            store, compiled, optimizer = listener.store(self.clock)
            self._kept.callback(store.close)
            driver = Driver(store, listener.links(store), self.clock, listener)
            if optimizer is not None:
                self._fold_by(optimizer, driver)
            self.play(driver)
            self._has_played = True
            del compiled  # keeps the rule's code alive until now
        except WorkerLostError:
            listener.close()  # its exit code tells why
        except BaseException as error:
            self.error = error
            listener.close()
        finally:
            if store is not None:
                store.arena.finish(store.arena.server_lane)

    def _fold_by(self, order: Any, driver: Driver) -> None:
        """Fold by an optimizer in Python, which this process makes as a server does. Raises UnsupportedError."""
        import torch  # takes a second to import

        from fastps.torch.any_optimizer.served import OptimizerFolds

        torch.set_num_threads(self.fold_threads)  # of this thread: sums have other bits with more
        self._kept.callback(OptimizerFolds(driver.store, driver.lane, order).close)

    def free(self) -> None:
        """Free the store and the optimizer, whose state workers read until they have closed."""
        self._kept.close()
