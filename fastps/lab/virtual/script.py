"""A user's script in virtual time: real worker processes, whose pushes and pulls happen when the simulator says.

The compiled simulator draws how long each step takes, and stops where a worker has computed. The driver then waits for that
worker's real push and feeds it back. The others compute on meanwhile.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from fastps.errors import UsageError
from fastps.job.plan import most_lanes
from fastps.job.policy import Policy
from fastps.kernels.protocol.lane import KIND_LEAVE
from fastps.kernels.simulation.simulator import Simulator
from fastps.lab.virtual.driver import Driver, Event
from fastps.lab.virtual.hosting import Hosting, job_options
from fastps.simulation.simulate import SLICE_EVENTS, TRACE_DTYPE, DeadlockError, Outcome, Row, Simulation, build, row_of
from fastps.system.clock import SYSTEM_CLOCK, Clock
from fastps.system.memory_limits import available_bytes

WORKER_BYTES = 32 << 20
"""Memory that a forked worker has for itself beside the arena: 15 MiB with a small model and no data, and room for a batch."""
_POINTS = 200  # of a loss over virtual time
_MOST_IN_A_COMMIT = 64  # pushes that are folded together; the simulator knows no such limit


def check_workers(workers: int, option: str = "--script") -> None:
    """Raise UsageError, naming the option, if so many processes do not fit into memory."""
    free, limit = available_bytes()
    if workers * WORKER_BYTES > free:
        raise UsageError(
            f"{option}: {workers} workers take {workers * WORKER_BYTES / 2**30:.1f} GiB at {WORKER_BYTES >> 20} MiB each beside"
            f" the model, and {free / 2**30:.1f} GiB are free ({limit}): use at most {free // WORKER_BYTES} workers"
        )


def play(
    policy: Policy,
    simulation: Simulation,
    command: Sequence[str],  # the script with its arguments, as for `Launcher`
    tick: Callable[[int, int], None] = lambda pushes, of: None,
    checkpoint: Path | None = None,  # a folder for the final weights
    *,
    clock: Clock = SYSTEM_CLOCK,
) -> Outcome:
    """Run a script in virtual time; `tick(pushes, 0)` is called from time to time.

    The row is that of a simulation. It also has `loss_over_time`, a list of (virtual seconds, reported loss); `train_loss`, the
    mean of the last tenth of the losses, or None; `last_line`, of worker 0's output; and `weights`, a digest of the last ones.

    Raises RunFailedError, after it has shown the failure, if a worker fails. Raises UsageError for a script that does not use
    fastps, or uses what virtual time does not have; DeadlockError if every worker waits forever; ProtocolError.
    """
    run = _Run(policy, simulation, clock)
    options = job_options(checkpoint, changes=bool(simulation.changes))
    threads = options.variables["OMP_NUM_THREADS"]
    fold_threads = int(threads) if threads.isdecimal() and int(threads) else 1
    hosting = Hosting(command, simulation.workers, policy.spec, options, run.play, clock, fold_threads)
    run.start = hosting.join
    outcome = hosting.run(lambda: tick(run.received, 0))
    run.row["last_line"] = outcome.workers[0].last_line.decode(errors="replace").rstrip() if outcome.workers else ""
    return Outcome(run.row, None)


@dataclass
class _Run:
    """One run of a script under one discipline.

    row: the report's row, once it has been played. start: starts the process of a worker that joins.
    """

    policy: Policy
    simulation: Simulation
    clock: Clock
    row: Row = field(default_factory=dict, init=False)
    start: Callable[[int], None] = lambda worker: None
    _losses: list[tuple[int, float]] = field(default_factory=list, init=False)
    _simulator: Simulator = field(init=False)

    def __post_init__(self) -> None:
        self._simulator = self._build(self.policy)

    @property
    def received(self) -> int:
        """Pushes so far."""
        return self._simulator.received

    def _build(self, policy: Policy) -> Simulator:
        if policy.pull < 1 and self.simulation.late_pushes[0]:
            raise UsageError(f"--script: {policy.spec} expected pushes in order, but one that --late-push delays is overtaken")
        workers = self.simulation.workers
        most = min(most_lanes(policy), _MOST_IN_A_COMMIT) if policy.combine else most_lanes(policy)
        if workers > most:
            raise UsageError(f"--script: {policy.spec} expected at most {most} workers, found {workers}")
        return build(policy, self.simulation, trace=True, asks=True)

    def play(self, driver: Driver) -> None:
        """Play until every worker has left."""
        policy = replace(self.policy, shards=driver.store.arena.shards)  # a model of few parameters has fewer
        simulator = self._simulator = self._build(policy)
        driver.start = self.start
        began_ns = self.clock.now_ns()
        self._play(simulator, driver)
        digest = driver.end()
        self.row = self._summed(simulator, self.clock.now_ns() - began_ns) | {"weights": digest}

    def _play(self, simulator: Simulator, driver: Driver) -> None:
        """Play what the simulator decides, and tell it what the workers have computed."""
        while self._goes_on(simulator):
            driver.play(_events(simulator))
            if simulator.asked >= 0:
                push = driver.await_push(simulator.asked, simulator.now_ns)
                if not math.isnan(push.loss):
                    self._losses.append((simulator.now_ns, push.loss))
                simulator.tell(push.samples, push.kind == KIND_LEAVE)
        driver.play(_events(simulator))

    def _goes_on(self, simulator: Simulator) -> bool:
        try:
            return simulator.run(SLICE_EVENTS)
        except RuntimeError as error:
            raise DeadlockError(f"{self.policy.spec}: {error}") from None

    def _summed(self, simulator: Simulator, wall_ns: int) -> Row:
        """The report's row, with the reported losses over virtual time: the means of runs of pushes."""
        row = row_of(self.policy, self.simulation, simulator, wall_ns)
        times, losses = np.array(self._losses, np.float64).reshape(-1, 2).T
        count = min(_POINTS, len(losses))
        parts = zip(np.array_split(times, count), np.array_split(losses, count), strict=True) if count else ()
        row["loss_over_time"] = [(float(time[-1]) / 1e9, float(loss.mean())) for time, loss in parts]
        row["train_loss"] = float(losses[-max(1, len(losses) // 10) :].mean()) if count else None
        return row


def _events(simulator: Simulator) -> list[Event]:
    return [Event._make(values) for values in np.frombuffer(simulator.trace(forget=True), TRACE_DTYPE).tolist()]


def command_of(arguments: Sequence[str], option: str = "--script") -> list[str]:
    """The command of a script with its arguments. Raises UsageError, naming the option, if there is no such file."""
    if not Path(arguments[0]).is_file():
        cure = "; its arguments come after it, without quotes" if " " in arguments[0] else ""
        raise UsageError(f"{option}: expected a script's file, found no {arguments[0]}{cure}")
    return [sys.executable, *arguments]
