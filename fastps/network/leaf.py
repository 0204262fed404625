"""The leaf: a node's own arena, whose fold is a journey to the home and back.

Where another arena's fold applies the update rule, a leaf's sums what its workers have pushed, hands the sum to the home, and
takes the weights that the home grants. The lock of the leaf's shard is held meanwhile, so what the workers push next waits in
their slots.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch

from fastps.errors import Error, NodeLostError, TimeoutExceededError
from fastps.job.layout import Layout
from fastps.job.nodes import Nodes
from fastps.membership.job_memory import JobMemory
from fastps.network.codec import CODECS, Received, Sent
from fastps.network.edge import SENDS_UNDER_WAY, Edge
from fastps.network.home import Home
from fastps.network.link import LinkLostError, Memory
from fastps.network.messages import Header, Kind
from fastps.network.parts import Part, parts_of
from fastps.network.sums import CHUNK_FLOATS, Push, Sums, pack
from fastps.system.deadline import Deadline

_HEAR_S = 0.5


class Upstream(Protocol):
    """What a leaf needs of the home, near or far. Raises NodeLostError."""

    def step(self, header: Header, pushes: Sequence[Push], before: int, buffer: int) -> None:
        """Hand a sum (or, without pushes, a step without one) to the home; write the granted weights into a leaf buffer.

        `before` is the buffer of the leaf's version so far.
        """
        ...

    def finish(self, buffer: int) -> None:
        """Say that this node pushes no more, wait for the other nodes, and write the final weights into a leaf buffer."""
        ...

    def check(self) -> None:
        """Raise NodeLostError if the home is lost or has failed."""
        ...

    def leave(self, failure: str | None) -> None:
        """End. With `failure` the other nodes hear why. May be called twice."""
        ...


class Leaf:
    """The fold of a leaf arena."""

    def __init__(self, store: JobMemory, of: Nodes, upstream: Upstream) -> None:
        self._store, self.of = store, of
        self.upstream = upstream
        self._steps = 0

    def fold(
        self,
        shard: int,
        mode: int,
        scale: float,
        rate_scale: float,
        weights_in: int,
        weights_out: int,
        state_in: int,
        state_out: int,
        pushes: Sequence[tuple[int, int, float, float, int]],
    ) -> None:
        """Take one version from the home; the function given to Lane.fold_with. Raises NodeLostError."""
        summed = [Push(lane, slot, factor) for lane, slot, factor, _, _ in pushes]
        self.upstream.step(self._header(summed, sum(push[4] for push in pushes)), summed, weights_in, weights_out)
        self._steps += 1
        self._store.all_steps(state_out)[:] = self._store.all_steps(state_in) + 1

    def finish(self, buffer: int, state: int) -> None:
        """Write the job's final weights into a weights buffer, and the published step counts into a state buffer."""
        self.upstream.finish(buffer)
        _, states = self._store.committed()
        self._store.all_steps(state)[:] = self._store.all_steps(states[0])

    def _header(self, pushes: list[Push], samples: int) -> Header:
        """What the home is told of a sum: the gradients in it, their samples, and their mean loss."""
        losses = [self._store.arena.counters(push.lane)["loss"] for push in pushes]
        kind = Kind.PUSH if pushes else Kind.NULL
        loss = float(np.mean(losses)) if losses else float("nan")
        return Header(kind, self.of.number, step=self._steps, samples=samples, weight=len(pushes), loss=loss)


class NearHome:
    """The home of node 0's leaf, in the same process: the sum is written into the home's slots.

    `others` are the threads that serve the other nodes.
    """

    def __init__(self, leaf: JobMemory, home: Home, others: Sequence[threading.Thread]) -> None:
        self._sums = Sums(leaf)
        self._home = home
        self._lanes = home.attach(0)
        self._others = others

    def step(self, header: Header, pushes: Sequence[Push], before: int, buffer: int) -> None:
        """See Upstream."""
        try:
            if pushes:
                self._push(header, pushes)
            else:
                self._lanes.push_nothing()
            self._copy_weights(self._lanes.granted(), buffer)
        except Error as error:
            raise self._home.loss_of(error) from error

    def _push(self, header: Header, pushes: Sequence[Push]) -> None:
        slots = [torch.from_numpy(slot.view(np.float32)) for slot in self._lanes.slots]
        terms, chunks = self._sums.begin(pushes, slots)
        for part, slot in enumerate(slots):
            at = 0
            while at < len(slot):
                chunk, target = next(chunks), slot[at:]
                if chunk.data_ptr() != target.data_ptr():
                    target[: len(chunk)] = chunk
                at += len(chunk)
            self._lanes.push(part, terms, header)

    def finish(self, buffer: int) -> None:
        """See Upstream."""
        try:
            self._copy_weights(self._lanes.last(), buffer)
        except Error as error:
            raise self._home.loss_of(error) from error

    def _copy_weights(self, granted: Iterator[tuple[Part, list[Memory]]], buffer: int) -> None:
        weights = self._sums.weights(buffer)
        for part, memories in granted:
            at = part.first
            for memory in memories:
                held = torch.from_numpy(memory.view(np.float32))
                weights[at : at + len(held)] = held
                at += len(held)

    def check(self) -> None:
        """See Upstream."""
        try:
            self._lanes.look_around()
        except Error as error:
            raise self._home.loss_of(error) from error

    def leave(self, failure: str | None) -> None:
        """See Upstream. Waits until the other nodes have left or are lost, because the weights are here."""
        self._lanes.close(failure)
        for thread in self._others:
            thread.join()
        self._home.close()


