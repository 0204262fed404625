"""How the agents of a job find each other: a store at the rendezvous, in which each edge has a name.

Agents use the store only to join. Open edges do not need it.
"""

import copy
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from fastps.errors import AttachError, LayoutError, NodeLostError
from fastps.job.layout import Layout, first_difference
from fastps.job.nodes import Nodes
from fastps.job.secret import secret_of_environment
from fastps.job.update_rules import Hyper
from fastps.network.addresses import own_address
from fastps.network.edge import Edge
from fastps.network.link import GlooLink, Link, LinkLostError, MismatchError, RefusedError, UnreachableError, reason_of
from fastps.network.messages import HEADER_BYTES, Header, Kind, hello_fault
from fastps.network.presence import of_launch, reported
from fastps.network.secret import EdgeName, mac, prove, refuse
from fastps.network.tcp_store import OpenPort, check_answers, connect_store, is_refused
from fastps.system.clock import Clock
from fastps.system.deadline import Deadline
from fastps.system.time_limit import call_within

logger = logging.getLogger("fastps.network")
OPEN_S = 60.0  # the longest time that the first edge of a node takes to open
_OPEN_SHARE = 0.9  # a home that does not come is told from a network that is cut
_POLL_NS = 10_000_000
_LAYOUT_S = 1.0  # between two looks whether node 0 still runs
_PROBE_S = 0.2
LARGEST_MESSAGE = 16 << 20  # a chunk, or the terms of a sum, which are longer only for millions of parameters


