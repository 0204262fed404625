"""The leaf: a node's own arena, whose fold is a journey to the home and back.

Where another arena's fold applies the update rule, a leaf's sums what its workers have pushed, hands the sum to the home, and
takes the weights that the home grants. The lock of the leaf's shard is held meanwhile, so what the workers push next waits in
their slots.
"""

import contextlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from fastps.errors import Error, NodeLostError, TimeoutExceededError
from fastps.job.layout import Layout
from fastps.job.nodes import Nodes
from fastps.membership.job_memory import JobMemory
from fastps.network.edge import Edge
from fastps.network.home import Home, gradient_of, post, weight_parts
from fastps.network.link import LinkLostError
from fastps.network.messages import Header, Kind
from fastps.network.sums import Push, Sums, pack
from fastps.store.worker import Worker
from fastps.system.deadline import Deadline

_HEAR_S = 0.5


class Upstream(Protocol):
    """What a leaf needs of the home, near or far. Raises NodeLostError."""

    def step(self, header: Header, pushes: Sequence[Push], buffer: int) -> None:
        """Hand a sum (or, without pushes, a step without one) to the home; write the granted weights into a leaf buffer."""
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
        self.upstream.step(self._header(summed, sum(push[4] for push in pushes)), summed, weights_out)
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
    """The home of node 0's leaf, in the same process: the sum is written into the home's slot."""

    def __init__(self, leaf: JobMemory, home: Home) -> None:
        self._sums = Sums(leaf)
        self._home = home
        self._worker: Worker = home.attach(0)

    def step(self, header: Header, pushes: Sequence[Push], buffer: int) -> None:
        """See Upstream."""
        worker = self._worker
        try:
            if worker.lane.awaits:
                worker.advance()  # an error ended the wait of the step before
            if pushes:
                slot = torch.from_numpy(gradient_of(worker, 0).view(np.float32))
                terms, parts = self._sums.begin(pushes, slot)
                at = 0
                for part in parts:
                    if part.data_ptr() != slot[at:].data_ptr():
                        slot[at : at + len(part)] = part
                    at += len(part)
                post(worker, terms.hypers, terms.presence, header, self._home.of.within)
            else:
                worker.push(self._home.store.hypers, null=True)
            worker.advance()
            worker.pull()
        except Error as error:
            raise self._home.loss_of(error) from error
        self._copy_weights(buffer)

    def finish(self, buffer: int) -> None:
        """See Upstream."""
        try:
            self._worker.wait_for_others()
        except Error as error:
            raise self._home.loss_of(error) from error
        self._copy_weights(buffer)

    def _copy_weights(self, buffer: int) -> None:
        weights = self._sums.weights(buffer)
        for (first, last), held in zip(self._home.store.layout.shards, self._worker.buffers, strict=True):
            weights[first:last] = self._held(held)[first:last]

    def _held(self, buffer: int) -> torch.Tensor:
        store = self._home.store
        offset = store.arena.weights_offset(buffer)
        return torch.from_numpy(np.frombuffer(store.memory, np.float32, store.layout.buffer_floats, offset))

    def check(self) -> None:
        """See Upstream."""
        try:
            self._worker.look_around()
        except Error as error:
            raise self._home.loss_of(error) from error

    def leave(self, failure: str | None) -> None:
        """See Upstream. Waits until the other nodes have left or are lost, because the weights are here."""
        if not self._worker.closed:
            self._worker.close(failure and f"{NodeLostError.__name__}: {failure}")
        self._home.await_nodes()
        self._home.close()


class FarHome:
    """The home on another node, across an edge."""

    def __init__(self, leaf: JobMemory, layout: Layout, of: Nodes, edge: Edge) -> None:
        self._leaf, self._layout, self._of = leaf, layout, of
        self._edge = edge
        self._sums = Sums(leaf)
        self._staging = torch.zeros(leaf.layout.buffer_floats)
        self._has_left = self._has_finished = False

    def begin(self, hello: Header) -> None:
        """Say who this node is, and take the weights of the version to begin with. Raises NodeLostError, LinkLostError."""
        self._edge.say(hello)
        self._take_weights(Kind.WELCOME, 0)

    def step(self, header: Header, pushes: Sequence[Push], buffer: int) -> None:
        """See Upstream."""
        try:
            self._edge.say(header)
            if pushes:
                terms, parts = self._sums.begin(pushes, self._staging)
                self._edge.send(memory for each in ([_bytes(pack(terms))], map(_memory, parts)) for memory in each)
            self._take_weights(Kind.WEIGHTS, buffer)
        except LinkLostError as error:
            raise self._lost(error) from error

    def finish(self, buffer: int) -> None:
        """See Upstream."""
        try:
            self._edge.say(Header(Kind.LEAVE, self._of.number))
            self._take_weights(Kind.WEIGHTS, buffer)
        except LinkLostError as error:
            raise self._lost(error) from error
        self._has_finished = True

    def _take_weights(self, kind: Kind, buffer: int) -> None:
        """Wait for the home's answer, and receive its weights straight into a leaf buffer."""
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
        shards = self._layout.shards
        self._edge.receive(weight_parts(self._leaf, [buffer] * len(shards), shards))

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


def _memory(part: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return part.numpy().view(np.uint8)


def _bytes(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(data, np.uint8).copy()
