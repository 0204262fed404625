"""Nodes introduce themselves before a job: another version, a firewall and an unreachable address are named on every node."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from fastps.errors import AttachError, NodeLostError
from fastps.network.meeting import await_keys, introduce
from fastps.network.tcp_store import connect_store
from fastps.system.ports import free_port
from tests.network.conftest import both
from tests.support import nodes

Connect = Callable[[], Store]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes connections to one store; a wait blocks all other calls on its connection."""
    with nodes.rendezvous() as port:
        yield lambda: PrefixStore("a", connect_store("127.0.0.1", port, 20.0))


def _introduce(store: Store, node: int, address: str) -> Any:
    """What a node of three learns of the others, or its error."""
    try:
        return introduce(store, node, 3, address, 20.0)
    except AttachError as error:
        return error


def test_nodes_learn_of_each_other(connect: Connect) -> None:
    found = both(lambda node: _introduce(connect(), node, f"127.0.0.{1 + node}"), 3)
    assert [[each.address for each in met] for met in found] == [["127.0.0.1", "127.0.0.2", "127.0.0.3"]] * 3
    assert [[each.number for each in met] for met in found] == [[0, 1, 2]] * 3


@pytest.mark.parametrize(("changes", "message"), [
    ({"version": "0.0.1 (1)"}, "has 0.0.1 (1): expected one version; install the same"),
    ({"version": "9.0 (1)", "of_later_versions": 1}, "has 9.0 (1): expected one version; install the same"),
    ({"port": 0}, "although the rendezvous answers: a firewall is between them"),
    ({"address": "10.0.0.2"}, "listens at a loopback address, which no other machine reaches"),
])  # fmt: skip
def test_what_is_between_two_nodes_is_named_on_all(connect: Connect, changes: dict[str, Any], message: str) -> None:
    """Node 1 is played: it says something of itself that is not so."""

    def play(node: int) -> Any:
        store = connect()
        if node != 1:
            return _introduce(store, node, "127.0.0.1")
        said = {"number": 1, "version": "", "machine": "played", "address": "127.0.0.1", "port": free_port()}
        store.wait(["introduction/0"])
        said["version"] = json.loads(store.get("introduction/0"))["version"]
        said |= {"port": free_port()} if changes == {"port": 0} else changes
        store.set("introduction/1", json.dumps(said))
        store.set("introduced/1", "")
        store.set("has read/1", "")
        return None

    found = both(play, 3)
    assert isinstance(found[0], AttachError) and isinstance(found[2], AttachError)
    assert str(found[0]) == str(found[2])
    assert message in str(found[0])
    assert "node 0 (" in str(found[0])


def test_a_node_that_does_not_come_is_counted(connect: Connect) -> None:
    store = connect()
    store.set("x", "")
    with pytest.raises(NodeLostError, match=r"node 0 waited 0\.5 s for 1 of 2 nodes: start them"):
        await_keys(store, ["x", "y"], 0.5, 0)