class FarHome:
    """The home on another node, across an edge."""

    def __init__(self, leaf: JobMemory, layout: Layout, of: Nodes, edge: Edge) -> None:
        self._leaf, self._of = leaf, of
        self._edge = edge
        self._sums = Sums(leaf)
        self._parts = parts_of(layout)
        self._staging = _ring(leaf.layout.buffer_floats)
        codec = CODECS[of.link_dtype]
        self._sent = Sent(codec, leaf.layout.buffer_floats, is_sum=True) if codec is not None else None
        self._received = Received(codec) if codec is not None else None
        self._receiver = ThreadPoolExecutor(1, "fastps-receiver") if len(self._parts) > 1 else None
        self._has_left = self._has_finished = False

    def begin(self, hello: Header) -> None:
        """Say who this node is, and take the weights of the version to begin with. Raises NodeLostError, LinkLostError."""
        self._edge.say(hello)
        self._take_weights(Kind.WELCOME, 0)

    def step(self, header: Header, pushes: Sequence[Push], before: int, buffer: int) -> None:
        """See Upstream."""
        try:
            self._edge.say(header)
            if pushes and self._receiver is not None:  # the first parts come back before the last are sent
                taken = self._receiver.submit(self._take_next, before, buffer)
                self._send(pushes)
                taken.result()
                return
            if pushes:
                self._send(pushes)
            self._take_next(before, buffer)
        except LinkLostError as error:
            raise self._lost(error) from error

    def _send(self, pushes: Sequence[Push]) -> None:
        terms, chunks = self._sums.begin(pushes, self._staging)
        messages = map(_memory, chunks) if self._sent is None else self._sent.encoded(chunks)
        self._edge.send(memory for each in ([_bytes(pack(terms))], messages) for memory in each)

    def finish(self, buffer: int) -> None:
        """See Upstream."""
        try:
            self._edge.say(Header(Kind.LEAVE, self._of.number))
            self._take_weights(Kind.WEIGHTS, buffer)
        except LinkLostError as error:
            raise self._lost(error) from error
        self._has_finished = True

    def _take_next(self, before: int, buffer: int) -> None:
        """Take the weights of the next version; rounded floats are what is added to the version before."""
        if self._received is None:
            self._take_weights(Kind.WEIGHTS, buffer)
            return
        self._await_answer(Kind.WEIGHTS)
        old, new = self._sums.weights(before), self._sums.weights(buffer)
        spans = list(self._chunks())
        arriving = self._edge.receiving(self._received.memory(last - first for first, last in spans))
        for number, (first, last) in enumerate(spans):
            next(arriving)
            torch.add(old[first:last], self._received.values(number, last - first), out=new[first:last])

    def _take_weights(self, kind: Kind, buffer: int) -> None:
        """Wait for the home's answer, and receive its weights straight into a leaf buffer."""
        self._await_answer(kind)
        weights = _memory(self._sums.weights(buffer))
        self._edge.receive(weights[4 * first : 4 * last] for first, last in self._chunks())

    def _chunks(self) -> Iterator[tuple[int, int]]:
        """The ranges of floats in which weights travel: the chunks of each shard of each part."""
        for part in self._parts:
            for first, last in part.layout.shards:
                edges = [*range(part.first + first, part.first + last, CHUNK_FLOATS), part.first + last]
                yield from pairwise(edges)

    def _await_answer(self, kind: Kind) -> None:
        clock = self._leaf.clock
        deadline = Deadline(clock.now_ns(), int(self._leaf.timeout_s * 1e9))
        while (answer := self._edge.hear(_HEAR_S)) is None:
            if deadline.is_over(clock.now_ns()):
                raise TimeoutExceededError(
                    f"node {self._of.number} waited {self._leaf.timeout_s:g} s for the weights of node 0, which may wait for a"
                    " slower node; raise FASTPS_TIMEOUT if it is only slow"
                )
        if answer.kind != kind:
            raise LinkLostError(answer.text or f"expected {kind.name} of node 0, found {answer.kind.name}")

    def _lost(self, error: LinkLostError) -> NodeLostError:
        text = self._edge.failure
        return NodeLostError(text or f"node 0, which holds the weights, was lost: {error}", -1 if text else 0)

    def check(self) -> None:
        """See Upstream. After the end the home may end first."""
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
            with contextlib.suppress(LinkLostError):  # the home has ended, or noticed first
                self._edge.say(Header(Kind.FAILED, self._of.number, text=failure))
        self._edge.close()
        if self._receiver is not None:
            self._receiver.shutdown()


def _ring(floats: int) -> list[torch.Tensor]:
    """Memory for each chunk of a sum, of which few are under way: the same again and again, so that it stays in the cache."""
    ring = torch.zeros(min(SENDS_UNDER_WAY + 1, -(-floats // CHUNK_FLOATS)), CHUNK_FLOATS)
    chunks = range(0, floats, CHUNK_FLOATS)
    return [ring[number % len(ring), : min(CHUNK_FLOATS, floats - first)] for number, first in enumerate(chunks)]


def _memory(part: torch.Tensor) -> Memory:
    return part.numpy().view(np.uint8)


def _bytes(data: bytes) -> Memory:
    return np.frombuffer(data, np.uint8).copy()
