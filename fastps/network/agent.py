"""A node's agent: the server of the node's arena, and the only process of the node that talks to other nodes.

On node 0 it also has the home arenas. Worker 0 of each node starts it as `python -m fastps.network.agent`. It serves once the
nodes have found each other and this node has the first weights. It ends when the node's workers have left; with home arenas it
ends when all nodes have left.
"""

import contextlib
import logging
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from fastps.checkpoint.loading import load
from fastps.errors import Error, NodeLostError
from fastps.job.layout import Layout
from fastps.job.nodes import Nodes
from fastps.job.update_rules import Hyper
from fastps.kernels.protocol.lane import Lane
from fastps.kernels.shm.arena import LANE_EXPELLED, LANE_FREE, LANE_JOINING, LANE_LIVE
from fastps.membership.job_memory import JobMemory
from fastps.membership.peers import WORKER_LOST
from fastps.network.far_home import FarHome
from fastps.network.group import Groups
from fastps.network.home import Home, NearHome
from fastps.network.home_checkpoint import PartStart
from fastps.network.leaf import Leaf, LocalLeaf, Upstream
from fastps.network.link import LinkLostError
from fastps.network.monitoring.report import Report
from fastps.network.parts import Part
from fastps.network.rendezvous import Rendezvous, Requests
from fastps.network.replica import Replica
from fastps.network.rows import Table
from fastps.network.serving import Serving
from fastps.network.spare import spare_of
from fastps.network.sums import Sums
from fastps.store.server_loop import Folds, Server, answer_as_server, run_from_order, with_rule
from fastps.store.server_process import Order, ServerPlan, picklable
from fastps.store.store import StartState, Store
from fastps.system import shared_memory
from fastps.system.clock import SYSTEM_CLOCK
from fastps.system.descriptors import reserve_all
from fastps.tracing.node_part import NodePart, node_note

logger = logging.getLogger("fastps.network")


@dataclass(frozen=True)
class AgentOrder:
    """The agent's part of an Order: the nodes, the job's name at the rendezvous, the home's layout, and first hyper-parameters.

    `rule` is a user rule, pickled by value; empty for a built-in rule. `resume` is the folder of the checkpoint from which the
    home begins; empty to begin with the leaf's weights. `trace` is the file of this node's trace; None without one.
    `workers`: those of all nodes.
    """

    nodes: Nodes
    name: str
    layout: Layout
    rule: bytes
    hypers: list[Hyper]
    resume: str = ""
    trace: Path | None = None
    workers: int = 0


def plan_of(
    nodes: Nodes, name: str, layout: Layout, hypers: list[Hyper], resume: str = "", trace: Path | None = None, workers: int = 0
) -> ServerPlan:
    """The plan by which a leaf's store starts its agent. `layout` is the home's."""
    plain, rule = picklable(layout)
    return ServerPlan(__name__, AgentOrder(nodes, name, plain, rule, list(hypers), resume, trace, workers))


class LeafFolds(Folds):
    """A leaf's server makes versions with the other nodes. It ends with an error if one, or a worker of its own, is lost."""

    def __init__(self, store: Store, lane: Lane, leaf: "Leaf | Replica") -> None:
        self._store, self._arena, self._lane = store, store.arena, lane
        self._leaf, self._spare = leaf, spare_of(store, lane)
        lane.fold_with(leaf.fold, [0], nothing=True)
        self._has_started = self._has_finished = False

    def is_over(self, are_gone: bool) -> bool:
        """Not before the other nodes know that this one makes no more steps, unless a worker of this node never came.

        The workers may post and leave between the last fold and this call.
        """
        if not self._has_started and LANE_FREE not in self._arena.lane_states()[: self._store.layout.workers]:
            self._has_started = True
            self._leaf.start(self._spare)
        self._leaf.attend(self._spare)
        if not self._has_finished and self._is_done():
            self._has_finished = True
            self._finish()
        return are_gone and (self._has_finished or LANE_FREE in self._arena.lane_states()[: self._store.layout.workers])

    def _is_done(self) -> bool:
        """Whether every worker of this node has left, and what it pushed is folded. Nothing of an expelled one will be."""
        states = self._arena.lane_states()
        if any(state in (LANE_FREE, LANE_JOINING, LANE_LIVE) for state in states[: self._store.layout.workers]):
            return False
        counted = [self._arena.counters(lane) for lane in range(self._store.layout.lanes) if states[lane] != LANE_EXPELLED]
        return all(each["done"] >= each["posted"] for each in counted)

    def _finish(self) -> None:
        """Wait until the other nodes have left, too, and publish the final weights for workers that wait for them."""
        self._leaf.finish(self._spare)
        self._arena.finish(self._lane.index)

    def check(self, server: Server) -> None:
        """Check the home, and the workers of this node."""
        self._leaf.check()
        if self._store.layout.faults.continues:
            return
        for lane, (generation, state) in enumerate(self._arena.members()[: self._store.layout.lanes]):
            if state in WORKER_LOST or server.is_dismissed((lane, generation)):
                node, workers = self._leaf.nodes.number, self._leaf.nodes.local_workers
                reason = self._arena.failure(lane) or "its process is gone"
                raise NodeLostError(f"node {node}: worker {lane} of {workers} failed: {reason}", node)


