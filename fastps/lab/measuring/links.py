"""fastps doctor over several nodes: what each link to node 0 can do, and what bounds a step of a model on them.

The nodes meet as launchers do, and node 0 measures one edge after the other. All nodes get the same report.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import numpy as np
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from fastps.errors import AttachError, Error
from fastps.job.layout import aligned
from fastps.job.update_rules import SGD
from fastps.job.wire import part_count, wire_bytes
from fastps.lab.measuring.rates import SMALL_BYTES, LinkRates, measure, respond
from fastps.lab.measuring.simulated_links import MeasuredHome
from fastps.network.addresses import own_address
from fastps.network.edge import Edge
from fastps.network.link import GlooLink, LinkLostError, reason_of
from fastps.network.meeting import Introduction, Met, await_keys, meet
from fastps.processes.nodes import NodeOptions
from fastps.store.store import Store as Arena
from fastps.system.clock import SYSTEM_CLOCK, Clock

_OPEN_S = 60.0
_READ_S = 10.0
_FOLD_FLOATS = 4_000_000  # larger models fold at the same rate: these do not fit into a cache, either
_FOLDS = 5


@dataclass(frozen=True)
class MeasuredLink:
    """The link of one node to node 0."""

    node: int
    machine: str
    address: str
    rates: LinkRates

    def row(self) -> dict[str, Any]:
        """The link as a row of the report."""
        return {"kind": "link", "node": self.node, "machine": self.machine, "address": self.address, **asdict(self.rates)}


@dataclass(frozen=True)
class StepBound:
    """What bounds a step of a model under bsp, without its computing.

    Attributes:
        parameters, nodes, link_dtype: the job.
        parts: how many parts the model is cut into; several travel and fold at the same time.
        node: the node with the slowest link.
        link_ns: the time of its floats on that link, up and down.
        fold_ns: the time in which node 0 sums and folds.
        step_ns: the least time of a step: the longer of both where there are several parts, else their sum.
    """

    parameters: int
    nodes: int
    link_dtype: str
    parts: int
    node: int
    link_ns: int
    fold_ns: int
    step_ns: int

    @property
    def is_link_bound(self) -> bool:
        """Whether the link takes longer than the fold."""
        return self.link_ns >= self.fold_ns

    def row(self) -> dict[str, Any]:
        """The bound as a row of the report."""
        return {"kind": "step", **asdict(self), "bound_by": "link" if self.is_link_bound else "fold"}

    @property
    def shown(self) -> str:
        """The bound in a sentence."""
        ways = "both ways at once" if self.parts > 1 else "up, then down"
        bound = "link" if self.is_link_bound else "fold"
        return (
            f"bsp of {self.parameters:,} floats as {self.link_dtype}: {self.link_ns / 1e9:.3g} s on the link of node"
            f" {self.node}, {ways}; the fold {self.fold_ns / 1e9:.2g} s; a step takes about"
            f" {self.step_ns / 1e9:.3g} s or more, {bound}-bound"
        )


@dataclass(frozen=True)
class LinksReport:
    """What node 0 has found: all links, its own rates, and what bounds a step of each model that it was asked about."""

    links: list[MeasuredLink]
    home: MeasuredHome
    bounds: list[StepBound]

    def rows(self) -> list[Mapping[str, Any]]:
        """The rows of the JSON report, which `fastps simulate --links` and `fastps advise --links` read again."""
        home = {"kind": "home", **asdict(self.home)}
        return [*(link.row() for link in self.links), home, *(bound.row() for bound in self.bounds)]


def examine_links(options: NodeOptions, sizes: Sequence[int] = (), clock: Clock = SYSTEM_CLOCK) -> LinksReport:
    """Meet the other nodes and measure all links. Every node gets the report of node 0.

    `sizes` are numbers of parameters. Raises AttachError, UsageError.
    """
    given = options.meeting(1)
    met, timeout_s = meet(given), given.timeout_s
    own = own_address(given.host, given.port, options.interface, options.trusts_network)
    store = PrefixStore("doctor", met.store)
    count = len(met.nodes)
    try:
        rates = _measured(store, met, own, options.policy.timeout_s, clock)
        if rates is not None:
            links = [_link(node, each) for node, each in zip(met.nodes[1:], rates, strict=True)]
            dtype = options.policy.link_dtype
            bounds = [bound_of(links, size, dtype, fold_seconds(size, count, clock)) for size in sizes]
            found = [asdict(each) for each in rates], asdict(home_rates(clock)), [asdict(bound) for bound in bounds]
            store.set("report", json.dumps(found))
        return _report(store, met, timeout_s)
    except LinkLostError as error:
        raise AttachError(f"node {met.place.number} lost a link while it was measured: {error}") from error
    except Error:
        raise
    except RuntimeError as error:
        raise AttachError(f"the rendezvous was lost ({reason_of(error)}): see the output of node 0") from error


def _measured(store: Store, met: Met, own: str, edge_timeout_s: float, clock: Clock) -> list[LinkRates] | None:
    """On node 0 the rates of all links; elsewhere None, after this node's link was measured."""
    number = met.place.number
    others = range(1, len(met.nodes)) if number == 0 else (number,)
    edges = [_open(store, node, 0 if number == 0 else 1, own, edge_timeout_s) for node in others]
    try:
        if number == 0:
            return measure(edges, clock)
        respond(edges[0])
        return None
    finally:
        for edge in edges:
            edge.close()


