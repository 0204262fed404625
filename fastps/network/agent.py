"""A node's agent: the server of the node's leaf arena, and the only process of the node that talks to other nodes.

On node 0 it also has the home arena. Worker 0 of each node starts it as `python -m fastps.network.agent`. It serves once the
nodes have met and this node has the first weights, and it ends when the node's workers have left, and on node 0 when all nodes
have.
"""

import logging
import os
import pickle
import sys
from dataclasses import dataclass, replace
from functools import partial

import torch

from fastps.errors import Error, NodeLostError
from fastps.job.layout import Layout
from fastps.job.nodes import Nodes
from fastps.job.update_rules import Hyper
from fastps.kernels.shm.arena import LANE_DEAD, LANE_FAILED, LANE_FREE, LANE_JOINING, LANE_LIVE
from fastps.membership.job_memory import JobMemory
from fastps.network.home import Home
from fastps.network.leaf import FarHome, Leaf, NearHome, Upstream
from fastps.network.link import LinkLostError
from fastps.network.meeting import Meeting
from fastps.network.messages import Header, Kind
from fastps.network.serving import Serving
from fastps.store.server_loop import Server, answer_as_server
from fastps.store.server_process import AgentPlan, Order, picklable
from fastps.store.store import Store
from fastps.system import shared_memory
from fastps.system.clock import SYSTEM_CLOCK

logger = logging.getLogger("fastps.network")
_POLL_NS = 1_000_000


@dataclass(frozen=True)
class AgentOrder:
    """What an agent is told: the nodes, the job's name between them, the home's layout and first hyper-parameters.

    `rule` is a user rule, pickled by value; empty for a built-in rule.
    """

    of: Nodes
    name: str
    layout: Layout
    rule: bytes
    hypers: list[Hyper]


def plan_of(of: Nodes, name: str, layout: Layout, hypers: list[Hyper]) -> AgentPlan:
    """The plan by which a leaf's store starts its agent. `layout` is the home's."""
    plain, rule = picklable(layout)
    return AgentPlan(__name__, AgentOrder(of, name, plain, rule, list(hypers)))


class AgentServer(Server):
    """The loop of a leaf's server: it folds by a journey to the home, and ends with the home or with a worker."""

    def __init__(self, store: Store, leaf: Leaf) -> None:
        super().__init__(store)
        self._leaf = leaf
        self.lane.fold_with(leaf.fold, [0], nothing=True)
        self._has_finished = False

    def _combine(self) -> None:
        super()._combine()
        if not self._has_finished and self._is_done():
            self._has_finished = True
            self._finish()

    def _is_done(self) -> bool:
        """Whether every worker of this node has left, and everything that it pushed is folded."""
        states = self._arena.lane_states()[: self._store.layout.lanes]
        if any(state in (LANE_FREE, LANE_JOINING, LANE_LIVE) for state in states[: self._store.layout.workers]):
            return False
        counted = [self._arena.counters(lane) for lane in range(len(states))]
        return all(each["done"] >= each["posted"] for each in counted)

    def _finish(self) -> None:
        """Wait until the other nodes have left, too, and publish the final weights for workers that wait for them."""
        while not self.lane.hold(0):
            self._clock.sleep_ns(_POLL_NS)
        weights, state = self.lane.spare(0)
        try:
            self._leaf.finish(weights, state)
        finally:
            self.lane.release(True, 0, self._clock.now_ns())
        self._arena.finish(self.lane.index)

    def _look(self, now_ns: int) -> None:
        super()._look(now_ns)
        self._leaf.upstream.check()
        states = self._arena.lane_states()[: self._store.layout.lanes]
        if not self._store.layout.faults.continues and (lost := self._lost_worker(states)) >= 0:
            of = self._leaf.of
            reason = self._arena.failure(lost) or "its process is gone"
            raise NodeLostError(f"node {of.number}: worker {lost} of {of.local_workers} failed: {reason}", of.number)

    def _lost_worker(self, states: bytes) -> int:
        """A worker that failed or died; -1 if none has."""
        gone = [lane for lane, state in enumerate(states) if state in (LANE_FAILED, LANE_DEAD)]
        return gone[0] if gone else next((lane for lane, _ in self._peers.dismissed()), -1)


def _upstream(order: AgentOrder, layout: Layout, leaf: JobMemory) -> Upstream:
    """Meet the other nodes. Returns once this node has the first weights."""
    of = order.of
    meeting = Meeting(of, order.name, leaf.timeout_s, leaf.clock)
    if of.is_home:
        home = Home.create(layout, of, leaf, order.hypers)
        others = [Serving(home, node, partial(meeting.answer, node, layout)) for node in range(1, of.count)]
        near = NearHome(leaf, home, others)
        for serving in others:
            serving.start()
        meeting.show(layout)
        return near
    meeting.check(layout)
    try:
        edge = meeting.reach()
        far = FarHome(leaf, layout, of, edge)
        far.begin(Header(Kind.HELLO, of.number, weight=of.local_workers, layout=layout.digest(), text=of.link_dtype))
    except LinkLostError as error:
        raise NodeLostError(f"node {of.number} could not join node 0 at {of.host}:{of.port}: {error}", 0) from error
    return far


def serve(order: Order) -> None:
    """Be the agent until the node, or on node 0 the job, is over."""
    told: AgentOrder = order.agent
    os.environ.pop("FASTPS_TRACE", None)  # the leaf's workers record; the home's lanes are not theirs
    torch.set_num_threads(1)
    layout, compiled = told.layout, None
    if told.rule:
        from fastps.kernels.update import jit

        compiled = jit.compile_rule(*pickle.loads(told.rule))  # our own parent's
        layout = replace(layout, rule=replace(layout.rule, address=compiled.address))
    store = Store(
        order.memfd, shared_memory.map_shared(order.memfd), order.layout, order.job, order.timeout_s, SYSTEM_CLOCK, []
    )
    try:
        answer_as_server(store)
        try:
            upstream = _upstream(told, layout, store)
            failure: str | None = "its agent ended"
            try:
                server = AgentServer(store, Leaf(store, told.of, upstream))
                if not store.arena.serve(os.getpid()):
                    raise Error(f"job {order.job}: expected to be its first agent, found that it has or had one")
                sys.stdin.read()  # until the creator answers, or has ended
                server.run()
                failure = None
            except Error as error:
                failure = str(error)
                raise
            finally:
                if failure is None:
                    store.arena.finish(store.arena.server_lane)
                upstream.leave(failure)
        except BaseException as error:
            store.arena.finish(store.arena.server_lane, f"{type(error).__name__}: {error}")
            raise
    finally:
        store.close()
        del compiled  # keeps the rule's code alive until now


def main() -> int:
    """Read the order and serve. Returns the exit code."""
    logging.basicConfig(format="fastps: %(message)s", level=logging.WARNING)
    order: Order = pickle.load(sys.stdin.buffer)  # our own parent's
    try:
        serve(order)
    except Error as error:
        print(f"fastps agent of job {order.job}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