def _upstream(order: AgentOrder, layout: Layout, leaf: JobMemory, report: Report) -> Upstream:
    """Find the other nodes. Returns once this node has the first weights."""
    nodes = order.nodes
    rendezvous = Rendezvous(nodes, order.name, layout, leaf.timeout_s, leaf.clock)
    if not nodes.is_first:
        rendezvous.check(order.hypers)
    home: FarHome | NearHome
    if nodes.is_first:
        made = Home.create(layout, nodes, leaf, order.hypers, _start(order, layout))
        home = _served(made, rendezvous, leaf, report)
        rendezvous.publish(order.hypers)
    else:
        home = FarHome(leaf, rendezvous, report.of_home)
    with _beginning(nodes, home):
        home.begin(Sums(leaf).weights(0))
        leaf.write_halves(0)
    return home


@contextlib.contextmanager
def _beginning(nodes: Nodes, upstream: Upstream) -> Iterator[None]:
    """Leave if the block, in which this node takes its first weights, raises."""
    try:
        yield
    except BaseException as error:
        upstream.leave(str(error))
        if not isinstance(error, LinkLostError):
            raise
        raise NodeLostError(f"node {nodes.number} could not join node 0 at {nodes.host}:{nodes.port}: {error}", 0) from error


def _replica(order: AgentOrder, model: Layout, store: JobMemory, report: Report) -> tuple[Replica, Upstream]:
    """Find the other nodes. Returns once this node has the state to begin with."""
    nodes, table = order.nodes, Table(model)
    rendezvous = Rendezvous(nodes, order.name, model, store.timeout_s, store.clock)
    if not nodes.is_first:
        rendezvous.check(order.hypers)
    edges = rendezvous.holding(table.layout)
    home: FarHome | NearHome
    if nodes.is_first:
        home = _served(Home.of_rows(table, nodes, store), edges, store, report)
        rendezvous.publish(order.hypers)
    else:
        home = FarHome(store, edges, report.of_home)
    groups = Groups(nodes.number, rendezvous.address, rendezvous.store, rendezvous.group_name, store.clock)
    replica = Replica(store, nodes, table, order.hypers, home, groups, report)
    with _beginning(nodes, home):
        replica.begin()
    return replica, home


def _served(home: Home, edges: Rendezvous, leaf: JobMemory, report: Report) -> NearHome:
    """The home on this node, with a thread for each other node."""
    report.home = home.stores[0].arena
    others = [
        Serving(home, node, Requests(edges, node), leaf.timeout_s, report.of_leaf(node)) for node in range(1, home.nodes.count)
    ]
    near = NearHome(home, others)
    for serving in others:
        serving.start()
    return near


def _start(order: AgentOrder, layout: Layout) -> Callable[[Part], StartState] | None:
    """What each part's arena resumes from; None to begin with the leaf's weights. Raises CheckpointError."""
    if not order.resume:
        return None
    checkpoint = load(order.resume)
    return lambda part: PartStart(checkpoint, layout, part)


def serve(order: Order) -> None:
    """Be the agent until the node, or on node 0 the job, is over."""
    given: AgentOrder = order.more
    os.environ.pop("FASTPS_TRACE", None)  # the home's lanes are not workers of the trace
    torch.set_num_threads(1)
    layout, compiled = with_rule(given.layout, given.rule)
    own, own_compiled = with_rule(order.layout, order.rule)
    memory = shared_memory.map_shared(order.memfd)
    store = Store(order.memfd, memory, own, order.job, order.timeout_s, SYSTEM_CLOCK, [])
    try:
        answer_as_server(store)
        _run(store, given, layout)
    except BaseException as error:
        store.arena.finish(store.arena.server_lane, f"{type(error).__name__}: {error}")
        raise
    finally:
        store.close()
        del compiled, own_compiled  # keep the rules' code alive until now


def _run(store: Store, given: AgentOrder, layout: Layout) -> None:
    trace = NodePart(given.trace, store, node_note(given.nodes, platform.node())) if given.trace is not None else None
    report = Report(store, given.nodes, given.workers, trace)
    report.start()
    try:
        if store.layout.server == "replica":
            _serve_node(store, *_replica(given, layout, store, report))
        else:
            upstream = _upstream(given, layout, store, report)
            kind = LocalLeaf if given.nodes.policy.local_steps else Leaf
            _serve_node(store, kind(store, given.nodes, upstream, report), upstream)
    finally:
        report.close()
        if trace is not None:
            trace.close()


def _serve_node(store: Store, leaf: Leaf | Replica, upstream: Upstream) -> None:
    failure: str | None = "its agent was interrupted"
    try:
        server = Server(store)
        server.folds = LeafFolds(store, server.lane, leaf)
        if not store.arena.serve(os.getpid()):
            raise Error(f"job {store.job}: expected to be its first agent, found that it has or had one")
        sys.stdin.read()  # until the creator answers, or has ended
        server.run()
        store.arena.finish(store.arena.server_lane)
        failure = None
    except Error as error:
        failure = str(error)
        raise
    finally:
        leaf.end(failure)
        upstream.leave(failure)


def main() -> int:
    """Read the order and serve. Returns the exit code."""
    # SLURM's scancel sends SIGTERM to every process, and the workers need this one to save.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(format="fastps: %(message)s", level=logging.WARNING)
    reserve_all()  # the port of a link that waits for its node is open to strangers, too
    return run_from_order(serve, "agent", (Error,))


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)  # threads that still wait for a lost link would abort the process while it is taken down
