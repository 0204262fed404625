"""The home as the leaf of another node reaches it: across an edge, which is opened again when it is lost."""

import contextlib
import logging
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import chain

import numpy as np
import torch

from fastps.errors import AttachError, Error, NodeLostError, ProtocolError, TimeoutExceededError
from fastps.membership.job_memory import JobMemory
from fastps.network.codec import CODECS, RoundedReceiver, RoundedSender
from fastps.network.edge import CHUNK_FLOATS, SENDS_UNDER_WAY, Edge, chunk_ranges
from fastps.network.link import LinkLostError, Memory, MismatchError, RefusedError, UnreachableError
from fastps.network.messages import Header, Kind
from fastps.network.monitoring.watch import EdgeWatch
from fastps.network.parts import cut_of
from fastps.network.rendezvous import OPEN_S, Rendezvous
from fastps.network.session import LeafSession
from fastps.network.sums import Outgoing, pack
from fastps.system.deadline import Deadline
from fastps.tracing.file import PUSH_SENT, WEIGHTS_TAKEN

logger = logging.getLogger("fastps.network")
_LISTEN_S = 0.5
_PAUSE_NS = 200_000_000
_ASKING_S = 1.5  # the home may need this long to answer, after its last transfer over the lost edge has ended


class FarHome:
    """The home on another node, across an edge. `watch` observes all edges to it."""

    def __init__(self, leaf: JobMemory, rendezvous: Rendezvous, watch: EdgeWatch) -> None:
        self._leaf, self._rendezvous = leaf, rendezvous
        self._watch = watch
        self._nodes = rendezvous.nodes
        self._floats = rendezvous.layout.buffer_floats
        self._cut = cut_of(rendezvous.layout, self._nodes.policy)
        self._session = LeafSession(secrets.randbits(64), self._cut.in_step)
        self._edge: Edge | None = None
        self._end: NodeLostError | None = None
        # For each turn: memory for its chunks, and what rounds them.
        spans = self._cut.spans
        self._staging = [_ring(last - first) for first, last in spans]
        codec = CODECS[self._nodes.policy.link_dtype]
        self._sent = [RoundedSender(codec, last - first, is_sum=True) for first, last in spans if codec is not None]
        self._received = RoundedReceiver(codec) if codec is not None else None
        self._receiver = ThreadPoolExecutor(1, "fastps-receiver") if self._cut.in_step > 1 else None
        self._has_left = self._has_finished = False

    @property
    def lanes_taken(self) -> int:
        return self._session.lane

    @property
    def losses(self) -> int:
        return self._watch.losses

    def begin(self, weights: torch.Tensor) -> None:
        """Open the edge, and take the weights to begin with. Raises NodeLostError."""
        self._open_within(OPEN_S, OPEN_S, "it could not be reached")
        self._until_done(lambda: self._fetch(weights))

    def coming(self) -> tuple[int, int]:
        return (0, self._floats) if self._session.must_fetch else self._cut.span(self._session.step + 1)

    def step(self, header: Header, sent: Outgoing | None, before: torch.Tensor, after: torch.Tensor) -> tuple[int, int]:
        """See Upstream. A node that was lost and has joined again drops the sum, and takes the newest weights."""
        written = self.coming()
        if not self._session.must_fetch:
            self._session.begin()

        def once() -> None:
            nonlocal written
            if self._session.must_fetch:
                written = 0, self._floats
                self._fetch(after)
            else:
                self._exchange(header, sent, before, after)

        self._until_done(once)
        return written

    def finish(self, after: torch.Tensor) -> None:

        def once() -> None:
            if self._session.must_fetch:
                self._fetch(after)
            self._open_edge.send_header(Header(Kind.LEAVE))
            self._take_weights(0, after)
            with contextlib.suppress(LinkLostError):
                self._open_edge.send_header(Header(Kind.DONE))

        self._until_done(once)
        self._has_finished = True

    def check(self) -> None:
        """See Upstream. Opens a lost edge again. After `finish` the home may end first."""
        if not self._has_finished:
            self._until_done(lambda: self._open_edge.check())

    @property
    def _open_edge(self) -> Edge:
        assert self._edge is not None
        return self._edge

    def _until_done(self, call: Callable[[], None]) -> None:
        """Call until no edge is lost meanwhile. Raises NodeLostError."""
        if self._end is not None:
            raise self._end
        try:
            while (loss := self._loss_in(call)) is not None:
                self._repair(str(loss))
        except NodeLostError as error:
            self._end = error
            raise

    @staticmethod
    def _loss_in(call: Callable[[], None]) -> Error | None:
        """Call, and return the error with which the edge was lost meanwhile, if it was.

        It is a copy: the frames of the error itself refer to transfers, which keep the old link open.
        """
        try:
            call()
        except (LinkLostError, ProtocolError) as error:
            return type(error)(str(error))
        return None

    def _repair(self, loss: str) -> None:
        """Open the edge again. Raises NodeLostError if node 0 has failed or does not answer in time.

        If the job goes on without lost nodes, a node that is cut off waits for as long as the job's timeout.
        """
        edge = self._open_edge
        if edge.failure:
            raise NodeLostError(edge.failure)
        if self._has_left:
            raise self._lost(loss)
        logger.info("node %d: the edge to node 0 is lost (%s); opening another", self._nodes.number, loss)
        may_return = edge.may_return
        edge.abandon()
        policy = self._nodes.policy
        # The home may be in a transfer over the lost edge, which nothing ends but its timeout.
        silent_s = policy.timeout_s + _ASKING_S if may_return else 0.8 * policy.timeout_s
        cut_s = self._leaf.timeout_s if policy.on_node_loss == "continue" else policy.timeout_s
        self._open_within(cut_s, silent_s, loss, edge.is_over)

    def _open_within(self, cut_s: float, silent_s: float, loss: str, is_over: Callable[[], bool] | None = None) -> None:
        """Try to open an edge: for `cut_s` while nothing answers, for `silent_s` while only the home does not."""
        clock, reason = self._leaf.clock, loss
        began_ns = reached_ns = clock.now_ns()
        while is_over is None or not is_over():  # asked first, because an attempt to open takes seconds
            if (found := self._loss_in(self._open)) is None:
                return
            now_ns, reason = clock.now_ns(), f"{loss}; {found}"
            if isinstance(found, UnreachableError):
                reached_ns = now_ns
            is_late = now_ns - reached_ns >= silent_s * 1e9 or now_ns - began_ns >= max(cut_s, silent_s) * 1e9
            if self._has_left or is_late:
                break
            clock.sleep_ns(_PAUSE_NS)
        raise self._lost(reason)

    def _open(self) -> None:
        """Open an edge and agree on the step to go on with.

        Raises LinkLostError, NodeLostError if none can be had, and AttachError if the two sides do not fit.
        """
        before = self._session.dropped
        try:
            self._edge, answer = self._rendezvous.connect(self._session.hello(), is_first=self._edge is None)
            self._edge.watch = self._watch
            self._session.welcome(answer)
        except MismatchError as error:
            raise AttachError(f"node {self._nodes.number} and node 0: {error}") from error
        except (RefusedError, ProtocolError) as error:
            raise self._lost(str(error)) from error
        if answer.kind == Kind.WELCOME and self._session.version:
            logger.warning(
                "node %d was lost and has joined again; %d pushes of its workers were dropped",
                self._nodes.number, self._session.dropped - before,
            )  # fmt: skip

    @staticmethod
    def _lost(reason: str) -> NodeLostError:
        return NodeLostError(f"node 0, which holds the weights, was lost: {reason}", 0)

    def _exchange(self, header: Header, sent: Outgoing | None, before: torch.Tensor, after: torch.Tensor) -> None:
        """Send what the home does not have of the pending step, and take the weights that it grants."""
        session = self._session
        first = session.part
        began_ns = self._leaf.clock.now_ns()
        self._open_edge.send_header(replace(header, step=session.step, part=first))
        # The peer begins to send once it knows of a receive, and would hear of one that begins later only behind what this side
        # sends: at 1 Gbit/s, 80 ms later.
        arriving = self._begin_to_take(after)
        if sent is None:
            self._watch.message(PUSH_SENT, session.step, began_ns, self._leaf.clock.now_ns())
            self._take_next(before, after, arriving)
        elif self._receiver is None:
            self._send(sent, first, began_ns)
            self._take_next(before, after, arriving)
        else:  # the first parts return before the last are sent
            taken: list[Future[None]] = [self._receiver.submit(self._take_next, before, after, arriving)]
            try:
                self._send(sent, first, began_ns)
            finally:
                taken[0].exception()  # the other thread writes into the leaf's memory until it ends
            # An error that refers to its own future through this frame would keep the transfers, and with them the lost link.
            taken.pop().result()
        if self._sent:
            self._sent[self._cut.turn(session.step)].received()

    def _send(self, sent: Outgoing, part: int, began_ns: int) -> None:
        """Send the terms of a sum, and its floats from a part on. Its header left at `began_ns`."""
        cut, step = self._cut, self._session.step
        turn, numbers, begin = cut.turn(step), cut.numbers(step), cut.span(step)[0]
        terms, chunks = sent(self._staging[turn], begin)
        messages = self._sent[turn].encoded(chunks) if self._sent else map(_memory, chunks)
        is_left = part < len(numbers)
        skipped = -(-(cut.parts[numbers[part]].first - begin) // CHUNK_FLOATS) if is_left else len(self._staging[turn])
        rest = (memory for number, memory in enumerate(messages) if number >= skipped)
        self._open_edge.send(chain([np.frombuffer(pack(terms), np.uint8).copy()], rest))
        self._watch.message(PUSH_SENT, self._session.step, began_ns, self._leaf.clock.now_ns())

    def _fetch(self, after: torch.Tensor) -> None:
        self._open_edge.send_header(Header(Kind.FETCH))
        self._take_weights(0, after)
        for sent, (first, last) in zip(self._sent, self._cut.spans, strict=False):
            sent.begin(torch.zeros(last - first))

    def _begin_to_take(self, after: torch.Tensor) -> Iterator[None]:
        chunks = self._chunks(self._cut.numbers(self._session.step))
        if self._received is not None:
            return self._open_edge.receiving(self._received.memory(last - first for first, last in chunks))
        weights = _memory(after)
        return self._open_edge.receiving(weights[4 * first : 4 * last] for first, last in chunks)

    def _take_next(self, before: torch.Tensor, after: torch.Tensor, arriving: Iterator[None]) -> None:
        """Take the weights that the pending step is granted. Rounded floats are the difference from the version before."""
        version = self._await_weights(self._session.step)
        came_ns = self._leaf.clock.now_ns()
        for number, (first, last) in enumerate(self._chunks(self._cut.numbers(self._session.step))):
            next(arriving)
            if self._received is not None:
                torch.add(before[first:last], self._received.values(number, last - first), out=after[first:last])
        self._watch.message(WEIGHTS_TAKEN, self._session.step, came_ns, self._leaf.clock.now_ns())
        self._session.took(version)

    def _take_weights(self, step: int, after: torch.Tensor) -> None:
        version = self._await_weights(step)
        weights = _memory(after)
        self._open_edge.receive(weights[4 * first : 4 * last] for first, last in self._chunks(range(len(self._cut.parts))))
        self._session.took(version)

    def _chunks(self, numbers: range) -> Iterator[tuple[int, int]]:
        """The ranges of floats in which the weights of some parts travel: the chunks of each shard of each part."""
        for part in self._cut.parts[numbers.start : numbers.stop]:
            for first, last in part.layout.shards:
                yield from chunk_ranges(part.first + first, part.first + last)

    def _await_weights(self, step: int) -> int:
        """Wait for the header of weights that answer a step, 0 if none. Returns their version."""
        clock = self._leaf.clock
        deadline = Deadline(clock.now_ns(), int(self._leaf.timeout_s * 1e9))
        while (answer := self._open_edge.next_header(_LISTEN_S)) is None:
            if deadline.is_over(clock.now_ns()):
                raise TimeoutExceededError(
                    f"node {self._nodes.number} waited {self._leaf.timeout_s:g} s for the weights of node 0, which"
                    " may wait for a slower node; raise FASTPS_TIMEOUT if it is only slow"
                )
        if answer.kind == Kind.FAILED:
            raise LinkLostError(answer.reason)
        self._session.check_weights(answer, step)
        return answer.version

    def leave(self, failure: str | None) -> None:
        if self._has_left:
            return
        self._has_left = True
        if self._edge is not None:
            if failure:
                with contextlib.suppress(LinkLostError):  # the home has ended, or has noticed the failure
                    self._edge.send_header(Header(Kind.FAILED, text=failure))
            self._edge.close()
        if self._receiver is not None:
            self._receiver.shutdown()

    abort = leave


def _ring(floats: int) -> list[torch.Tensor]:
    """Memory for each chunk of a sum. Few chunks are under way, so all share the memory of a few, which stays in the cache."""
    ring = torch.zeros(min(SENDS_UNDER_WAY + 1, -(-floats // CHUNK_FLOATS)), CHUNK_FLOATS)
    ranges = enumerate(chunk_ranges(0, floats))
    return [ring[number % len(ring), : last - first] for number, (first, last) in ranges]


def _memory(part: torch.Tensor) -> Memory:
    return part.numpy().view(np.uint8)
