"""One of two processes, one on each node, that send and receive so many bytes at once: over plain sockets, or over an edge.

Nothing else happens, so this is the bound of a step, and what a transfer costs.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from fastps.bench.two_nodes import counters
from fastps.bench.two_nodes.order import Meeting, Order, answer, turns
from fastps.job import environment
from fastps.job.wire import CHUNK_BYTES
from fastps.network.edge import Edge, chunks_of
from fastps.network.link import GlooLink, Memory
from fastps.network.messages import Header, Kind

_LIMIT_S = 60.0
Way = Callable[[Memory], object]
Ways = tuple[Callable[[], object], Way, Way]  # a barrier, send, receive


@contextmanager
def _sockets(meeting: Meeting, side: int, address: str) -> Iterator[Ways]:
    connection = _listening(meeting.store, address) if side == 0 else _connecting(meeting.store)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # the end of a transfer must not wait for an answer
    with connection:

        def barrier() -> None:
            connection.sendall(b"1")
            connection.recv(1)

        def receive(memory: Memory) -> None:
            at, view = 0, memoryview(memory)
            while at < len(view):
                at += connection.recv_into(view[at : at + CHUNK_BYTES])

        yield barrier, connection.sendall, receive
        meeting.wait()


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
def _edge(meeting: Meeting, side: int, address: str) -> Iterator[Ways]:
    links = [GlooLink(meeting.store, name, side, address, _LIMIT_S) for name in ("control", "data")]
    edge = Edge(links[0], links[1], _LIMIT_S)

    def barrier() -> None:
        edge.send_header(Header(Kind.NULL))
        edge.next_header(_LIMIT_S)

    try:
        yield barrier, lambda memory: edge.send(chunks_of(memory)), lambda memory: edge.receive(chunks_of(memory))
        meeting.wait()  # the end of one side is a loss for the other
    finally:
        edge.close()


PAIRS: dict[str, Callable[[Meeting, int, str], AbstractContextManager[Ways]]] = {"sockets": _sockets, "edge": _edge}


def main() -> None:
    """Run one process of the pair."""
    order, meeting = Order.given(), Meeting()
    out, into = np.ones(4 * order.parameters, np.uint8), np.zeros(4 * order.parameters, np.uint8)
    pair = PAIRS[order.program](meeting, environment.rank(), os.environ["FASTPS_INTERFACE"])
    with pair as (barrier, send, receive), ThreadPoolExecutor(1) as other:

        def exchange() -> float:
            into.fill(0)
            barrier()
            began_ns = time.perf_counter_ns()
            sending = other.submit(send, out)
            receive(into)
            sending.result()
            return (time.perf_counter_ns() - began_ns) / 1e9

        for warm_up, steps in turns():
            for _ in range(warm_up):
                exchange()
            meeting.wait()
            before, cpu_s = counters.read(order.interface), time.process_time()
            seconds = [exchange() for _ in range(steps)]
            cpu_s = time.process_time() - cpu_s
            meeting.wait()
            used = replace(counters.read(order.interface) - before, cpu_s=cpu_s)
            answer(seconds=seconds, used=asdict(used))
        answer(result=float(into.min()))
    meeting.end()


if __name__ == "__main__":
    main()
