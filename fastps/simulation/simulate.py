"""Simulations of a policy, workers with compute times, and a network, in virtual time under the store's own scheduler.

This module describes a simulation and its outcome; the compiled simulator runs it.

The model: each worker computes, pushes its gradient to every shard's server, waits until the scheduler grants its next step,
and gets the weights with the grant. The transfers in progress share a server's port evenly (a leaf's in a tree, a worker's own
under overlap), each direction separately. In a tree a leaf is on the root's node. A server takes no time by default; otherwise
it handles one message at a time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt

from fastps.errors import Error, UsageError
from fastps.job.policy import Policy
from fastps.kernels.simulation.compute_time import ComputeTimes
from fastps.kernels.simulation.network import Network
from fastps.kernels.simulation.simulator import KINDS, Simulator
from fastps.system.clock import SYSTEM_CLOCK, Clock


@dataclass(frozen=True)
class ComputeModel:
    """How long each worker computes."""

    # "constant"; "normal"; "lognormal", whose sigma is the standard deviation of the logarithm; "pareto"; "replay".
    kind: str = "constant"
    location_ns: float = 10e6  # the time, mean, median or least time, in ns
    spread: float = 0.0  # of "normal" the standard deviation in ns, of "lognormal" sigma, of "pareto" the shape
    factors: Mapping[int, float] = field(default_factory=dict)  # worker to the factor of its times; default 1
    # (mean ns from one burst to the next, mean ns of a burst, factor during a burst), or None.
    bursts: tuple[float, float, float] | None = None
    # For "replay" the times in ns: one list for all workers, or one for each; lists repeat.
    replay: Sequence[Sequence[int]] = ()
    # The ns that each replayed step waits without a core; `replay` then has the step's time on a core. Empty: none.
    blocked: Sequence[Sequence[int]] = ()

    def build(self, workers: int, seed: int) -> ComputeTimes:
        """Build the compiled model for a number of workers. Raises UsageError for invalid values."""
        beyond = next((worker for worker in self.factors if not 0 <= worker < workers), None)
        if beyond is not None:
            raise UsageError(f"expected factors for workers 0 to {workers - 1}, found one for worker {beyond}")
        factors = np.ones(workers)
        for worker, factor in self.factors.items():
            factors[worker] = factor
        replay = self._lists(self.replay, workers) if self.kind == "replay" else None
        blocked = self._lists(self.blocked, workers)[0] if self.blocked else None
        try:
            return ComputeTimes(
                self.kind, self.location_ns, self.spread, factors, seed, bursts=self.bursts, replay=replay, blocked=blocked
            )
        except ValueError as error:
            raise UsageError(f"compute times: {error}") from None

    def _lists(self, given: Sequence[Sequence[int]], workers: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        lists = [np.asarray(times, np.int64) for times in given]
        if len(lists) == 1:
            lists *= workers
        if len(lists) != workers:
            raise UsageError(f"times to replay: expected one list for all workers or {workers}, found {len(lists)}")
        bounds = np.cumsum([0, *(len(times) for times in lists)], dtype=np.int64)
        return np.concatenate(lists), bounds


Row = dict[str, Any]

CORE_SLICE_NS = 4_000_000  # Linux at 250 clock ticks a second; it preempts at ticks
SLICE_EVENTS = 200_000  # events between two checks for Ctrl-C and progress reports: about a tenth of a second
MOST_WORKERS = 10_000_000
MOST_LINKS_SHOWN = 64

TRACE_DTYPE = np.dtype(
    [("time_ns", "<i8"), ("version", "<i8"), ("detail", "<i8"), ("worker", "<i4"), ("shard", "<i2"), ("kind", "<i2")]
)
TRACE_KINDS = KINDS  # a record's `kind` is an index of it


class DeadlockError(Error, RuntimeError):
    """Every worker waits and no event is left."""


@dataclass(frozen=True)
class Routes:
    """The links of a cluster's nodes, in place of those that a discipline's transfers would share."""

    bandwidth: tuple[float, ...]  # of each link, in bytes per second and direction; 0: unbounded
    most: tuple[float, ...]  # of one transfer on each link, in bytes per second; 0: unbounded
    latency_ns: tuple[int, ...]  # of each link
    of_worker: tuple[int, ...]  # the number of each worker's link. Workers of one link share it.


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The description of a simulation."""

    # Workers, and steps of each. The run ends when the shards have received workers x steps pushes from any workers, like a
    # training run on a budget of samples.
    workers: int = 4
    steps: int = 100
    # Whether instead each worker leaves after its own steps, when its next push would come, and the run ends with the last.
    leave: bool = False
    compute: ComputeModel = field(default_factory=ComputeModel)  # the model of compute times
    batch: int = 32  # samples of a step; compute times scale with batches that R2SP tunes
    model_bytes: float = 0.0  # size of a push and of a pull over all shards, which have equal parts
    bandwidth: float = 0.0  # bytes per second of each server's port in each direction; 0: unbounded
    # Bytes per second of each worker's port; each shard's transfer gets at most an even part; 0: unbounded.
    worker_bandwidth: float = 0.0
    latency_ns: int = 0  # time from a transfer's last byte sent to its arrival
    service_ns: int = 0  # a server's time for each message, a push or an answer, one at a time
    service_rate: float = 0.0  # bytes per second at which a server sums a gradient or sends weights; 0: infinite
    update_ns: int = 0  # a server's time for each update
    # Shard to the factor that divides its bandwidth and multiplies its latency and its server's times.
    slow_servers: Mapping[int, float] = field(default_factory=dict)
    late_pushes: tuple[float, int] = (0.0, 0)  # (share of the messages, delay in ns)
    late_pulls: tuple[float, int] = (0.0, 0)  # the same
    # (time in ns, worker, whether one joins in its place; else the worker is killed), in order of time.
    changes: Sequence[tuple[int, int, bool]] = ()
    cores: float = 0.0  # cores that all workers share while they compute; 0: each has its own
    slice_ns: int = CORE_SLICE_NS  # time slice of a worker on a core while others wait for one
    # Each worker's link, in place of the three bandwidths and latencies above. All shards share it evenly.
    routes: Routes | None = None
    half_duplex: bool = False  # pushes and pulls share their server's port, like injected transfers
    seed: int = 0  # determines all draws: one seed, one trace, on any machine

    def __post_init__(self) -> None:
        most = {"workers": (self.workers, MOST_WORKERS), "steps": (self.steps, 10**12), "batch-size": (self.batch, 10**9)}
        for name, (value, limit) in most.items():
            if not 1 <= value <= limit:
                raise UsageError(f"--{name}: expected 1 to {limit}, found {value}")
        if not 0 <= self.seed < 2**64:
            raise UsageError(f"--seed: expected 0 to 2^64 - 1, found {self.seed}")
        if not 0 <= self.cores <= 1e6:
            raise UsageError(f"--cores: expected 0 (one for each worker) to 1e6, found {self.cores:g}")
        if self.slice_ns < 1:
            raise UsageError(f"slice_ns: expected 1 or more, found {self.slice_ns}")
        if (self.bandwidth or self.worker_bandwidth) and not self.model_bytes:
            raise UsageError("--bandwidth needs --model-bytes: a transfer of nothing takes no time")
        if self.service_rate and not self.model_bytes:
            raise UsageError("--service-rate needs --model-bytes: nothing is gone through at once")
        self._check_changes()

    def _check_changes(self) -> None:
        """Raise UsageError for a worker that is not there, or that joins without having been killed."""
        killed = set[int]()
        for _, worker, joins in self.changes:
            name = "--join" if joins else "--kill"
            if not 0 <= worker < self.workers:
                raise UsageError(f"{name}: expected workers of 0 to {self.workers - 1}, found {worker}")
            if joins != (worker in killed):
                found = "a --join of one that was not killed" if joins else "two --kill"
                raise UsageError(f"{name}: expected a --kill and then a --join of worker {worker}, in turn, found {found}")
            (killed.discard if joins else killed.add)(worker)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one simulation: the report's row, and the trace's records if they were requested."""

    row: Row
    trace: npt.NDArray[np.void] | None


def simulate(
    policy: Policy,
    simulation: Simulation,
    *,
    trace: bool = False,
    tick: Callable[[int, int], None] | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Outcome:
    """Run one simulation; `tick(pushes, of)` is called about every tenth of a second.

    Raises PolicyError, UsageError, or DeadlockError if every worker waits forever.

    >>> from fastps import SSP
    >>> row = simulate(SSP(3), Simulation(workers=2, steps=100, compute=ComputeModel(factors={0: 3.0}))).row
    >>> row["staleness_max"], round(row["steps_per_s"], 1)
    (3, 67.8)
    """
    simulator = build(policy, simulation, trace=trace)
    budget = simulation.workers * simulation.steps * simulator.n_shards
    began_ns = clock.now_ns()
    try:
        while simulator.run(SLICE_EVENTS):
            if tick is not None:
                tick(simulator.received, budget)
    except RuntimeError as error:
        raise DeadlockError(f"{policy.spec}: {error}") from None
    row = row_of(policy, simulation, simulator, clock.now_ns() - began_ns)
    return Outcome(row, np.frombuffer(simulator.trace(), TRACE_DTYPE) if trace else None)


def build(policy: Policy, simulation: Simulation, *, trace: bool = False, asks: bool = False) -> Simulator:
    """Make a run's compiled simulator; with `asks` it stops wherever a worker has computed. Raises PolicyError, UsageError."""
    if policy.warm_up:
        raise UsageError(
            f"{policy.spec}: what is chosen after a warm-up is not simulated: use fastps advise, and name a discipline"
        )
    if simulation.changes and policy.overlap:
        raise UsageError(f"--kill: expected pulls that a step waits for, found {policy.spec}, which pulls meanwhile")
    if policy.shards > 1 and any(joins for _, _, joins in simulation.changes):
        raise UsageError(f"--join: expected one shard, found {policy.shards}")
    changes = [(at_ns, -1 - worker if joins else worker) for at_ns, worker, joins in simulation.changes]
    values = dict(policy.values(simulation.workers))
    links, link_of_worker = _links(policy, simulation)
    is_partial = policy.pull < 1
    return Simulator(
        values,
        simulation.compute.build(simulation.workers, simulation.seed),
        _network(policy, simulation, links),
        link_of_worker,
        shards=policy.shards,
        shard_bytes=simulation.model_bytes / policy.shards,
        # Round up, except for rounding errors: 0.55 of 20 is 11, although the floating-point product is slightly more.
        needed=ceil(policy.pull * policy.shards - 1e-9),
        pull_timeout_ns=int(policy.pull_timeout * 1e9) if is_partial else -1,
        slots=policy.slots(simulation.workers),
        overlap=policy.overlap,
        batch=simulation.batch,
        steps=simulation.steps,
        leave=simulation.leave,
        asks=asks,
        trace=trace,
        service_ns=_service(policy, simulation),
        cores=simulation.cores,
        slice_ns=simulation.slice_ns,
        hop_ns=_hop_ns(policy, simulation),
        changes=np.array(changes, np.int64).reshape(-1, 2),
    )


