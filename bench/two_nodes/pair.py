"""One of two processes, one on each node, that send and receive so many bytes at once: over plain sockets, or over an edge.

Nothing else happens, so this is the bound of a step, and what a transfer costs. It prints the seconds of each exchange, and the
processor time of all.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from fastps.bench.two_nodes.order import Order, meet, rendezvous
from fastps.job import environment
from fastps.network.edge import CHUNK_BYTES, Edge, chunks_of
from fastps.network.gloo import GlooLink
from fastps.network.link import Memory
from fastps.network.messages import Header, Kind

_LIMIT_S = 60.0
Way = Callable[[Memory], object]
Ways = tuple[Callable[[], object], Way, Way]  # a barrier, send, receive


@contextmanager
def _sockets(store: Any, side: int, address: str) -> Iterator[Ways]:
    connection = _listening(store, address) if side == 0 else _connecting(store)
    with connection:

        def barrier() -> None:
            connection.sendall(b"1")
            connection.recv(1)

        def receive(memory: Memory) -> None:
            at, view = 0, memoryview(memory)
            while at < len(view):
                at += connection.recv_into(view[at : at + CHUNK_BYTES])

        yield barrier, connection.sendall, receive


def _listening(store: Any, address: str) -> socket.socket:
    with socket.create_server((address, 0)) as server:
        store.set("listener", json.dumps(server.getsockname()))
        connection, _ = server.accept()
    return connection


def _connecting(store: Any) -> socket.socket:
    host, port = json.loads(store.get("listener"))
    connection = socket.create_connection((host, port), timeout=_LIMIT_S)
    connection.settimeout(None)
    return connection


@contextmanager
def _edge(store: Any, side: int, address: str) -> Iterator[Ways]:
    links = [GlooLink(store, name, side, address, _LIMIT_S) for name in ("control", "data")]
    edge = Edge(links[0], links[1], _LIMIT_S)

    def barrier() -> None:
        edge.send_header(Header(Kind.NULL))
        edge.next_header(_LIMIT_S)

    try:
        yield barrier, lambda memory: edge.send(chunks_of(memory)), lambda memory: edge.receive(chunks_of(memory))
        meet(store, "over", 2)  # the end of one side is a loss for the other
    finally:
        edge.close()


PAIRS: dict[str, Callable[[Any, int, str], AbstractContextManager[Ways]]] = {"sockets": _sockets, "edge": _edge}


def main() -> None:
    """Run one process of the pair."""
    order, side = Order.given(), environment.rank()
    store = rendezvous(is_keeper=side == 0)
    out, into = np.ones(4 * order.parameters, np.uint8), np.zeros(4 * order.parameters, np.uint8)
    seconds, cpu_s = [], 0.0
    pair = PAIRS[order.program](store, side, os.environ["FASTPS_INTERFACE"])
    with pair as (barrier, send, receive), ThreadPoolExecutor(1) as other:
        for step in range(order.warm_up + order.steps):
            barrier()
            if step == order.warm_up:
                cpu_s = time.process_time()
            began_ns = time.perf_counter_ns()
            sending = other.submit(send, out)
            receive(into)
            sending.result()
            seconds.append((time.perf_counter_ns() - began_ns) / 1e9)
        cpu_s = time.process_time() - cpu_s
        barrier()
    print(json.dumps({"seconds": seconds[order.warm_up :], "result": float(into.min()), "cpu_s": cpu_s}))
    store.add("ended", 1)
    while side == 0 and store.add("ended", 0) < 2:
        time.sleep(0.01)


if __name__ == "__main__":
    main()
