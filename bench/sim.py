"""Nanoseconds of one simulated event: 1,000 workers under every discipline, and runs of 100,000 from end to end.

An event is an entry of the simulator's queue: the end of computing, an arrival, the end of a transfer, a timer. Latency alone
is a constant; shared links make a transfer's end depend on all other transfers; busy servers handle one message at a time.
"""

import resource
from collections.abc import Callable
from typing import Any

from fastps.bench.measure import BenchOptions, Row, Spread, check, elapsed, interleaved, repeated
from fastps.bench.scheduler import SPECS
from fastps.job.specs import parse_policy
from fastps.simulation.simulate import ComputeModel, Simulation, build, simulate

WORKERS = 1_000
LATENCY: dict[str, Any] = {"latency_ns": 50_000}
SHARED: dict[str, Any] = {**LATENCY, "model_bytes": 1e6, "bandwidth": 100e9}
BUSY: dict[str, Any] = {**LATENCY, "model_bytes": 1e6, "service_ns": 1_000, "service_rate": 1e12, "update_ns": 500}
# The simulated network and servers, and the bound of an event in ns: 2 million and 200,000 events a second.
SURROUNDINGS: dict[str, tuple[dict[str, Any], int]] = {
    "latency": (LATENCY, 500),
    "shared links": (SHARED, 5_000),
    "busy servers": (BUSY, 5_000),
}
WHOLE_WORKERS, WHOLE_STEPS, WHOLE_BOUND_S = 100_000, 10, 60
WHOLE_SPECS = ("bsp", "asp", "dssp:3,15", "r2sp:0.8")


class Play:
    """One simulation without an end."""

    def __init__(self, spec: str, workers: int, surroundings: dict[str, Any]) -> None:
        self.policy = parse_policy(spec)
        compute = ComputeModel("lognormal", 10e6, 0.3)
        self.simulator = build(self.policy, Simulation(workers=workers, steps=10**9, compute=compute, **surroundings))

    def run(self, events: int) -> None:
        """Play events."""
        self.simulator.run(events)

    def check(self) -> None:
        """Check that every received push is folded, dropped, or one of the few that a worker may have waiting."""
        workers, shards, received = self.simulator.n_workers, self.simulator.n_shards, self.simulator.received
        sums = [self.simulator.shard_totals(shard) for shard in range(shards)]
        waiting = received - sum(shard["folded"] + shard["dropped"] for shard in sums)
        most = workers * shards * self.policy.slots(workers)
        check(received > 0 and 0 <= waiting <= most, f"0 to {most} of some pushes to wait", f"{waiting} of {received}")


def measure(options: BenchOptions) -> list[Row]:
    """Return a row for each discipline and surroundings, and one for each whole run."""
    workers, whole = (16, (64, 10)) if options.smoke else (WORKERS, (WHOLE_WORKERS, WHOLE_STEPS))
    rows = []
    for backend, (surroundings, bound_ns) in SURROUNDINGS.items():
        plays = {spec: Play(spec, workers, surroundings) for spec in SPECS}
        spreads = interleaved({spec: _side(play, options.repeat_s) for spec, play in plays.items()}, options.repeats)
        for spec, spread in spreads.items():
            plays[spec].check()
            rows.append(_row(spec, workers, backend, spread, bound_ns))
    return rows + [_whole(spec, *whole, repeats=min(options.repeats, 3)) for spec in WHOLE_SPECS]


def _side(play: Play, repeat_s: float) -> Callable[[], float]:
    play.run(10 * play.simulator.n_workers)  # a steady state of computing, pushing and pulling
    return repeated(play.run, repeat_s)


def _row(spec: str, workers: int, backend: str, spread: Spread, bound_ns: int) -> Row:
    return {
        "bench": "sim",
        "name": spec,
        "size": workers,
        "backend": backend,
        **spread.row(),
        "ns_per_op": spread.median * 1e9,
        "events_per_s": 1 / spread.median,
        "bound_ns": bound_ns,
        "checked": True,
    }


def _whole(spec: str, workers: int, steps: int, *, repeats: int) -> Row:
    """Measure a whole run: its seconds, and the process's peak memory, which includes other rows."""
    policy, simulation = parse_policy(spec), Simulation(workers=workers, steps=steps, **SHARED)
    found: list[Row] = []
    seconds = tuple(elapsed(lambda _: found.append(simulate(policy, simulation).row), 1) for _ in range(repeats))
    check(found[-1]["steps"] == workers * steps, f"{workers * steps} steps", found[-1]["steps"])
    spread = Spread(seconds)
    return {
        "bench": "sim",
        "name": f"{spec}, whole run",
        "size": workers,
        "backend": f"shared links, {steps} steps",
        **spread.row(),
        "ns_per_op": spread.median / found[-1]["events"] * 1e9,
        "events_per_s": found[-1]["events"] / spread.median,
        "bound_ns": WHOLE_BOUND_S * 1e9 / found[-1]["events"],
        "max_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "checked": True,
    }