def _hop_ns(policy: Policy, simulation: Simulation) -> int:
    """Return the time in which a learner of Rudra-adv* sends weights to its two children of the broadcast tree; -1: no tree.

    A learner sends as fast as its port and, where a server's times are given, as a server.
    """
    if not (policy.overlap and policy.groups):
        return -1
    rate = min((each for each in (simulation.bandwidth, simulation.worker_bandwidth) if each), default=0.0)
    byte_ns = (1e9 / rate if rate else 0.0) + (1e9 / simulation.service_rate if simulation.service_rate else 0.0)
    hop_ns = simulation.latency_ns + round(2 * (simulation.service_ns + simulation.model_bytes * byte_ns))
    return hop_ns or -1


def _links(policy: Policy, simulation: Simulation) -> tuple[int, npt.NDArray[np.int32]]:
    """Return the number of links, and each worker's first link: its route's, or its servers', its leaf's, or its own."""
    workers, routes = simulation.workers, simulation.routes
    if routes is not None:
        return len(routes.bandwidth) * policy.shards, np.array(routes.of_worker, np.int32) * policy.shards
    first = np.fromiter((policy.link_of(rank, workers) for rank in range(workers)), np.int32, workers)
    return (int(first[-1]) + 1) * policy.shards, (first * policy.shards).astype(np.int32)


