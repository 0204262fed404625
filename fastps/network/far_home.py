"""The home as the leaf of another node reaches it: across an edge, which is opened again when it is lost."""

import contextlib
import logging
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from fastps.errors import NodeLostError, ProtocolError, TimeoutExceededError
from fastps.membership.job_memory import JobMemory
from fastps.network.codec import CODECS
from fastps.network.edge import CHUNK_FLOATS, SENDS_UNDER_WAY, Edge, chunk_ranges
from fastps.network.leaf import Outgoing
from fastps.network.link import LinkLostError, Memory, SilentError, UnreachableError
from fastps.network.messages import Header, Kind
from fastps.network.parts import parts_of
from fastps.network.rendezvous import OPEN_S, Rendezvous
from fastps.network.rounding import RoundedReceiver, RoundedSender
from fastps.network.session import LeafSession
from fastps.network.sums import Sums, pack
from fastps.system.deadline import Deadline

logger = logging.getLogger("fastps.network")
_LISTEN_S = 0.5
_PAUSE_NS = 200_000_000


class FarHome:
    """The home on node 0, across an edge."""

    def __init__(self, leaf: JobMemory, rendezvous: Rendezvous) -> None:
        self._leaf, self._rendezvous = leaf, rendezvous
        self._nodes = rendezvous.nodes
        self._parts = parts_of(rendezvous.layout)
        self._session = LeafSession(secrets.randbits(64), len(self._parts))
        self._edge: Edge | None = None
        self._end: NodeLostError | None = None
        self._staging = _ring(leaf.layout.buffer_floats)
        codec = CODECS[self._nodes.policy.link_dtype]
        self._sent = RoundedSender(codec, leaf.layout.buffer_floats, is_sum=True) if codec is not None else None
        self._received = RoundedReceiver(codec) if codec is not None else None
        self._receiver = ThreadPoolExecutor(1, "fastps-receiver") if len(self._parts) > 1 else None
        self._has_left = self._has_finished = False

    def begin(self) -> None:
        """Open the edge, and take the weights of the version to begin with. Raises NodeLostError."""
        self._open_within(OPEN_S, OPEN_S, "it could not be reached")
        self._until_done(lambda: self._fetch(Sums(self._leaf).weights(0)))

    def step(self, header: Header, sent: Outgoing | None, before: torch.Tensor, after: torch.Tensor) -> None:
        """See Upstream. A node that was lost and has joined again drops the sum, and takes the newest weights."""
        if not self._session.must_fetch:
            self._session.begin()

        def once() -> None:
            if self._session.must_fetch:
                self._fetch(after)
            else:
                self._exchange(header, sent, before, after)

        self._until_done(once)

    def finish(self, after: torch.Tensor) -> None:
        """See Upstream."""

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

    # -- the edge ----------------------------------------------------------------------------------

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
                self._repair(loss)
        except NodeLostError as error:
            self._end = error
            raise

    @staticmethod
    def _loss_in(call: Callable[[], None]) -> str | None:
        """Call, and return why the edge was lost meanwhile, if it was.

        The error itself is not kept, because its frames refer to transfers, which keep the old link open.
        """
        try:
            call()
        except (LinkLostError, ProtocolError) as error:
            return str(error)
        return None

    def _repair(self, loss: str) -> None:
        """Open the edge again. Raises NodeLostError if node 0 has failed or does not answer in time.

        If the job goes on without lost nodes, a node that is cut off waits for as long as the job's timeout.
        """
        edge = self._open_edge
        if edge.failure:
            raise NodeLostError(edge.failure)
        logger.info("node %d: the edge to node 0 is lost (%s); opening another", self._nodes.number, loss)
        edge.abandon()
        policy = self._nodes.policy
        cut_s = self._leaf.timeout_s if policy.on_node_loss == "continue" else policy.timeout_s
        self._open_within(cut_s, 0.8 * policy.timeout_s, loss)

    def _open_within(self, cut_s: float, silent_s: float, loss: str) -> None:
        """Try to open an edge: for `cut_s` while nothing answers, for `silent_s` while only the home does not."""
        clock = self._leaf.clock
        began_ns = reached_ns = clock.now_ns()
        while (found := self._failure_in(self._open)) is not None:
            now_ns = clock.now_ns()
            if isinstance(found, UnreachableError):
                reached_ns = now_ns
            if now_ns - reached_ns >= silent_s * 1e9 or now_ns - began_ns >= cut_s * 1e9:
                raise NodeLostError(f"node 0, which holds the weights, was lost: {loss}; {found}", 0)
            clock.sleep_ns(_PAUSE_NS)

    @staticmethod
    def _failure_in(call: Callable[[], None]) -> LinkLostError | None:
        """Call, and return the error after which another try may succeed."""
        try:
            call()
        except (UnreachableError, SilentError) as error:
            return error
        return None

    def _open(self) -> None:
        """Open an edge and agree on the step to go on with. Raises UnreachableError, SilentError, NodeLostError."""
        before = self._session.dropped
        try:
            self._edge, answer = self._rendezvous.connect(self._session.hello(), is_first=self._edge is None)
            self._session.welcome(answer)
        except (UnreachableError, SilentError):
            raise
        except (LinkLostError, ProtocolError) as error:
            raise NodeLostError(f"node 0, which holds the weights, was lost: {error}", 0) from error
        if answer.kind == Kind.WELCOME and self._session.version:
            logger.warning(
                "node %d was lost and has joined again; %d pushes of its workers were dropped",
                self._nodes.number, self._session.dropped - before,
            )  # fmt: skip

    # -- what travels ------------------------------------------------------------------------------

    def _exchange(self, header: Header, sent: Outgoing | None, before: torch.Tensor, after: torch.Tensor) -> None:
        """Send what the home does not have of the pending step, and take the weights that it grants."""
        session = self._session
        first = session.part
        self._open_edge.send_header(replace(header, step=session.step, part=first))
        if sent is None:
            self._take_next(before, after)
        elif self._receiver is None:
            self._send(sent, first)
            self._take_next(before, after)
        else:  # the first parts return before the last are sent
            taken = self._receiver.submit(self._take_next, before, after)
            try:
                self._send(sent, first)
            finally:
                taken.exception()  # the other thread writes into the leaf's memory until it ends
            taken.result()
        if self._sent is not None:
            self._sent.settle()

    def _send(self, sent: Outgoing, part: int) -> None:
        """Send the terms of a sum, and its floats from a part on."""
        terms, chunks = sent.begin(self._staging)
        messages = map(_memory, chunks) if self._sent is None else self._sent.encoded(chunks)
        skipped = -(-self._parts[part].first // CHUNK_FLOATS) if part < len(self._parts) else len(self._staging)
        rest = (memory for number, memory in enumerate(messages) if number >= skipped)
        self._open_edge.send(memory for each in ([_bytes(pack(terms))], rest) for memory in each)

    def _fetch(self, after: torch.Tensor) -> None:
        """Take the weights with which a new lane begins."""
        self._open_edge.send_header(Header(Kind.FETCH))
        self._take_weights(0, after)
        if self._sent is not None:
            self._sent.begin(torch.zeros(self._leaf.layout.buffer_floats))

    def _take_next(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Take the weights of the next version. Rounded floats are the difference from the version before."""
        if self._received is None:
            self._take_weights(self._session.step, after)
            return
        version = self._await_weights(self._session.step)
        spans = list(self._chunks())
        arriving = self._open_edge.receiving(self._received.memory(last - first for first, last in spans))
        for number, (first, last) in enumerate(spans):
            next(arriving)
            torch.add(before[first:last], self._received.values(number, last - first), out=after[first:last])
        self._session.took(version)

    def _take_weights(self, step: int, after: torch.Tensor) -> None:
        """Wait for the home's answer, and receive its weights straight into the leaf's memory."""
        version = self._await_weights(step)
        weights = _memory(after)
        self._open_edge.receive(weights[4 * first : 4 * last] for first, last in self._chunks())
        self._session.took(version)

    def _chunks(self) -> Iterator[tuple[int, int]]:
        """The ranges of floats in which weights travel: the chunks of each shard of each part."""
        for part in self._parts:
            for first, last in part.layout.shards:
                yield from chunk_ranges(part.first + first, part.first + last)

    def _await_weights(self, step: int) -> int:
        """Wait for the header of weights that answer a step, 0 if none. Returns their version."""
        clock = self._leaf.clock
        deadline = Deadline(clock.now_ns(), int(self._leaf.timeout_s * 1e9))
        while (answer := self._open_edge.next_header(_LISTEN_S)) is None:
            if deadline.is_over(clock.now_ns()):
                raise TimeoutExceededError(
                    f"node {self._nodes.number} waited {self._leaf.timeout_s:g} s for the weights of node 0, which may wait"
                    " for a slower node; raise FASTPS_TIMEOUT if it is only slow"
                )
        if answer.kind == Kind.FAILED:
            raise LinkLostError(answer.text)
        self._session.check_weights(answer, step)
        return answer.version

    def leave(self, failure: str | None) -> None:
        """See Upstream."""
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


def _ring(floats: int) -> list[torch.Tensor]:
    """Memory for each chunk of a sum. Few chunks are under way, so all share the memory of a few, which stays in the cache."""
    ring = torch.zeros(min(SENDS_UNDER_WAY + 1, -(-floats // CHUNK_FLOATS)), CHUNK_FLOATS)
    ranges = enumerate(chunk_ranges(0, floats))
    return [ring[number % len(ring), : last - first] for number, (first, last) in ranges]


def _memory(part: torch.Tensor) -> Memory:
    return part.numpy().view(np.uint8)


def _bytes(data: bytes) -> Memory:
    return np.frombuffer(data, np.uint8).copy()
