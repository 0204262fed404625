"""The home as the leaf of another node reaches it: across an edge."""

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from fastps.errors import NodeLostError, TimeoutExceededError
from fastps.job.layout import Layout
from fastps.job.nodes import Nodes
from fastps.kernels.protocol.fold_call import FoldedPush
from fastps.membership.job_memory import JobMemory
from fastps.network.codec import CODECS
from fastps.network.edge import CHUNK_FLOATS, SENDS_UNDER_WAY, Edge, chunk_ranges
from fastps.network.link import LinkLostError, Memory
from fastps.network.messages import Header, Kind
from fastps.network.parts import parts_of
from fastps.network.rounding import RoundedReceiver, RoundedSender
from fastps.network.sums import Sums, pack
from fastps.system.deadline import Deadline

_LISTEN_S = 0.5


class FarHome:
    """The home on node 0, across an edge."""

    def __init__(self, leaf: JobMemory, layout: Layout, nodes: Nodes, edge: Edge) -> None:
        self._leaf, self._nodes = leaf, nodes
        self._edge = edge
        self._sums = Sums(leaf)
        self._parts = parts_of(layout)
        self._staging = _ring(leaf.layout.buffer_floats)
        codec = CODECS[nodes.policy.link_dtype]
        self._sent = RoundedSender(codec, leaf.layout.buffer_floats, is_sum=True) if codec is not None else None
        self._received = RoundedReceiver(codec) if codec is not None else None
        self._receiver = ThreadPoolExecutor(1, "fastps-receiver") if len(self._parts) > 1 else None
        self._has_left = self._has_finished = False

    def begin(self) -> None:
        """Take the weights of the version to begin with. Raises LinkLostError."""
        self._take_weights(Kind.WELCOME, 0)

    def step(self, header: Header, pushes: Sequence[FoldedPush], before: int, after: int) -> None:
        """See Upstream."""
        try:
            self._edge.send_header(header)
            if pushes and self._receiver is not None:  # the first parts return before the last are sent
                taken = self._receiver.submit(self._take_next, before, after)
                self._send(pushes)
                taken.result()
                return
            if pushes:
                self._send(pushes)
            self._take_next(before, after)
        except LinkLostError as error:
            raise self._lost(error) from error

    def _send(self, pushes: Sequence[FoldedPush]) -> None:
        terms, chunks = self._sums.begin(pushes, self._staging)
        messages = map(_memory, chunks) if self._sent is None else self._sent.encoded(chunks)
        self._edge.send(memory for each in ([_bytes(pack(terms))], messages) for memory in each)

    def finish(self, after: int) -> None:
        """See Upstream."""
        try:
            self._edge.send_header(Header(Kind.LEAVE))
            self._take_weights(Kind.WEIGHTS, after)
        except LinkLostError as error:
            raise self._lost(error) from error
        self._has_finished = True

    def _take_next(self, before: int, after: int) -> None:
        """Take the weights of the next version. Rounded floats are the difference from the version before."""
        if self._received is None:
            self._take_weights(Kind.WEIGHTS, after)
            return
        self._await_answer(Kind.WEIGHTS)
        old, new = self._sums.weights(before), self._sums.weights(after)
        spans = list(self._chunks())
        arriving = self._edge.receiving(self._received.memory(last - first for first, last in spans))
        for number, (first, last) in enumerate(spans):
            next(arriving)
            torch.add(old[first:last], self._received.values(number, last - first), out=new[first:last])

    def _take_weights(self, kind: Kind, after: int) -> None:
        """Wait for the home's answer, and receive its weights straight into a leaf buffer."""
        self._await_answer(kind)
        weights = _memory(self._sums.weights(after))
        self._edge.receive(weights[4 * first : 4 * last] for first, last in self._chunks())

    def _chunks(self) -> Iterator[tuple[int, int]]:
        """The ranges of floats in which weights travel: the chunks of each shard of each part."""
        for part in self._parts:
            for first, last in part.layout.shards:
                yield from chunk_ranges(part.first + first, part.first + last)

    def _await_answer(self, kind: Kind) -> None:
        clock = self._leaf.clock
        deadline = Deadline(clock.now_ns(), int(self._leaf.timeout_s * 1e9))
        while (answer := self._edge.next_header(_LISTEN_S)) is None:
            if deadline.is_over(clock.now_ns()):
                raise TimeoutExceededError(
                    f"node {self._nodes.number} waited {self._leaf.timeout_s:g} s for the weights of node 0, which may wait"
                    " for a slower node; raise FASTPS_TIMEOUT if it is only slow"
                )
        if answer.kind != kind:
            raise LinkLostError(answer.text or f"expected {kind.name} of node 0, found {answer.kind.name}")

    def _lost(self, error: LinkLostError) -> NodeLostError:
        text = self._edge.failure
        return NodeLostError(text or f"node 0, which holds the weights, was lost: {error}", -1 if text else 0)

    def check(self) -> None:
        """See Upstream. After `finish` the home may end first."""
        if self._has_finished:
            return
        try:
            self._edge.check()
        except LinkLostError as error:
            raise self._lost(error) from error

    def leave(self, failure: str | None) -> None:
        """See Upstream."""
        if self._has_left:
            return
        self._has_left = True
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
