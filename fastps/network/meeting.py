"""How the agents of a job find each other: a store at the rendezvous, in which each edge has a name.

The store is used to join and for nothing else: edges that are open do not need it.
"""

from datetime import timedelta
from typing import NoReturn

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from fastps.errors import AttachError, LayoutError
from fastps.job.layout import Layout, first_difference
from fastps.job.nodes import Nodes
from fastps.network.edge import Edge
from fastps.network.gloo import GlooLink, address_towards
from fastps.network.link import LinkLostError
from fastps.network.messages import Header, Kind
from fastps.system.clock import Clock

_OPEN_S = 60.0
_REFUSED = "refused: "


class Meeting:
    """One agent's side of the rendezvous of one job. `name` is the same on all nodes, and no other job of the launch has it.

    Raises AttachError if nothing answers at the rendezvous.
    """

    def __init__(self, of: Nodes, name: str, timeout_s: float, clock: Clock) -> None:
        self._of, self._name = of, name
        self._timeout_s = timeout_s
        self._clock = clock
        self._address = address_towards(of.host, of.port)

    def _store(self) -> Store:
        """A connection of its own, because a wait in one blocks all other calls on it."""
        limit = timedelta(seconds=self._timeout_s)
        try:
            store = TCPStore(self._of.host, self._of.port, is_master=False, wait_for_workers=False, timeout=limit)
        except RuntimeError as error:
            raise AttachError(
                f"node {self._of.number} found no rendezvous at {self._of.host}:{self._of.port} within {self._timeout_s:g} s"
                f" ({str(error).splitlines()[0]}): start node 0, and check the name, the port and the firewall"
            ) from error
        return PrefixStore(f"fastps/{self._name}", store)

    def show(self, layout: Layout) -> None:
        """Say at the rendezvous what the job is, so that a node with another model can say what differs."""
        self._store().set("layout", layout.text())

    def check(self, layout: Layout) -> None:
        """Raise LayoutError that names the first difference between this node's job and that of node 0."""
        store = self._store()
        try:
            found = store.get("layout").decode()
        except RuntimeError as error:
            raise AttachError(
                f"node {self._of.number} waited {self._timeout_s:g} s for node 0 to make its optimizer: start the script there"
            ) from error
        if found != layout.text():
            reason = (
                f"node {self._of.number} and node 0 describe different jobs: {first_difference(layout.text(), found)}; all"
                " nodes must build the same model, optimizer and discipline"
            )
            store.set(self._knock(self._of.number), _REFUSED + reason)  # node 0 need not wait
            raise LayoutError(reason)

    def reach(self) -> Edge:
        """Open an edge to the home. Raises LinkLostError."""
        store = self._store()
        store.set(self._knock(self._of.number), "0")
        return self._open(store, self._of.number, 1)

    def answer(self, node: int, layout: Layout) -> tuple[Edge, Header]:
        """Wait for a node, and open an edge to it. Returns its HELLO. Raises LinkLostError."""
        store = self._store()
        try:
            knock = store.get(self._knock(node)).decode()
        except RuntimeError as error:
            raise LinkLostError(
                f"it did not come within {self._timeout_s:g} s: start it, or give a smaller --nnodes"
            ) from error
        if knock.startswith(_REFUSED):
            raise LinkLostError(knock.removeprefix(_REFUSED))
        edge = self._open(store, node, 0)
        hello = edge.hear(_OPEN_S)
        if hello is None or hello.kind != Kind.HELLO or hello.layout != layout.digest():
            self._refuse(edge, "expected a HELLO of this job's layout first")
        elif hello.text != self._of.link_dtype:
            self._refuse(
                edge, f"node {node} has link_dtype {hello.text}, node 0 {self._of.link_dtype}: give the same everywhere"
            )
        assert hello is not None
        return edge, hello

    @staticmethod
    def _refuse(edge: Edge, reason: str) -> NoReturn:
        edge.say(Header(Kind.REFUSED, text=reason))
        edge.close()
        raise LinkLostError(reason)

    @staticmethod
    def _knock(node: int) -> str:
        """The key under which a node says that it is there, or why it is not."""
        return f"knock/{node}"

    def _open(self, store: Store, node: int, side: int) -> Edge:
        name = f"edge/{node}/0"
        control, data = (
            GlooLink(store, f"{name}/{part}", side, self._address, min(_OPEN_S, self._timeout_s))
            for part in ("control", "data")
        )
        return Edge(control, data, self._clock, self._of.timeout_s)
