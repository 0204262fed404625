"""Pairs of edges over real links, both sides in this process."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from torch.distributed import TCPStore

from fastps.job.secret import Secret
from fastps.network.edge import Edge
from fastps.network.link import GlooLink, Link, LinkLostError
from fastps.network.zeromq_link import ZeromqLink

SECRET = Secret(b"a secret of the tests")


def both(make: Callable[[int], Any], sides: int = 2) -> list[Any]:
    """What threads make, one for each side."""
    with ThreadPoolExecutor(sides) as pool:
        return [each.result(60) for each in [pool.submit(make, side) for side in range(sides)]]


def reason_of(call: Callable[[], Any]) -> str:
    """Why a link was lost in a call, or an empty text."""
    try:
        call()
    except LinkLostError as error:
        return str(error)
    return ""


@dataclass
class Pair:
    """Two edges, and the control and data links of each."""

    edges: list[Edge]
    links: list[tuple[Link, Link]]


def make_link(kind: str, port: int, name: str, side: int) -> Link:
    """One side of a link, with a connection of its own to the store."""
    own = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    if kind == "gloo":
        return GlooLink(own, name, side, "127.0.0.1", 10.0)
    return ZeromqLink(own, name, side, "127.0.0.1", 10.0, secret=SECRET, largest=1 << 20)


@pytest.fixture(params=["gloo", "zmq"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A leaf's edge and a home's edge."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def link(side: int) -> tuple[Link, Link]:
        return make_link(request.param, store.port, "control", side), make_link(request.param, store.port, "data", side)

    links = both(link)
    made = Pair([Edge(*each, 1.5) for each in links], links)
    yield made
    for edge in made.edges:
        edge.close()