def _report(store: Store, met: Met, timeout_s: float) -> LinksReport:
    """The report that node 0 has published. Node 0 returns last, because the store ends with its process."""
    number = met.place.number
    await_keys(store, ["report"], timeout_s, number)
    rates, home, bounds = json.loads(store.get("report"))
    store.set(f"has read/{number}", "")
    if number == 0:
        store.wait([f"has read/{node}" for node in range(len(met.nodes))], timedelta(seconds=_READ_S))
    links = [_link(node, LinkRates(**each)) for node, each in zip(met.nodes[1:], rates, strict=True)]
    return LinksReport(links, MeasuredHome(**home), [StepBound(**each) for each in bounds])


def _link(node: Introduction, rates: LinkRates) -> MeasuredLink:
    return MeasuredLink(node.number, node.machine, node.address, rates)


def _open(store: Store, node: int, side: int, own: str, timeout_s: float) -> Edge:
    control, data = (GlooLink(store, f"edge/{node}/{name}", side, own, _OPEN_S) for name in ("control", "data"))
    return Edge(control, data, timeout_s)


# -- what bounds a step --------------------------------------------------------------------------------------------------


def bound_of(links: Sequence[MeasuredLink], parameters: int, link_dtype: str, fold_s: float) -> StepBound:
    """What bounds a step of a model of so many parameters on these links under bsp. `fold_s`: the time of its fold, in seconds.

    Floats that are rounded go to node 0 and back; others are summed over all nodes.
    """
    nodes = len(links) + 1
    parts, size = part_count(aligned(parameters)), wire_bytes(link_dtype, parameters)
    if link_dtype == "float32":
        times = {link.node: _sum_s(link.rates, size, nodes) for link in links}
    else:
        times = {link.node: _link_s(link.rates, size, parts > 1, nodes > 2) for link in links}
    slowest = max(times, key=lambda node: times[node])
    link_s = times[slowest]
    step_s = max(link_s, fold_s) if parts > 1 else link_s + fold_s
    numbers = (int(1e9 * seconds) for seconds in (link_s, fold_s, step_s))
    return StepBound(parameters, nodes, link_dtype, parts, slowest, *numbers)


def _sum_s(rates: LinkRates, size: int, nodes: int) -> float:
    """The time of a sum over all nodes: a link carries (N - 1)/N of the floats twice, each time both ways at once."""
    return _there_and_back_s(rates, size * (nodes - 1) / nodes, 2 / rates.both_bytes_s)


def _link_s(rates: LinkRates, size: int, is_cut: bool, shares: bool) -> float:
    """The time of a push and of its answer. With several parts both directions are used at once."""
    if is_cut:
        return size / (rates.together_bytes_s if shares else rates.both_bytes_s) + rates.round_trip_ns / 1e9
    return _there_and_back_s(rates, size, 1 / rates.up_bytes_s + 1 / rates.down_bytes_s)


def _there_and_back_s(rates: LinkRates, size: float, byte_s: float) -> float:
    """The time of two messages one after the other; a further byte of each takes `byte_s` in all."""
    begins_ns, small_ns = rates.round_trip_ns, rates.small_round_trip_ns
    if size <= SMALL_BYTES:
        return (begins_ns + (small_ns - begins_ns) * size / SMALL_BYTES) / 1e9
    return small_ns / 1e9 + (size - SMALL_BYTES) * byte_s


def fold_seconds(parameters: int, nodes: int, clock: Clock = SYSTEM_CLOCK) -> float:
    """The time in which a home of so many nodes folds a version with SGD and momentum: the median of real folds.

    A model of more than 4 million parameters is taken to fold at the rate of one of 4 million.
    """
    floats = min(parameters, _FOLD_FLOATS)
    times = []
    with Arena.create({"w": np.zeros(floats, np.float32)}, SGD(lr=0.1, momentum=0.9), sync="bsp", workers=nodes) as store:
        workers = [store.attach(rank) for rank in range(nodes)]
        for worker in workers:
            worker.gradients["w"][:] = 1e-6
        for _ in range(1 + _FOLDS):
            for worker in workers[1:]:
                worker.push(store.hypers)
            began_ns = clock.now_ns()
            workers[0].push(store.hypers)
            workers[0].advance()
            times.append(clock.now_ns() - began_ns)
            for worker in workers:
                worker.advance()
                worker.pull()
        for worker in workers:
            worker.close()
    return statistics.median(times[1:]) / 1e9 * parameters / floats


def home_rates(clock: Clock = SYSTEM_CLOCK) -> MeasuredHome:
    """Measure what node 0 does with floats, by folds of versions with one push and with three."""
    one_s, three_s = (fold_seconds(_FOLD_FLOATS, nodes, clock) for nodes in (1, 3))
    size = 4 * _FOLD_FLOATS
    # A push more costs time, even where noise says otherwise: reading it takes a twentieth of a fold at least.
    return MeasuredHome(size / one_s, size / max((three_s - one_s) / 2, 0.05 * one_s))