class Rendezvous:
    """One agent's side of the rendezvous of one job. `name` is the same on all nodes, and no other job of the launch has it.

    Raises AttachError if no interface leads there, and UsageError for a public address that the user does not trust.
    """

    def __init__(self, nodes: Nodes, name: str, layout: Layout, timeout_s: float, clock: Clock) -> None:
        self.nodes, self.clock = nodes, clock
        self.layout = layout  # what the home holds
        self._name = name
        self._timeout_s = timeout_s
        self._address = own_address(nodes.host, nodes.port, nodes.interface, nodes.trusts_network)
        self._secret = secret_of_environment()
        self._port = OpenPort(self._address)

    def holding(self, layout: Layout) -> "Rendezvous":
        """The same for edges to a home that holds `layout`."""
        found = copy.copy(self)
        found.layout = layout
        return found

    def store(self, timeout_s: float | None = None) -> Store:
        """A new connection, because a wait blocks all other calls on its connection. Raises NodeLostError."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            return PrefixStore(f"fastps/{self._name}", connect_store(self.nodes.host, self.nodes.port, limit_s))
        except AttachError as error:
            raise NodeLostError(str(error), 0) from error

    def publish(self, hypers: Sequence[Hyper]) -> None:
        """Publish node 0's description of the job, so that another node can name what differs."""
        store = self.store()
        self._publish_port(store)
        store.set("policy", json.dumps(asdict(self.nodes.policy)))
        store.set("hypers", json.dumps({group: hyper._asdict() for group, hyper in enumerate(hypers)}))
        store.set("layout", self.layout.text())

    def check(self, hypers: Sequence[Hyper]) -> None:
        """Compare this node's description of the job with node 0's. Raises LayoutError that names the first difference.

        Hyper-parameters may differ, because each push has its own: a schedule may be further in a node that joins late.
        """
        store, layout = self.store(), self.layout
        self._publish_port(store)
        self._await_layout(store)
        found, policy = store.get("layout").decode("utf-8", "replace"), _table_of(store.get("policy"))
        differences = [
            f"here {key} is {own}, there it is {policy.get(key)}"
            for key, own in asdict(self.nodes.policy).items()
            if policy.get(key) != own
        ]
        if found != layout.text():
            differences.append(first_difference(layout.text(), found))
        if differences:
            reason = (
                f"node {self.nodes.number} and node 0 describe different jobs: {differences[0]}; all nodes must build the same"
                " model, optimizer and discipline, with the same options of fastps run"
            )
            store.set(_refused_key(self.nodes.number), reason)  # so that node 0 does not wait
            raise LayoutError(reason)
        self._warn_of_hypers(hypers, _table_of(store.get("hypers")))

    def _await_layout(self, store: Store) -> None:
        """Wait for node 0's description of the job. Raises NodeLostError if it does not come in time, or node 0 has ended."""
        number, deadline = self.nodes.number, Deadline(self.clock.now_ns(), int(self._timeout_s * 1e9))
        while not deadline.is_over(self.clock.now_ns()):
            try:
                store.wait(["layout"], timedelta(seconds=_LAYOUT_S))
                return
            except RuntimeError:
                pass
            try:
                end = reported(of_launch(store), 0)
            except RuntimeError as error:
                raise NodeLostError(f"node {number} lost the rendezvous before node 0 had made its optimizer", 0) from error
            if end is not None:
                raise NodeLostError(f"node 0 ended before it had made its optimizer: {end.reason or 'its script has none'}", 0)
        raise NodeLostError(
            f"node {number} waited {self._timeout_s:g} s for node 0 to make its optimizer: start the script there", 0
        )

    def _warn_of_hypers(self, hypers: Sequence[Hyper], theirs: dict[str, object]) -> None:
        for group, hyper in enumerate(hypers):
            there = theirs.get(str(group))
            for name, own in hyper._asdict().items():
                if isinstance(there, dict) and there.get(name) != own:
                    logger.warning(
                        "node %d begins with %s %s in parameter group %d, and node 0 with %s: each push is folded with its own;"
                        " give all nodes the same optimizer, unless this node joins a job whose schedule is further",
                        *(self.nodes.number, name, own, group, there.get(name)),
                    )

    @property
    def address(self) -> str:
        """The address at which this node's agent listens."""
        return self._address

    def group_name(self, nonce: int) -> str:
        """The name of a group of all nodes, which a node without the job's secret cannot know."""
        return f"group/{nonce if self._secret is None else mac(self._secret, self._name, 'group', nonce)}"

    def _publish_port(self, store: Store) -> None:
        store.set(_port_key(self.nodes.number), json.dumps([self._address, self._port.number]))

    def end_of(self, store: Store, node: int) -> Callable[[], bool] | None:
        """A function that says whether a node's agent has ended; None if its port is not known, or cannot be reached now."""
        try:
            host, port = json.loads(store.get(_port_key(node))) if store.check([_port_key(node)]) else ("", 0)
        except (RuntimeError, ValueError):
            host, port = "", 0
        if not (isinstance(host, str) and host and isinstance(port, int)) or is_refused(host, port, _PROBE_S):
            return None
        return lambda: is_refused(host, port, _PROBE_S)

    def connect(self, hello: Header, *, is_first: bool) -> tuple[Edge, Header]:
        """Open an edge to the home and say HELLO. Returns the edge and the home's answer.

        Raises UnreachableError if the rendezvous does not answer, RefusedError if it has ended or the home refuses, and another
        LinkLostError if the home does not answer, or if the edge is lost while it opens.
        """
        timeout_s = open_s(self.nodes, 1 if is_first else 2)
        try:
            return call_within(timeout_s, lambda: self._connect(hello, timeout_s), discard=lambda late: late[0].abandon())
        except TimeoutError as error:
            raise UnreachableError(f"{self.nodes.host}:{self.nodes.port} did not answer within {timeout_s:g} s") from error

    def _connect(self, hello: Header, timeout_s: float) -> tuple[Edge, Header]:
        check_answers(self.nodes.host, self.nodes.port, timeout_s)
        node = self.nodes.number
        try:
            store = self.store(timeout_s)
            epoch = int(store.add(epoch_key(node), 1))
        except (NodeLostError, RuntimeError) as error:
            raise UnreachableError(reason_of(error)) from error
        edge = self.open(store, node, epoch, 1, _OPEN_SHARE * timeout_s)
        try:
            self.prove(edge, node, epoch, timeout_s, is_home=False)
            edge.send_header(replace(hello, kind=Kind.HELLO, layout=self.layout.digest(), weight=self.nodes.local_workers))
            answer = edge.next_header(timeout_s)
            edge.is_over = self.end_of(store, 0)
        except BaseException:
            edge.abandon()
            raise
        if answer is None or answer.kind not in (Kind.WELCOME, Kind.RESUME):
            edge.abandon()
            if answer is None:
                raise LinkLostError(f"node 0 did not answer within {timeout_s:g} s")
            raise (MismatchError if answer.kind == Kind.REFUSED else RefusedError)(answer.reason)
        return edge, answer

    def prove(self, edge: Edge, node: int, epoch: int, timeout_s: float, *, is_home: bool) -> None:
        """If the job has a secret, let both sides of an edge prove that they know it. Raises LinkLostError, MismatchError."""
        name = EdgeName(self._name, node, epoch, self.layout.digest())
        prove(edge, self._secret, name, is_home=is_home, timeout_s=timeout_s)

    def open(self, store: Store, node: int, epoch: int, side: int, timeout_s: float) -> Edge:
        """Open one side of an edge: 0 for the home, 1 for the node. Raises LinkLostError."""
        name = f"edge/{node}/{epoch}"
        control = self._link(store, f"{name}/control", side, timeout_s, HEADER_BYTES)
        try:
            data = self._link(store, f"{name}/data", side, timeout_s, LARGEST_MESSAGE)
        except BaseException:
            control.close()
            raise
        return Edge(control, data, self.nodes.policy.timeout_s)

    def _link(self, store: Store, name: str, side: int, timeout_s: float, largest: int) -> Link:
        if self.nodes.policy.link == "gloo":
            return GlooLink(store, name, side, self._address, timeout_s)
        from fastps.network.zeromq_link import ZeromqLink  # here because pyzmq is optional, and takes time to import

        return ZeromqLink(store, f"{self._name}/{name}", side, self._address, timeout_s, secret=self._secret, largest=largest)


