"""The threads of a home's agent that serve the other nodes, one for each."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain

import numpy as np
import torch

from fastps.errors import Error, NodeLostError, ProtocolError, WorkerDiedError
from fastps.job.wire import CHUNK_BYTES
from fastps.network.codec import CODECS, RoundedReceiver, RoundedSender
from fastps.network.edge import Edge, chunks_of
from fastps.network.home import Home, NodeLanes
from fastps.network.link import LinkLostError, Memory, RefusedError
from fastps.network.messages import Header, Kind, check_push
from fastps.network.monitoring.watch import EdgeWatch
from fastps.network.rendezvous import OPEN_S, Requests
from fastps.network.session import NodeRecord
from fastps.network.sums import payload_bytes, unpack
from fastps.tracing.file import PUSH_POSTED, WEIGHTS_SENT

logger = logging.getLogger("fastps.network")
_LISTEN_S = 1.0
_SILENT_S = 0.3  # how long a node whose agent has ended, or is silent, may take to ask for another edge
_FOREVER_S = 1e9
_OPENINGS = 4  # an edge may be lost while it opens, and the node asks again
_ASKING_S = 1.5  # how long a node whose agent still runs may take, after its last transfer over the lost edge has ended
_PROBE_NS = 100_000_000


class Serving(threading.Thread):
    """The thread that serves one node over one edge after the other. It ends when the node has left or is lost.

    Where the model has several parts, a second thread sends the weights of one part while this one receives the next. If the
    job goes on without lost nodes, this thread waits until the node comes again. `watch` observes all edges to the node.
    """

    def __init__(self, home: Home, node: int, requests: Requests, timeout_s: float, watch: EdgeWatch) -> None:
        super().__init__(name=f"fastps-node-{node}", daemon=True)
        self._home, self._node = home, node
        self._watch, self._clock = watch, home.stores[0].clock
        self._requests = requests
        self._timeout_s = timeout_s
        layout = home.stores[0].layout
        self._rule, self._groups, self._parameters = layout.rule, layout.groups, home.cut.parts[-1].parameters.stop
        codec = CODECS[home.nodes.policy.link_dtype]
        spans = home.cut.spans
        # One for each turn.
        self._sent = [RoundedSender(codec, last - first, is_sum=False) for first, last in spans if codec is not None]
        self._received = RoundedReceiver(codec) if codec is not None else None
        self._sender = ThreadPoolExecutor(1, f"fastps-node-{node}-sender") if home.cut.in_step > 1 else None
        self._answer_under_way: Future[None] | None = None
        self._lanes: NodeLanes | None = None
        self._record = NodeRecord()
        self._refusal = ""  # the last that was logged
        self._has_final = False  # whether the weights at the job's end have been sent
        self._continues = home.nodes.policy.on_node_loss == "continue"

    def run(self) -> None:
        try:
            edge, hello = self._next_open(self._timeout_s, self._home.is_closing.is_set)
        except LinkLostError as error:
            self._lose(None, f"node {self._node} was lost: {error}")
            edge = None
        while edge is not None or (self._continues and not self._home.is_closing.is_set()):
            try:
                if edge is None:  # the node is lost, and may come again
                    edge, hello = self._requests.next(_FOREVER_S, self._home.is_closing.is_set)
                has_left, edge, hello = self._serve_edge(edge, hello)
            except LinkLostError as error:  # the node asked for an edge, and was lost before it was open
                if self._requests.have_ended:
                    logger.info("node %d cannot come again: %s", self._node, error)
                    return
                self._tell_refusal(str(error))
                edge = None
                continue
            if has_left:
                return

    def _tell_refusal(self, reason: str) -> None:
        """Log why a node got no edge, once for each reason in turn, because it may ask again and again."""
        if not self._home.is_closing.is_set() and reason != self._refusal:
            self._refusal = reason
            logger.warning("node %d asked for an edge and got none: %s", self._node, reason)

    def _serve_edge(self, edge: Edge, hello: Header) -> tuple[bool, Edge | None, Header]:
        """Serve over one edge until it ends. Returns whether the node has left, and the next edge, if it comes in time."""
        failure = loss = ""
        try:
            self._welcome(edge, hello)
            while self._serve(edge):
                pass
        except LinkLostError as error:
            failure, loss = edge.failure, str(error)
            if failure and f"node {self._node}" not in failure:
                failure = f"node {self._node} failed: {failure}"
        except WorkerDiedError as error:  # another node is lost, and the job ends with it
            failure = str(self._home.loss_of(error))
        except Exception as error:
            if not isinstance(error, Error):  # a mistake in this program must not leave the other nodes waiting
                logger.exception("node %d", self._node)
            failure = f"node {self._node}: {type(error).__name__}: {error}"
        self._await_answer()
        if loss and not failure:
            logger.info("the edge to node %d is lost: %s", self._node, loss)
            with contextlib.suppress(LinkLostError):
                return False, *self._next_edge(edge)
        if self._has_final or not (failure or loss):
            self._lanes_of_node().close(None)
            edge.close()
            return True, None, hello
        self._lose(edge, failure or f"node {self._node} was lost: {loss}")
        return False, None, hello

    def _next_edge(self, edge: Edge) -> tuple[Edge, Header]:
        """Wait a short time for the node to open the edge again. Raises LinkLostError."""
        edge.ask_to_reopen()
        try:
            is_over = self._patience(lambda: not edge.is_silent or edge.may_return)
            return self._next_open(self._home.nodes.policy.timeout_s + _ASKING_S, is_over)
        finally:
            edge.abandon()

    def _next_open(self, limit_s: float, is_over: Callable[[], bool]) -> tuple[Edge, Header]:
        """Wait up to `limit_s` for each request, until an edge opens. Raises LinkLostError, RefusedError if this refuses it."""
        lost: LinkLostError | None = None
        for _ in range(_OPENINGS):
            asked = self._requests.epoch
            try:
                return self._requests.next(limit_s, is_over)
            except LinkLostError as error:
                if isinstance(error, RefusedError) or self._requests.epoch == asked:
                    raise (lost or error) from None
                lost = error
            limit_s, is_over = min(limit_s, OPEN_S), self._while_it_runs(is_over)
        raise LinkLostError(f"{_OPENINGS} edges were lost before they were open, the last one by this: {lost}")

    def _while_it_runs(self, is_over: Callable[[], bool]) -> Callable[[], bool]:
        """A function that says whether `is_over`, or whether the node's agent, which has asked before, has ended."""
        has_ended = self._requests.end_of_node() or (lambda: True)
        is_silent = self._patience(lambda: not has_ended())
        return lambda: is_over() or is_silent()

    def _patience(self, runs: Callable[[], bool]) -> Callable[[], bool]:
        """A function that says whether the node has been silent for too long.

        A node that has lost a connection may be in a transfer over the other one, which nothing ends but its timeout. So while
        its agent `runs`, this waits for as long as that takes. Once the agent has ended, or has been silent for the timeout,
        this waits only a short time.
        """
        asked_ns, silent_ns = 0, 0

        def is_over() -> bool:
            nonlocal asked_ns, silent_ns
            now_ns = self._clock.now_ns()
            if not silent_ns and now_ns - asked_ns >= _PROBE_NS:
                asked_ns = now_ns
                silent_ns = 0 if runs() else now_ns
            return silent_ns > 0 and now_ns - silent_ns >= _SILENT_S * 1e9

        return is_over

    def _await_answer(self) -> None:
        """Wait for the end of the answer that the second thread sends. Its errors are those of the edge."""
        if self._lanes is not None:
            self._lanes.abort()
        if self._answer_under_way is not None:
            self._answer_under_way.exception()
            self._answer_under_way = None

    def _lose(self, edge: Edge | None, failure: str) -> None:
        """Give the lanes of a lost node back, and send the node the reason if the edge still works."""
        logger.warning("%s%s", failure, "; the job goes on without it" if self._continues else "")
        reason = failure if self._continues else str(self._home.loss_of(NodeLostError(failure, self._node)))
        if self._lanes is not None:
            with contextlib.suppress(Error):
                self._lanes.close(failure)
            self._lanes = None
            self._record.lose()
            self._home.to_tell.pop(self._node, None)
        else:
            self._home.give_up(self._node, failure)
        if self._continues:
            self._home.go_on_without(self._node)
        else:
            self._home.failure = self._home.failure or reason
        if edge is not None:
            with contextlib.suppress(LinkLostError):
                edge.send_header(Header(Kind.FAILED, text=reason))
            edge.abandon()

    def _lanes_of_node(self) -> NodeLanes:
        assert self._lanes is not None
        return self._lanes

    def _welcome(self, edge: Edge, hello: Header) -> None:
        """Answer HELLO: go on with the node's lanes, or give it new ones."""
        if self._record.session is not None and not self._record.is_owner(hello):
            self._lose(None, f"node {self._node} was lost: its agent was started again")
        if self._record.session is None:
            self._lanes = self._home.attach(self._node, hello.incarnation)
            self._record.begin(self._lanes.session)
            self._watch.begin()
            self._has_final = False
            logger.info("node %d joined with %d workers", self._node, hello.weight)
        else:
            logger.info("node %d goes on over a new edge", self._node)
        edge.watch = self._watch
        lanes, answer = self._lanes_of_node(), self._record.answer(hello)
        lanes.check_with(edge.check)
        edge.send_header(answer)
        self._home.to_tell[self._node] = partial(_tell_loss, edge)

    def _serve(self, edge: Edge) -> bool:
        """Handle one message, if one comes soon. Returns False after the last."""
        header, lanes = edge.next_header(_LISTEN_S), self._lanes_of_node()
        if header is None:
            lanes.check_peers()
        elif header.kind == Kind.FETCH:
            self._send_first(edge, lanes)
        elif header.kind == Kind.LEAVE:
            self._answer(edge, 0, lanes.last(), None)
            self._has_final = True
        elif header.kind == Kind.DONE and self._has_final:
            return False
        elif header.kind in (Kind.NULL, Kind.PUSH):
            self._step(edge, lanes, header)
        elif header.kind == Kind.FAILED:
            raise LinkLostError(header.reason)
        else:
            raise LinkLostError(f"node {self._node} sent {header.kind.name}, which no leaf sends now")
        return True

    def _send_first(self, edge: Edge, lanes: NodeLanes) -> None:
        """Send the weights with which a new lane begins, never rounded."""
        if self._sent:
            held = np.concatenate([memory.view(np.float32) for _, memories in lanes.pulled() for memory in memories])
            for sent, (first, last) in zip(self._sent, lanes.cut.spans, strict=True):
                sent.begin(torch.from_numpy(held[first:last]))
        self._answer(edge, 0, lanes.pulled(), None)

    def _step(self, edge: Edge, lanes: NodeLanes, header: Header) -> None:
        """Make one step of the node, unless it is made already, and answer with the weights."""
        lanes.session.check(header)
        if lanes.has_left:
            raise ProtocolError(f"expected LEAVE or DONE of a node that has left, found {header.kind.name}")
        if header.kind == Kind.PUSH:
            check_push(header)
        sent = self._sent[lanes.cut.turn(header.step)] if self._sent else None
        if sent is not None:
            sent.received_before(header.step)
        began_ns, granted = self._clock.now_ns(), lanes.granted(header.step)
        if header.kind == Kind.PUSH:
            if self._sender is not None:
                self._answer_under_way = self._sender.submit(self._answer, edge, header.step, granted, sent)
            self._receive(edge, lanes, header)
        else:
            lanes.push_nothing(header.step)
        self._watch.message(PUSH_POSTED, header.step, began_ns, self._clock.now_ns())
        if self._answer_under_way is None:
            self._answer(edge, header.step, granted, sent)
        else:
            self._answer_under_way.result()
            self._answer_under_way = None

    def _receive(self, edge: Edge, lanes: NodeLanes, header: Header) -> None:
        """Receive a sum into the lanes' slots, and push each part when it is complete. Parts that are posted are ignored."""
        packed = np.zeros(payload_bytes(self._groups, self._parameters), np.uint8)
        thrown_away = np.zeros(CHUNK_BYTES, np.uint8)
        wanted = [
            (part, chunks_of(slot), lanes.is_missing(header.step, part))
            for part, slot in lanes.slots(header.step)[header.part :]
        ]
        chunks = [chunk if missing else thrown_away[: len(chunk)] for _, slot, missing in wanted for chunk in slot]
        own = chunks if self._received is None else self._received.memory(len(chunk) // 4 for chunk in chunks)
        arriving = edge.receiving(memory for each in ([packed], own) for memory in each)
        next(arriving)
        terms = unpack(packed.tobytes(), self._rule, self._groups, self._parameters)
        number = 0
        for part, slot, missing in wanted:
            for _ in slot:
                next(arriving)
                if self._received is not None:
                    floats = chunks[number].view(np.float32)
                    torch.from_numpy(floats).copy_(self._received.values(number, len(floats)))
                number += 1
            if missing and self._home.table is not None:
                self._home.table.check(self._node, np.concatenate(slot))
            if missing:
                lanes.push(part, terms, header)

    def _answer(
        self, edge: Edge, step: int, granted: Iterator[tuple[object, list[Memory]]], sent: RoundedSender | None
    ) -> None:
        """Send the weights of each part as soon as it is granted; rounded if `sent` is given."""
        _, first = next(granted)
        began_ns = self._clock.now_ns()
        edge.send_header(Header(Kind.WEIGHTS, step=step, version=self._lanes_of_node().version))
        memories = chain(first, chain.from_iterable(later for _, later in granted))
        chunks = (chunk for memory in memories for chunk in chunks_of(memory))
        edge.send(chunks if sent is None else sent.encoded(torch.from_numpy(chunk.view(np.float32)) for chunk in chunks))
        self._watch.message(WEIGHTS_SENT, step, began_ns, self._clock.now_ns())


def _tell_loss(edge: Edge) -> None:
    """Tell a node that another one was lost. A lost edge tells nothing: its node asks for another one."""
    with contextlib.suppress(LinkLostError):
        edge.send_header(Header(Kind.LOST))
