"""Measured links as the simulation's network: a cluster of N nodes, predicted from what `fastps doctor --nodes` has measured.

Workers of the simulation are nodes. What is assumed:

- **Replicas**, as under bsp and hardsync. Every node sends (N - 1)/N of the model and receives as much, twice a step, on its
  own link. Each adds 1/N of the pushes and folds each version. Nothing travels while a node computes.
- **A home**, as under other disciplines and where floats are rounded. Node 0 has the weights, and its own push crosses no link.
  It sums each push and copies each answer, one after the other, and folds each version.
- **Node 0's port.** All other nodes share the way to a home. Its rate in each direction is the sum of what all measured edges
  carried at the same time. More edges than were measured get no more than that together.
- **Edges.** Up to as many nodes as were measured have their own edges. Any further node has the slowest one.
- **Parts.** Under bsp and hardsync a large model has p parts. A home returns a part while the next one travels: the way out and
  back takes 1 + 1/p times one way, where the link carries both at once. Whatever is shorter, the link's time or that of sums
  and folds, counts 1/p.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastps.errors import UsageError
from fastps.job.nodes import Nodes, are_replicas, check_policy
from fastps.job.options import NodePolicy
from fastps.job.policy import Policy
from fastps.job.wire import part_count, wire_bytes
from fastps.simulation.simulate import Routes, Simulation

_HALF_DUPLEX = 0.75  # of the rate one way: a link that carries less than this each way at once shares it between both ways
_AS_MANY = 0.9  # of the edges' own rates: together they carry this, so that no port is shared

_SMALL_BYTES = 100_000  # of the small messages that were measured
_REPLACED = {
    "--model-bytes": "model_bytes",
    "--bandwidth": "bandwidth",
    "--worker-bandwidth": "worker_bandwidth",
    "--latency": "latency_ns",
    "--service-rate": "service_rate",
    "--slow-server": "slow_servers",
}


@dataclass(frozen=True)
class MeasuredEdge:
    """The edge between a node and node 0: bytes per second one way, both ways at once and with all edges in use, and times."""

    up_bytes_s: float
    down_bytes_s: float
    both_bytes_s: float
    together_bytes_s: float
    round_trip_ns: int
    small_round_trip_ns: int

    @property
    def is_half_duplex(self) -> bool:
        """Whether both directions share one rate."""
        return self.both_bytes_s < _HALF_DUPLEX * min(self.up_bytes_s, self.down_bytes_s)

    @property
    def latency_ns(self) -> int:
        """The time of a message besides its floats': half a round trip, and what 100 kB take longer than at the full rate."""
        moved_ns = 1e9 * _SMALL_BYTES / max(self.up_bytes_s, self.down_bytes_s)
        return round(self.round_trip_ns / 2 + max(0.0, (self.small_round_trip_ns - self.round_trip_ns) / 2 - moved_ns))


@dataclass(frozen=True)
class MeasuredHome:
    """What node 0 does with floats: `fold_bytes_s` of a version with one push, and `sum_bytes_s` of each further push."""

    fold_bytes_s: float
    sum_bytes_s: float


@dataclass(frozen=True)
class MeasuredLinks:
    """The links of a cluster: the edges of nodes 1, 2, ..., and node 0's own rates, if they were measured."""

    edges: tuple[MeasuredEdge, ...]
    home: MeasuredHome | None = None

    @property
    def port_bytes_s(self) -> float:
        """The rate of node 0's port in each direction, as far as it was measured."""
        alone = max(edge.both_bytes_s for edge in self.edges)
        return alone if len(self.edges) == 1 else max(alone, sum(edge.together_bytes_s for edge in self.edges))

    @property
    def is_half_duplex(self) -> bool:
        """Whether most edges share one rate between both directions."""
        return 2 * sum(edge.is_half_duplex for edge in self.edges) > len(self.edges)

    def edge(self, node: int) -> MeasuredEdge:
        """The edge of node 1, 2, ...: its own, or the slowest for a node that was not measured."""
        if node <= len(self.edges):
            return self.edges[node - 1]
        return min(self.edges, key=lambda edge: edge.both_bytes_s)

    def has_shared_port(self, nodes: int) -> bool:
        """Whether node 0's port gives the edges of so many nodes less than each has alone."""
        alone = sum(self.edge(node).both_bytes_s for node in range(1, nodes))
        return self.port_bytes_s < _AS_MANY * alone


@dataclass(frozen=True)
class ModelOnNodes:
    """What travels: a model of so many parameters, over so many nodes.

    Raises UsageError for values out of range.

    >>> ModelOnNodes(25_000_000, 2).size
    100000000
    """

    parameters: int
    nodes: int
    link_dtype: str = "float32"

    def __post_init__(self) -> None:
        NodePolicy(link_dtype=self.link_dtype)
        if self.nodes < 2:
            raise UsageError(f"links between nodes: expected 2 nodes or more, found {self.nodes}")
        if self.parameters < 1:
            raise UsageError(f"--parameters: expected 1 or more, found {self.parameters}")

    @property
    def size(self) -> int:
        """The bytes of all floats on a link."""
        return wire_bytes(self.link_dtype, self.parameters)

    def check(self, policy: Policy) -> None:
        """Raise PolicyError for a discipline that makes no sense between nodes."""
        check_policy(policy, Nodes(self.nodes, 0, 0, 1, "127.0.0.1", 1, NodePolicy(link_dtype=self.link_dtype)))

    def is_replicated(self, policy: Policy) -> bool:
        """Whether each node has the whole state under this discipline, and the nodes exchange sums."""
        return are_replicas(policy, NodePolicy(link_dtype=self.link_dtype))


