"""Faults in a running job: workers killed and stopped at random moments, and what that costs, measured from outside.

A seed decides the moments and the victims. The launcher calls `tick`, which measures and sends the signals that are due.
"""

import random
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastps.errors import Error, UsageError
from fastps.kernels.shm.arena import LANE_LIVE
from fastps.processes.outcome import LaunchedWorker
from fastps.store.observer import Observer, observe
from fastps.system.clock import Clock

_LEAST_STOP_S, _MOST_STOP_S = 1.0, 5.0


@dataclass(frozen=True)
class FaultPlan:
    """Numbers of SIGKILLs and SIGSTOPs (1 to 5 s each) within a duration of training. The seed decides times and victims.

    >>> FaultPlan.parse("kill:40,stop:20,seconds:600")
    FaultPlan(kills=40, stops=20, seconds=600.0, seed=0)
    """

    kills: int = 0
    stops: int = 0
    seconds: float = 60.0
    seed: int = 0

    @staticmethod
    def parse(text: str, seed: int = 0) -> "FaultPlan":
        """Read `kill:N,stop:N,seconds:S`, each part optional. Raises UsageError."""
        values = {"kill": 0.0, "stop": 0.0, "seconds": 60.0}
        for part in text.split(","):
            name, _, number = part.partition(":")
            try:
                if name not in values:
                    raise ValueError
                values[name] = float(number)
            except ValueError:
                raise UsageError(
                    f"--inject-faults: expected parts such as kill:40,stop:20,seconds:600, found {part!r}"
                ) from None
        whole = all(values[name] >= 0 and values[name].is_integer() for name in ("kill", "stop"))
        if not whole or not 0 < values["seconds"] <= 86400:
            raise UsageError(f"--inject-faults: expected whole numbers of faults and 0 to 86400 seconds, found {text!r}")
        return FaultPlan(int(values["kill"]), int(values["stop"]), values["seconds"], seed)

    def moments(self) -> list[tuple[float, str]]:
        """(seconds since the beginning, "kill" or "stop"), in order of time."""
        generator = random.Random(self.seed)
        kinds = ["kill"] * self.kills + ["stop"] * self.stops
        return sorted((generator.uniform(0.0, self.seconds), kind) for kind in kinds)

    def injector(self, job: str, workers: int, clock: Clock) -> "FaultInjector":
        """What carries out the plan on a job."""
        return FaultInjector(self, job, workers, clock)


@dataclass
class FaultReport:
    """The injected faults and their cost."""

    faults: dict[str, int] = field(default_factory=lambda: {"kill": 0, "stop": 0})
    seconds: float = 0.0  # from the start (all workers live) to the end of the plan or the job
    updates: int = 0  # versions published in that time
    live_worker_seconds: float = 0.0  # the sum over all workers of the time in which each was live and not stopped
    recoveries_s: list[float] = field(default_factory=list)  # for each kill, until another worker was live in its place

    def row(self) -> Mapping[str, Any]:
        """Return the report as a JSON row."""
        return {
            "faults": self.faults,
            "seconds": self.seconds,
            "updates": self.updates,
            "live_worker_seconds": self.live_worker_seconds,
            "updates_per_live_worker_s": self.updates / max(1e-9, self.live_worker_seconds),
            "worst_recovery_s": max(self.recoveries_s, default=0.0),
        }


class FaultInjector:
    """Carries out a plan on one job. It is an Injector of the launcher, which calls `tick` often, with the running workers."""

    def __init__(self, plan: FaultPlan, job: str, workers: int, clock: Clock) -> None:
        self.report = FaultReport()
        self.stops_ns: list[tuple[int, int, int]] = []
        self._plan = plan
        self._job = job
        self._workers = workers
        self._clock = clock
        self._random = random.Random(plan.seed + 1)
        self._moments = plan.moments()
        self._observer: Observer | None = None
        self._began_ns = self._looked_ns = self._first_version = 0
        self._stopped: dict[int, tuple[int, LaunchedWorker]] = {}  # by rank: until when
        self._killed: dict[int, tuple[int, int]] = {}  # by rank: when, and the generation that was killed

    def tick(self, workers: Sequence[LaunchedWorker]) -> None:
        """Measure, and send the signals that are due."""
        now_ns = self._clock.now_ns()
        if not self._has_begun(now_ns):
            return
        assert self._observer is not None
        members = self._observer.members()
        for rank, (killed_ns, generation) in list(self._killed.items()):
            if members[rank][0] > generation and members[rank][1] == LANE_LIVE:
                del self._killed[rank]
                self.report.recoveries_s.append((now_ns - killed_ns) / 1e9)
        live = [
            worker
            for worker in workers
            if members[worker.rank][1] == LANE_LIVE and worker.rank not in self._killed and worker.rank not in self._stopped
        ]
        is_over = now_ns - self._began_ns >= self._plan.seconds * 1e9
        if not is_over:
            self.report.live_worker_seconds += len(live) * (now_ns - self._looked_ns) / 1e9
            self.report.seconds = (now_ns - self._began_ns) / 1e9
            self.report.updates = self._observer.version - self._first_version
        self._looked_ns = now_ns
        for rank, (until_ns, victim) in list(self._stopped.items()):
            if now_ns >= until_ns:
                del self._stopped[rank]
                victim.send(signal.SIGCONT)
        # The last live worker is spared: the job's memory would end with it.
        while self._moments and len(live) > 1 and now_ns - self._began_ns >= self._moments[0][0] * 1e9:
            self._hit(self._moments.pop(0)[1], live.pop(self._random.randrange(len(live))), members, now_ns)

    def _hit(self, kind: str, victim: LaunchedWorker, members: list[tuple[int, int]], now_ns: int) -> None:
        self.report.faults[kind] += 1
        if kind == "kill":
            self._killed[victim.rank] = now_ns, members[victim.rank][0]
            victim.send(signal.SIGKILL)
        else:
            until_ns = now_ns + int(self._random.uniform(_LEAST_STOP_S, _MOST_STOP_S) * 1e9)
            self._stopped[victim.rank] = until_ns, victim
            self.stops_ns.append((victim.rank, now_ns, until_ns))
            victim.send(signal.SIGSTOP)

    def _has_begun(self, now_ns: int) -> bool:
        """Start the clock once all initial workers are live."""
        if self._observer is None:
            try:
                self._observer = observe(self._job, timeout_s=1e-9, clock=self._clock)
            except Error:
                return False  # no arena yet
        if not self._began_ns and all(state == LANE_LIVE for _, state in self._observer.members()[: self._workers]):
            self._began_ns = self._looked_ns = now_ns
            self._first_version = self._observer.version
        return self._began_ns > 0

    def row(self) -> Mapping[str, Any]:
        """See FaultReport."""
        return self.report.row()

    def close(self) -> None:
        """Continue every stopped worker."""
        for _, victim in self._stopped.values():
            victim.send(signal.SIGCONT)
        self._stopped.clear()
        if self._observer is not None:
            self._observer.close()
            self._observer = None