def _network(policy: Policy, simulation: Simulation, links: int) -> Network:
    beyond = next((shard for shard in simulation.slow_servers if not 0 <= shard < policy.shards), None)
    if beyond is not None:
        raise UsageError(f"--slow-server: expected a shard of 0 to {policy.shards - 1}, found {beyond}")
    bandwidth = np.full(links, simulation.bandwidth)
    latency_ns = np.full(links, simulation.latency_ns, np.int64)
    most: float | npt.NDArray[np.float64] = simulation.worker_bandwidth / policy.shards
    if simulation.routes is not None:
        bandwidth = np.repeat(simulation.routes.bandwidth, policy.shards) / policy.shards
        most = np.repeat(simulation.routes.most, policy.shards) / policy.shards
        latency_ns = np.repeat(np.array(simulation.routes.latency_ns, np.int64), policy.shards)
    for shard, factor in simulation.slow_servers.items():
        if not factor >= 1:
            raise UsageError(f"--slow-server: expected a factor of at least 1, found {factor:g}")
        bandwidth[shard :: policy.shards] /= factor
        latency_ns[shard :: policy.shards] = round(simulation.latency_ns * factor)
    try:
        return Network(
            bandwidth,
            latency_ns,
            most=most,
            late_pushes=simulation.late_pushes,
            late_pulls=simulation.late_pulls,
            half_duplex=simulation.half_duplex,
            seed=simulation.seed,
        )
    except ValueError as error:
        raise UsageError(f"network: {error}") from None


