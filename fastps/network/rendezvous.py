"""How the agents of a job find each other: a store at the rendezvous, in which each edge has a name.

Agents use the store only to join. Open edges do not need it.
"""

import json
from dataclasses import asdict
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from fastps.errors import AttachError, LayoutError
from fastps.job.layout import Layout, first_difference
from fastps.job.nodes import Nodes
from fastps.network.addresses import own_address
from fastps.network.awaiting import await_answer
from fastps.network.edge import Edge
from fastps.network.gloo import GlooLink, reason_of
from fastps.network.link import LinkLostError
from fastps.network.messages import Header, Kind

_OPEN_S = 60.0
_REFUSED = "refused: "


class Rendezvous:
    """One agent's side of the rendezvous of one job. `name` is the same on all nodes, and no other job of the launch has it.

    Raises AttachError if no interface leads there, and UsageError for a public address that the user does not trust.
    """

    def __init__(self, nodes: Nodes, name: str, timeout_s: float) -> None:
        self._nodes, self._name = nodes, name
        self._timeout_s = timeout_s
        self._address = own_address(nodes.host, nodes.port, nodes.interface, nodes.trusts_network)

    def _store(self) -> Store:
        """A new connection, because a wait blocks all other calls on its connection. Raises AttachError."""
        store = connect_store(self._nodes.host, self._nodes.port, self._timeout_s)
        return PrefixStore(f"fastps/{self._name}", store)

    def publish(self, layout: Layout) -> None:
        """Publish node 0's description of the job, so that another node can name what differs."""
        store = self._store()
        store.set("policy", json.dumps(asdict(self._nodes.policy)))
        store.set("layout", layout.text())

    def check(self, layout: Layout) -> None:
        """Compare this node's description of the job with node 0's. Raises LayoutError that names the first difference."""
        store = self._store()
        try:
            found, policy = store.get("layout").decode(), json.loads(store.get("policy"))
        except RuntimeError as error:
            raise AttachError(
                f"node {self._nodes.number} waited {self._timeout_s:g} s for node 0 to make its optimizer: start the script"
                " there"
            ) from error
        differences = [
            f"here {key} is {own}, there it is {policy[key]}" for key, own in self._own_policy() if policy[key] != own
        ]
        if found != layout.text():
            differences.append(first_difference(layout.text(), found))
        if differences:
            reason = (
                f"node {self._nodes.number} and node 0 describe different jobs: {differences[0]}; all nodes must build the same"
                " model, optimizer and discipline, with the same options of fastps run"
            )
            store.set(_request_key(self._nodes.number), _REFUSED + reason)  # so that node 0 does not wait
            raise LayoutError(reason)

    def _own_policy(self) -> list[tuple[str, object]]:
        return list(asdict(self._nodes.policy).items())

    def connect(self, layout: Layout) -> Edge:
        """Open an edge to the home, and say HELLO. Raises LinkLostError."""
        store = self._store()
        store.set(_request_key(self._nodes.number), "")
        edge = self._open(store, self._nodes.number, 1)
        edge.send_header(Header(Kind.HELLO, weight=self._nodes.local_workers, layout=layout.digest()))
        return edge

    def accept(self, node: int, layout: Layout) -> tuple[Edge, Header]:
        """Wait for a node, and open an edge to it. Returns its HELLO. Raises LinkLostError."""
        store = self._store()
        try:
            request = store.get(_request_key(node)).decode()
        except RuntimeError as error:
            raise LinkLostError(
                f"it did not come within {self._timeout_s:g} s: start it, or give a smaller --nnodes"
            ) from error
        if request.startswith(_REFUSED):
            raise LinkLostError(request.removeprefix(_REFUSED))
        edge = self._open(store, node, 0)
        hello = edge.next_header(_OPEN_S)
        if hello is None or hello.kind != Kind.HELLO or hello.layout != layout.digest():
            reason = "expected a HELLO of this job's layout first"
            edge.send_header(Header(Kind.REFUSED, text=reason))
            edge.close()
            raise LinkLostError(reason)
        return edge, hello

    def _open(self, store: Store, node: int, side: int) -> Edge:
        timeout_s = min(_OPEN_S, self._timeout_s)
        control, data = (GlooLink(store, f"edge/{node}/{part}", side, self._address, timeout_s) for part in ("control", "data"))
        return Edge(control, data, self._nodes.policy.timeout_s)


def _request_key(node: int) -> str:
    """The key at which a node asks for an edge, or says why it does not."""
    return f"request/{node}"


def connect_store(host: str, port: int, timeout_s: float) -> Store:
    """A connection to the store at the rendezvous. Raises AttachError if nothing answers within the timeout."""
    limit = timedelta(seconds=timeout_s)
    reason = await_answer(host, port, timeout_s)  # torch waits longer and longer between two tries
    if not reason:
        try:
            return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
        except RuntimeError as error:
            reason = reason_of(error)
    raise AttachError(
        f"no rendezvous answered at {host}:{port} within {timeout_s:g} s ({reason}): start node 0 there, and check the name,"
        " the port and the firewall"
    )