class Requests:
    """The requests of one node for an edge. Every request has an epoch: the number of edges that the node has asked for."""

    def __init__(self, rendezvous: Rendezvous, node: int) -> None:
        self._rendezvous, self._node = rendezvous, node
        self._store: Store | None = None
        self.epoch = 0  # of the last request
        self.have_ended = False  # whether no request can come any more, because the rendezvous has ended
        self._is_first = True  # until it is known that the node, or its launcher, has ended before its first request

    def next(self, timeout_s: float, is_over: Callable[[], bool]) -> tuple[Edge, Header]:
        """Wait for a request, and open the edge. Returns the node's HELLO.

        Raises LinkLostError after the timeout, if `is_over` becomes true, or if the edge cannot be opened.
        """
        clock = self._rendezvous.clock
        deadline = Deadline(clock.now_ns(), int(timeout_s * 1e9))
        while (found := self._ask()) is None:
            if is_over() or deadline.is_over(clock.now_ns()):
                raise LinkLostError(f"it did not come within {timeout_s:g} s: start it, or give a smaller --nnodes")
            clock.sleep_ns(_POLL_NS)
        epoch, store = found
        self.epoch = epoch
        # Shorter than the node waits: an edge that the node has given up must not keep this side from its next request.
        limit_s = open_s(self._rendezvous.nodes, epoch) / 2
        edge = self._rendezvous.open(store, self._node, epoch, 0, limit_s)
        try:
            self._rendezvous.prove(edge, self._node, epoch, limit_s, is_home=True)
            hello = edge.next_header(limit_s)
            if hello is None:  # no refusal: a node on a busy machine asks again
                raise LinkLostError(f"it did not say within {limit_s:g} s which node it is")
            edge.is_over = self._rendezvous.end_of(store, self._node)
            if fault := hello_fault(hello, self._rendezvous.layout.digest()):
                refuse(edge, fault)
        except LinkLostError:
            edge.abandon()
            raise
        return edge, hello

    def end_of_node(self) -> Callable[[], bool] | None:
        """See Rendezvous.end_of."""
        return None if self._store is None else self._rendezvous.end_of(self._store, self._node)

    def _ask(self) -> tuple[int, Store] | None:
        """A new request's epoch, and the store. Raises LinkLostError if the node refuses, or the rendezvous has ended."""
        if self._store is None:
            try:
                self._store = self._rendezvous.store()
            except (NodeLostError, RuntimeError) as error:
                self.have_ended = True
                raise LinkLostError(f"the rendezvous has ended: {reason_of(error)}") from error
        store = self._store
        try:
            if self.epoch == 0 and self._is_first:
                self._check_that_it_may_come(store)
            epoch = int(store.add(epoch_key(self._node), 0))
        except RuntimeError:  # the connection was reset
            self._store = None
            return None
        return (epoch, store) if epoch > self.epoch else None

    def _check_that_it_may_come(self, store: Store) -> None:
        """Raise LinkLostError, once, if the node has refused the job or has ended."""
        reason = ""
        if store.check([_refused_key(self._node)]):
            reason = store.get(_refused_key(self._node)).decode("utf-8", "replace")
        elif end := reported(of_launch(store), self._node):
            reason = end.reason or "its script ended without an optimizer"
        if reason:
            self._is_first = False
            raise LinkLostError(reason)


def _table_of(data: bytes) -> dict[str, object]:
    """The table in a record of JSON; an empty one for other bytes, which another version or another program may have left."""
    try:
        return dict(json.loads(data))
    except (TypeError, ValueError):
        return {}


def open_s(nodes: Nodes, epoch: int) -> float:
    """The longest time that an edge takes to open: the first may wait for a busy machine, the others repair a running job."""
    return OPEN_S if epoch <= 1 else nodes.policy.timeout_s / 2


def epoch_key(node: int) -> str:
    """The key at which a node counts the edges that it has asked for."""
    return f"epoch/{node}"


def _port_key(node: int) -> str:
    return f"port/{node}"


def _refused_key(node: int) -> str:
    return f"refused/{node}"
