"""Agents open edges at the rendezvous: an edge that is lost meanwhile may be asked for again, a refusal is final."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import TCPStore

from fastps.job.layout import Layout, place
from fastps.job.nodes import Nodes
from fastps.job.options import NodePolicy
from fastps.job.specs import parse_policy
from fastps.job.update_rules import SGD, Hyper
from fastps.network.edge import Edge
from fastps.network.link import LinkLostError, RefusedError, UnreachableError
from fastps.network.messages import Header, Kind
from fastps.network.rendezvous import Rendezvous, Requests, epoch_key
from fastps.system.clock import SYSTEM_CLOCK
from fastps.system.ports import free_port

HELLO = Header(Kind.HELLO, incarnation=7)


def _layout(length: int = 4) -> Layout:
    return Layout(place([("w", (length,), (1,), 0)], 1), 1, SGD(lr=0.1).rule, parse_policy("bsp"), 2)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setenv("RES_OPTIONS", "timeout:1 attempts:1")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store  # ends the server


def _side(port: int, node: int, length: int = 4, timeout_s: float = 60.0) -> Rendezvous:
    """One agent's side. An edge may take half of the timeout to open: torch's store may wait for a name server."""
    nodes = Nodes(2, node, 0, 1, "127.0.0.1", port, NodePolicy(timeout_s=timeout_s))
    return Rendezvous(nodes, "job", _layout(length), 10.0, SYSTEM_CLOCK)


def _requests(port: int, length: int = 4, timeout_s: float = 60.0) -> Requests:
    """The requests of node 1 that come from now on."""
    home = _side(port, 0, length, timeout_s)
    found = Requests(home, 1)
    found.epoch = int(home.store(60.0).add(epoch_key(1), 0))
    return found


def _answer(requests: Requests, give: Callable[[Edge], Any]) -> None:
    edge, _ = requests.next(10.0, lambda: False)
    give(edge)
    edge.abandon()


def _connected(port: int, give: Callable[[Edge], Any], length: int = 4) -> Header:
    """What a node hears that asks for an edge, from a home that does `give` with it."""
    with ThreadPoolExecutor(1) as pool:
        home = pool.submit(_answer, _requests(port, length), give)
        try:
            edge, answer = _side(port, 1).connect(HELLO, is_first=False)
            edge.abandon()
            return answer
        finally:
            home.exception()


def test_home_answers(port: int) -> None:
    assert _connected(port, lambda edge: edge.send_header(Header(Kind.WELCOME, lane=3))).lane == 3


@pytest.mark.parametrize("kind", [Kind.REFUSED, Kind.FAILED])
def test_refusal_is_final(port: int, kind: Kind) -> None:
    with pytest.raises(RefusedError, match="no room here"):
        _connected(port, lambda edge: edge.send_header(Header(kind, text="no room here")))


def test_home_with_another_layout_refuses(port: int) -> None:
    with pytest.raises(RefusedError, match="layout"):
        _connected(port, lambda edge: None, length=5)


@pytest.mark.slow
def test_edge_that_is_lost_while_it_opens_may_be_asked_for_again(port: int) -> None:
    with pytest.raises(LinkLostError) as caught:
        _connected(port, lambda edge: None)
    assert not isinstance(caught.value, RefusedError)
    assert _connected(port, lambda edge: edge.send_header(Header(Kind.WELCOME))).kind == Kind.WELCOME


@pytest.mark.slow
def test_node_that_says_nothing_is_not_refused(port: int) -> None:
    with ThreadPoolExecutor(1) as pool:
        home = pool.submit(_answer, _requests(port, timeout_s=20.0), lambda edge: None)
        node = _side(port, 1)
        store = node.store(60.0)
        epoch = int(store.add(epoch_key(1), 2))  # a later request waits for a shorter time
        edge = node.open(store, 1, epoch, 1, 5.0)
        with pytest.raises(LinkLostError) as caught:
            while edge.next_header(0.1) is None:
                pass
        assert not isinstance(caught.value, RefusedError)
        edge.abandon()
        with pytest.raises(LinkLostError, match=r"did not say within .* which node it is"):
            home.result()


@pytest.mark.slow
def test_home_that_does_not_come_may_come_later(port: int) -> None:
    with pytest.raises(LinkLostError) as caught:
        _side(port, 1, timeout_s=20.0).connect(HELLO, is_first=False)
    assert not isinstance(caught.value, RefusedError | UnreachableError)


def test_rendezvous_that_has_ended_is_final(port: int) -> None:
    node = _side(port, 1)
    node.nodes = Nodes(2, 1, 0, 1, "127.0.0.1", free_port(), NodePolicy(timeout_s=8.0))
    with pytest.raises(RefusedError, match="nothing listens"):
        node.connect(HELLO, is_first=False)


def test_a_node_with_other_hyper_parameters_than_node_0_is_told(port: int, caplog: pytest.LogCaptureFixture) -> None:
    """It trained with another learning rate in silence."""
    _side(port, 0).publish([Hyper(0.1), Hyper(0.2)])
    _side(port, 1).check([Hyper(0.1), Hyper(0.2)])
    assert not caplog.records
    _side(port, 1).check([Hyper(0.1), Hyper(0.3, momentum=0.5)])
    first, second = [record.getMessage() for record in caplog.records]
    assert "node 1 begins with learning_rate 0.3 in parameter group 1, and node 0 with 0.2: each push" in first
    assert "momentum 0.5 in parameter group 1, and node 0 with 0.0" in second


@pytest.mark.parametrize("other", ["", "[]", "{", '{"0": 3}', '{"0": {}}'])
def test_a_description_from_another_program_is_no_exception(port: int, other: str) -> None:
    home = _side(port, 0)
    home.publish([Hyper(0.1)])
    home.store().set("hypers", other)
    _side(port, 1).check([Hyper(0.1)])