def read_links(file: Path) -> MeasuredLinks:
    """Read the JSON that `fastps doctor --nodes --output FILE` has written. Raises UsageError."""
    expected = f"--links {file}: expected the JSON that fastps doctor --nodes --output has written"
    try:
        rows = json.loads(file.read_text())["rows"]
        edges = sorted((row for row in rows if row["kind"] == "link"), key=lambda row: int(row["node"]))
        homes = [
            MeasuredHome(_positive(row, "fold_bytes_s"), _positive(row, "sum_bytes_s")) for row in rows if row["kind"] == "home"
        ]
        found = MeasuredLinks(tuple(_edge(row) for row in edges), homes[0] if homes else None)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{expected}, found {type(error).__name__}: {error}") from None
    if not found.edges:
        raise UsageError(f"{expected}, found no links in it")
    return found


def _edge(row: Mapping[str, Any]) -> MeasuredEdge:
    up, down, both, together = (_positive(row, f"{name}_bytes_s") for name in ("up", "down", "both", "together"))
    round_trip_ns, small_ns = (round(_positive(row, name)) for name in ("round_trip_ns", "small_round_trip_ns"))
    return MeasuredEdge(up, down, both, together, round_trip_ns, small_ns)


def _positive(row: Mapping[str, Any], name: str) -> float:
    value = float(row[name])
    if not 0 < value < 1e15:
        raise ValueError(f"{name} of {value:g}")
    return value


def on_links(simulation: Simulation, policy: Policy, links: MeasuredLinks, model: ModelOnNodes) -> tuple[Policy, Simulation]:
    """The policy and the simulation of a discipline between nodes; `simulation` has the nodes' computing times.

    Raises PolicyError. An overlap of pulls with computing is left out, because a node's push waits for its weights.

    >>> from fastps.job.disciplines import ASP
    >>> edge = MeasuredEdge(125e6, 125e6, 125e6, 125e6, 200_000, 1_800_000)
    >>> _, found = on_links(Simulation(workers=3), ASP(), MeasuredLinks((edge,)), ModelOnNodes(1000, 3))
    >>> found.model_bytes, found.routes.bandwidth, found.routes.of_worker
    (4000.0, (0.0, 125000000.0), (0, 1, 1))
    """
    model.check(policy)
    for option, name in _REPLACED.items():
        if getattr(simulation, name):
            raise UsageError(f"{option}: the measured links say this: expected no --links beside it")
    replicas = model.is_replicated(policy)
    parts = part_count(model.parameters) if policy.is_level and policy.shards == 1 else 1
    times = _Times.of(links, model, replicas=replicas, is_level=policy.is_level)
    both_ways = 1.0 if links.is_half_duplex or replicas else (1 + 1 / parts) / 2
    share = both_ways if times.link_s >= times.home_s else 1 / parts
    home_share = 1.0 if times.link_s < times.home_s else 1 / parts
    size = share * model.size * ((model.nodes - 1) / model.nodes if replicas else 1)
    return replace(policy, overlap=False), replace(
        simulation,
        model_bytes=size,
        routes=_routes(links, model, replicas=replicas),
        half_duplex=links.is_half_duplex,
        service_rate=size / policy.shards / (home_share * times.sum_s) if times.sum_s else 0.0,
        update_ns=simulation.update_ns + round(1e9 * home_share * times.fold_s),
    )


@dataclass(frozen=True)
class _Times:
    """The seconds of a step in which all nodes push once: of the busiest link one way, of a sum, of a fold, of all of these."""

    link_s: float
    sum_s: float
    fold_s: float
    home_s: float

    @staticmethod
    def of(links: MeasuredLinks, model: ModelOnNodes, *, replicas: bool, is_level: bool) -> "_Times":
        edges = [links.edge(node).both_bytes_s for node in range(1, model.nodes)]
        if replicas:
            carried = model.size * (model.nodes - 1) / model.nodes / min(edges)
        else:
            carried = model.size * max(1 / min(edges), (model.nodes - 1) / links.port_bytes_s)
        if links.home is None:
            return _Times(carried, 0.0, 0.0, 0.0)
        size = 4 * model.parameters
        sum_s, fold_s = size / (model.nodes if replicas else 1) / links.home.sum_bytes_s, size / links.home.fold_bytes_s
        return _Times(carried, sum_s, fold_s, 2 * model.nodes * sum_s + fold_s * (1 if is_level else model.nodes))


def _routes(links: MeasuredLinks, model: ModelOnNodes, *, replicas: bool) -> Routes:
    """Each node's link: a replica's own; else the shared port, or the edges where they are the limit."""
    others = range(1, model.nodes)
    if not replicas and links.has_shared_port(model.nodes):
        latency_ns = max(links.edge(node).latency_ns for node in others)
        most = _both(links, links.edge(model.nodes).both_bytes_s)
        return Routes((0.0, _both(links, links.port_bytes_s)), (0.0, most), (0, latency_ns), (0, *(1 for _ in others)))
    edges: Sequence[MeasuredEdge] = [links.edge(node) for node in others]
    if replicas:  # which send and receive at once, on the way out and back alike
        each = [edges[0], *edges]
        rates = tuple(edge.both_bytes_s for edge in each)
        latencies_ns = tuple(edge.latency_ns for edge in each)
    else:
        rates = (0.0, *(_both(links, edge.both_bytes_s) for edge in edges))
        latencies_ns = (0, *(edge.latency_ns for edge in edges))
    return Routes(rates, (0.0,) * model.nodes, latencies_ns, tuple(range(model.nodes)))


def _both(links: MeasuredLinks, rate: float) -> float:
    """The rate of a port that carries `rate` in each direction at once."""
    return 2 * rate if links.is_half_duplex else rate