def _service(policy: Policy, simulation: Simulation) -> npt.NDArray[np.float64]:
    """Return float64[shards, 3]: ns of each server for a message, a byte of it, and an update."""
    byte_ns = 1e9 / simulation.service_rate if simulation.service_rate else 0.0
    times_ns = np.tile([float(simulation.service_ns), byte_ns, float(simulation.update_ns)], (policy.shards, 1))
    for shard, factor in simulation.slow_servers.items():
        times_ns[shard] *= factor
    return times_ns


def row_of(policy: Policy, simulation: Simulation, simulator: Simulator, wall_ns: int) -> Row:
    """The report's row of a run that has ended."""
    sums = simulator.totals()
    shards = [simulator.shard_totals(shard) for shard in range(simulator.n_shards)]
    seconds = simulator.ended_ns / 1e9
    steps = simulator.received / simulator.n_shards
    active_ns = max(1, sums["compute_ns"] + sums["wait_ns"])
    return {
        "sync": policy.spec,
        "workers": simulation.workers,
        "shards": simulator.n_shards,
        "seconds": seconds,
        "steps": int(steps),
        "steps_per_s": steps / max(1e-9, seconds),
        "samples_per_s": simulator.samples / max(1e-9, seconds),
        "staleness_mean": sum(shard["staleness_sum"] for shard in shards) / max(1, sum(shard["folded"] for shard in shards)),
        "staleness_max": max(shard["staleness_max"] for shard in shards),
        "sigma_mean": sum(shard["sigma_mean"] for shard in shards) / len(shards),
        "staleness": simulator.staleness_counts(),
        "wait_share": sums["wait_ns"] / active_ns,
        "grant_wait_share": sums["grant_wait_ns"] / simulator.n_shards / active_ns,
        "dropped": sum(shard["dropped"] for shard in shards),
        "stale_blocks": sums["stale_blocks"],
        "updates": sum(shard["updates"] for shard in shards),
        "zero_gap_share": zero_gap_share(shards, seconds * simulation.workers / max(1.0, steps)),
        "gaps_ns": [shard["gaps_ns"] for shard in shards],
        **_link_use(simulator),
        **_server_use(simulator),
        "seed": simulation.seed,
        "events": simulator.events,
        "wall_seconds": wall_ns / 1e9,
        "events_per_s": simulator.events / max(1e-9, wall_ns / 1e9),
    }


def zero_gap_share(shards: Sequence[Row], iteration_s: float) -> float:
    """The fraction of gaps between consecutive updates that are under 1 % of the mean iteration time, 0 to 1 (R2SP, Fig. 8)."""
    limit_ns = 0.01 * iteration_s * 1e9
    gaps: list[tuple[int, int]] = [(least_ns, count) for shard in shards for least_ns, count in shard["gaps_ns"]]
    return sum(count for least_ns, count in gaps if least_ns < limit_ns) / max(1, sum(count for _, count in gaps))


def _link_use(simulator: Simulator) -> Row:
    """Return the used share of the ports' bandwidth: mean, maximum, and each port's up to MOST_LINKS_SHOWN links."""
    found = [simulator.network.use(port, simulator.ended_ns) for port in range(2 * simulator.network.n_links)]
    shares = [use["share"] for use in found]
    named = [
        {"link": port // 2, "direction": "pull" if port % 2 else "push", **use}
        for port, use in enumerate(found[: 2 * MOST_LINKS_SHOWN])
    ]
    return {"link_share_mean": sum(shares) / len(shares), "link_share_max": max(shares), "links": named}


def _server_use(simulator: Simulator) -> Row:
    """Return the busy share of servers, in a tree also of leaves: mean and maximum; and the longest queue."""
    found = [simulator.server_queue.use(station, simulator.ended_ns) for station in range(simulator.server_queue.n_stations)]
    shares = [use["busy_share"] for use in found]
    return {
        "server_share_mean": sum(shares) / len(shares),
        "server_share_max": max(shares),
        "server_line_max": int(max(use["peak"] for use in found)),
    }
