"""Edges are measured over real Gloo links: a slow direction is found slow, and the other side follows."""

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from fastps.lab.measuring import rates
from fastps.lab.measuring.rates import LinkRates, measure, respond
from fastps.network.edge import Edge
from fastps.network.link import GlooLink, LinkLostError, Memory
from fastps.network.tcp_store import connect_store
from tests.support import nodes

SLOW_BYTES_S = 100e6


class SlowEdge(Edge):
    """An edge whose sends take as long as at 100 MB/s, and whose headers take 10 ms."""

    def send(self, chunks: Iterable[Memory]) -> None:
        def slowly() -> Iterator[Memory]:
            for chunk in chunks:
                time.sleep(len(chunk) / SLOW_BYTES_S)
                yield chunk

        super().send(slowly())


@contextmanager
def _edges(count: int, slow: int = -1) -> Iterator[list[Edge]]:
    """Edges of node 0, with threads that respond at the other ends. `slow`: the other end that sends slowly."""
    with nodes.rendezvous() as port:
        made: dict[tuple[int, int], Edge] = {}

        def make(node: int, side: int) -> None:
            store = connect_store("127.0.0.1", port, 20.0)
            links = [GlooLink(store, f"{node}/{name}", side, "127.0.0.1", 20.0) for name in ("control", "data")]
            made[node, side] = (SlowEdge if side and node == slow else Edge)(links[0], links[1], 5.0)
            if side:
                with contextlib.suppress(LinkLostError):  # where the test ends the link
                    respond(made[node, 1])

        responders = [threading.Thread(target=make, args=(node, 1)) for node in range(count)]
        for responder in responders:
            responder.start()
        for node in range(count):
            make(node, 0)
        yield [made[node, 0] for node in range(count)]
        for responder in responders:
            responder.join(20)
        assert not any(responder.is_alive() for responder in responders)
        for edge in made.values():
            edge.close()


@pytest.mark.slow
def test_every_figure_is_there_and_a_slow_direction_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_ENOUGH_NS", 20_000_000)
    monkeypatch.setattr(rates, "_ROUND_TRIPS", 20)
    with _edges(2, slow=1) as edges:
        fast, slow = measure(edges)
    assert isinstance(fast, LinkRates)
    for each in (fast, slow):
        assert 0 < each.round_trip_ns <= each.round_trip_p95_ns
        assert each.small_round_trip_ns > 0
        assert min(each.down_bytes_s, each.both_bytes_s, each.together_bytes_s) > 0
    assert slow.up_bytes_s < SLOW_BYTES_S
    assert slow.both_bytes_s < SLOW_BYTES_S
    assert slow.together_bytes_s < SLOW_BYTES_S


def test_a_node_that_fails_ends_the_measurement() -> None:
    with pytest.raises(LinkLostError):
        with _edges(1) as edges:
            edges[0].close()
            measure(edges)
