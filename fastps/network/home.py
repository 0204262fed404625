"""The home: the arena whose workers are nodes, and a thread for each node that pushes and pulls in its name.

The arena is an ordinary store, so the compiled scheduler decides between nodes as it does between workers. A node's lane
belongs to the thread that serves its edge: it receives the node's sum straight into the lane's slot, posts it, waits for the
grant, and sends the weights from the pinned buffer.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from fastps.errors import Error, NodeLostError
from fastps.job.layout import Layout
from fastps.job.nodes import Nodes
from fastps.job.update_rules import Hyper
from fastps.membership.job_memory import JobMemory, Views
from fastps.network.edge import Edge, chunks_of
from fastps.network.link import LinkLostError, Memory
from fastps.network.messages import Header, Kind
from fastps.network.sums import payload_bytes, unpack
from fastps.store.store import Store
from fastps.store.worker import Worker

logger = logging.getLogger("fastps.network")
_HEAR_S = 1.0


class _Lane(Worker):
    """A Worker whose waits also call `check`, which raises what ends the wait."""

    check: Callable[[], None] | None = None

    def _look(self, now_ns: int) -> None:
        if self.check is not None:
            self.check()
        super()._look(now_ns)


class HomeStore(Store):
    """The home arena of a job, in the process of node 0's agent."""

    worker_class = _Lane


@dataclass
class Home:
    """The home arena and its lanes."""

    store: HomeStore
    of: Nodes
    edges: list["Serving"] = field(default_factory=list)

    @staticmethod
    def create(layout: Layout, of: Nodes, leaf: JobMemory, hypers: list[Hyper]) -> "Home":
        """Make the arena, with the weights of the leaf's version 0."""

        def write(views: Views) -> None:
            for view, first in zip(views, leaf.weight_views(0), strict=True):
                view[:] = first

        job = f"{leaf.job}.home"
        made = HomeStore.create_for(layout, write, hypers, job=job, timeout_s=leaf.timeout_s, clock=leaf.clock)
        return Home(cast(HomeStore, made), of)

    def attach(self, node: int) -> Worker:
        """Take a node's lane. Raises AttachError."""
        return self.store.attach(node)

    def loss_of(self, error: Error) -> NodeLostError:
        """The error that ends the job on this node, by the node that failed first."""
        arena = self.store.arena
        failed = next((lane for lane in range(self.of.count) if arena.failure(lane)), -1)
        text = arena.failure(failed) if failed >= 0 else str(error)
        return NodeLostError(text.partition(": ")[2] or text if failed >= 0 else text, failed)

    def await_nodes(self) -> None:
        """Wait until every node has left or is lost."""
        for serving in self.edges:
            serving.join()

    def close(self) -> None:
        """Release the arena."""
        self.store.close()


def gradient_of(worker: Worker, lane: int) -> Memory:
    """All bytes of the slot of the worker's next push."""
    store = worker.store
    offset = store.arena.gradient_offset(lane, worker.lane.slot)
    return np.frombuffer(store.memory, np.uint8, 4 * store.layout.buffer_floats, offset)


def weight_parts(store: JobMemory, buffers: Sequence[int], shards: Sequence[tuple[int, int]]) -> list[Memory]:
    """The floats of the shards, each from its buffer, in order and in the parts in which they travel."""
    parts = []
    for (first, last), buffer in zip(shards, buffers, strict=True):
        begin = store.arena.weights_offset(buffer) + 4 * first
        parts += chunks_of(np.frombuffer(store.memory, np.uint8, 4 * (last - first), begin))
    return parts


def push_scale(worker: Worker, weight: int, within: str) -> float:
    """The factor of a node's sum where a version is not a mean of several pushes: the mean of its gradients, or their sum."""
    return 1.0 if worker.store.layout.policy.is_mean or within == "asp" else 1.0 / max(1, weight)


class Serving(threading.Thread):
    """The thread that serves one node: it opens the edge with `connect`, and ends when the node has left or is lost."""

    def __init__(self, home: Home, node: int, connect: Callable[[], tuple[Edge, Header]]) -> None:
        super().__init__(name=f"fastps-node-{node}", daemon=True)
        self._home, self._node = home, node
        self._connect = connect
        self._groups, self._parameters = home.store.layout.groups, len(home.store.layout.parameters)

    def run(self) -> None:
        """See threading.Thread."""
        worker: Worker | None = None
        edge: Edge | None = None
        failure: str | None = None
        try:
            edge, hello = self._connect()
            worker = self._home.attach(self._node)
            cast(_Lane, worker).check = edge.check
            logger.info("node %d joined with %d workers", self._node, hello.weight)
            self._send_weights(edge, worker, Kind.WELCOME)
            while self._serve(edge, worker):
                pass
        except LinkLostError as error:
            failure = (edge.failure if edge is not None else "") or f"node {self._node} was lost: {error}"
        except Error as error:
            failure = f"node {self._node}: {type(error).__name__}: {error}"
        self._end(edge, worker, failure)

    def _end(self, edge: Edge | None, worker: Worker | None, failure: str | None) -> None:
        """Give the lane back, and tell the node why if it can still hear."""
        if failure is not None:
            logger.warning("%s", failure)
        try:
            if worker is not None:
                worker.close(failure and f"{NodeLostError.__name__}: {failure}")
            elif failure is not None:
                self._home.store.arena.finish(self._node, f"{NodeLostError.__name__}: {failure}")
        except Error as error:
            failure = failure or str(error)
        if edge is not None:
            if failure:
                with contextlib.suppress(LinkLostError):
                    edge.say(Header(Kind.FAILED, text=self._reason(failure)))
            edge.close()

    def _reason(self, failure: str) -> str:
        return str(self._home.loss_of(NodeLostError(failure, self._node)))

    def _serve(self, edge: Edge, worker: Worker) -> bool:
        """Serve one message. Returns whether another may follow."""
        header = edge.hear(_HEAR_S)
        if header is None:
            worker.look_around()
            return True
        if header.kind == Kind.LEAVE:
            worker.wait_for_others()
            self._send_weights(edge, worker, Kind.WEIGHTS)
            return False
        if header.kind == Kind.FAILED:
            raise LinkLostError(header.text)
        if header.kind == Kind.NULL:
            worker.push(self._home.store.hypers, null=True)
        elif header.kind == Kind.PUSH:
            self._push(edge, worker, header)
        else:
            raise LinkLostError(f"node {self._node} sent {header.kind.name}, which no leaf sends")
        worker.advance()
        worker.pull()
        self._send_weights(edge, worker, Kind.WEIGHTS)
        return True

    def _push(self, edge: Edge, worker: Worker, header: Header) -> None:
        """Receive a sum into the lane's slot, and post it."""
        terms = np.zeros(payload_bytes(self._groups, self._parameters), np.uint8)
        slot = gradient_of(worker, self._node)
        edge.receive([terms, *chunks_of(slot)])
        found = unpack(terms.tobytes(), self._groups, self._parameters)
        post(worker, found.hypers, found.presence, header, self._home.of.within)

    def _send_weights(self, edge: Edge, worker: Worker, kind: Kind) -> None:
        edge.say(Header(kind, node=0, step=worker.steps, version=worker.version))
        edge.send(weight_parts(worker.store, worker.buffers, worker.store.layout.shards))


def post(worker: Worker, hypers: list[Hyper], presence: bytes, header: Header, within: str) -> None:
    """Post the sum that lies in the lane's slot."""
    worker.lane.weight = header.weight
    worker.loss = header.loss
    scale = push_scale(worker, header.weight, within)
    worker.push(hypers, presence=presence, scale=scale, samples=header.samples)
