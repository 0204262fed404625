"""The threads of node 0's agent that serve the other nodes, one for each."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from fastps.errors import Error, NodeLostError
from fastps.network.codec import CODECS
from fastps.network.edge import Edge, chunks_of
from fastps.network.home import Home, NodeLanes
from fastps.network.link import LinkLostError, Memory
from fastps.network.messages import Header, Kind
from fastps.network.rounding import RoundedReceiver, RoundedSender
from fastps.network.sums import payload_bytes, unpack

logger = logging.getLogger("fastps.network")
_LISTEN_S = 1.0


class Serving(threading.Thread):
    """The thread that serves one node: it opens the edge with `connect`, and ends when the node has left or is lost.

    Where the model has several parts, a second thread sends the weights of one part while this one receives the next.
    """

    def __init__(self, home: Home, node: int, connect: Callable[[], tuple[Edge, Header]]) -> None:
        super().__init__(name=f"fastps-node-{node}", daemon=True)
        self._home, self._node = home, node
        self._connect = connect
        layout = home.stores[0].layout
        self._groups, self._parameters = layout.groups, home.parts[-1].parameters.stop
        codec = CODECS[home.nodes.policy.link_dtype]
        self._sent = RoundedSender(codec, home.parts[-1].last, is_sum=False) if codec is not None else None
        self._received = RoundedReceiver(codec) if codec is not None else None
        self._sender = ThreadPoolExecutor(1, f"fastps-node-{node}-sender") if len(home.parts) > 1 else None

    def run(self) -> None:
        """See threading.Thread."""
        lanes: NodeLanes | None = None
        edge: Edge | None = None
        failure: str | None = None
        try:
            edge, hello = self._connect()
            lanes = self._home.attach(self._node)
            lanes.check_with(edge.check)
            logger.info("node %d joined with %d workers", self._node, hello.weight)
            edge.send_header(Header(Kind.WELCOME))
            edge.send(lanes.pulled())
            if self._sent is not None:
                self._sent.begin(torch.cat([torch.from_numpy(memory.view(np.float32)) for memory in lanes.pulled()]))
            while self._serve(edge, lanes):
                pass
        except LinkLostError as error:
            failure = (edge.failure if edge is not None else "") or f"node {self._node} was lost: {error}"
        except Error as error:
            failure = f"node {self._node}: {type(error).__name__}: {error}"
        self._end(edge, lanes, failure)

    def _end(self, edge: Edge | None, lanes: NodeLanes | None, failure: str | None) -> None:
        """Give the lanes back, and send the node the reason if the edge still works."""
        reason = str(self._home.loss_of(NodeLostError(failure, self._node))) if failure else ""
        if failure:
            logger.warning("%s", failure)
            if lanes is not None:
                lanes.abort()
        if self._sender is not None:
            self._sender.shutdown()
        try:
            if lanes is not None:
                lanes.close(failure)
            elif failure:
                self._home.give_up(self._node, failure)
        except Error as error:
            reason = reason or str(error)
        if edge is not None:
            if reason:
                with contextlib.suppress(LinkLostError):
                    edge.send_header(Header(Kind.FAILED, text=reason))
            edge.close()

    def _serve(self, edge: Edge, lanes: NodeLanes) -> bool:
        """Handle one message, if one comes soon. Returns False after the last."""
        header = edge.next_header(_LISTEN_S)
        if header is None:
            lanes.look_around()
        elif header.kind == Kind.LEAVE:
            self._answer(edge, lanes.last(), None)
            return False
        elif header.kind == Kind.NULL:
            lanes.push_nothing()
            self._answer(edge, lanes.granted(), self._sent)
        elif header.kind == Kind.PUSH:
            self._push(edge, lanes, header)
        elif header.kind == Kind.FAILED:
            raise LinkLostError(header.text)
        else:
            raise LinkLostError(f"node {self._node} sent {header.kind.name}, which no leaf sends")
        return True

    def _push(self, edge: Edge, lanes: NodeLanes, header: Header) -> None:
        """Receive a sum into the lanes' slots, push each part when it is complete, and answer with the weights."""
        packed = np.zeros(payload_bytes(self._groups, self._parameters), np.uint8)
        slots = [chunks_of(slot) for slot in lanes.slots]
        chunks = [chunk for slot in slots for chunk in slot]
        own = chunks if self._received is None else self._received.memory(len(chunk) // 4 for chunk in chunks)
        arriving = edge.receiving(memory for each in ([packed], own) for memory in each)
        next(arriving)
        terms = unpack(packed.tobytes(), self._groups, self._parameters)
        answered, number = None, 0
        for part, slot in enumerate(slots):
            for chunk in slot:
                next(arriving)
                if self._received is not None:
                    floats = chunk.view(np.float32)
                    torch.from_numpy(floats).copy_(self._received.values(number, len(floats)))
                number += 1
            lanes.push(part, terms, header)
            if self._sender is not None and answered is None:
                answered = self._sender.submit(self._answer, edge, lanes.granted(), self._sent)
        if answered is None:
            self._answer(edge, lanes.granted(), self._sent)
        else:
            answered.result()

    def _answer(self, edge: Edge, granted: Iterator[tuple[object, list[Memory]]], sent: RoundedSender | None) -> None:
        """Send the weights of each part as soon as it is granted; rounded if `sent` is given."""
        _, first = next(granted)
        edge.send_header(Header(Kind.WEIGHTS))
        chunks = _all_chunks(first, granted)
        edge.send(chunks if sent is None else sent.encoded(torch.from_numpy(chunk.view(np.float32)) for chunk in chunks))


def _all_chunks(first: list[Memory], rest: Iterator[tuple[object, list[Memory]]]) -> Iterator[Memory]:
    for memory in first:
        yield from chunks_of(memory)
    for _, memories in rest:
        for memory in memories:
            yield from chunks_of(memory)
