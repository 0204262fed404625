"""The leaf: a node's own arena, and its fold. It takes the sum of the pushes to the home and returns with the home's weights.

Other arenas apply the update rule in a fold. A leaf sums its workers' pushes, hands the sum to the home, and takes the weights
that the home grants. It holds the lock of its shard meanwhile, so later pushes wait in their slots. Its workers cannot fold,
because the home has the weights; they end when their agent is lost. A node that trains by itself and meets the others now and
then (DiLoCo, Streaming DiLoCo) has a leaf of another kind.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from fastps.job.nodes import Nodes, outer_update
from fastps.kernels.combining.fold_call import FoldCall, FoldedPush
from fastps.kernels.update.fold import Folding
from fastps.membership.job_memory import JobMemory
from fastps.network.edge import chunk_ranges
from fastps.network.messages import Header, Kind
from fastps.network.monitoring.report import Report
from fastps.network.spare import Spare, VersionBuffers
from fastps.network.sums import Outgoing, Sums, Terms


class Upstream(Protocol):
    """The home as a leaf sees it, in this process or on another node. Every method raises NodeLostError."""

    @property
    def lanes_taken(self) -> int:
        """How many lanes the home has given this node: one more each time that the node was lost and has joined again."""

    @property
    def losses(self) -> int:
        """How many other nodes were lost, as far as this one has heard."""

    def begin(self, weights: torch.Tensor) -> None:
        """Write the weights to begin with, once they have come."""

    def coming(self) -> tuple[int, int]:
        """The range of floats that the next step carries: all of them, or with `local_fragments` the next fragment."""

    def step(self, header: Header, sent: Outgoing | None, before: torch.Tensor, after: torch.Tensor) -> tuple[int, int]:
        """Hand a sum to the home, or a step without one, and write the granted weights into `after`.

        `before` has the weights of the step before. Returns the range of floats that is written: the one that the step carries,
        or all of them for a node that was lost and has joined again.
        """

    def finish(self, after: torch.Tensor) -> None:
        """Make no more steps, wait for the other nodes, and write the final weights into `after`."""

    def check(self) -> None:
        """Raise NodeLostError if the home is lost or has failed."""

    def abort(self, failure: str) -> None:
        """End a step that another thread makes."""

    def leave(self, failure: str | None) -> None:
        """End. The other nodes get `failure` as the reason, if there is one. May be called twice."""


class Leaf:
    """The fold of a leaf arena. A report counts the time of its exchanges."""

    def __init__(self, store: JobMemory, nodes: Nodes, upstream: Upstream, report: Report) -> None:
        self._store = store
        self.nodes = nodes
        self._upstream, self._report = upstream, report
        self._sums = Sums(store)

    def fold(self, call: FoldCall) -> None:
        """Take one version from the home; the function given to Lane.fold_with. Raises NodeLostError."""
        header = Header(Kind.NULL)
        sent: Outgoing | None = None
        if pushes := call.pushes:
            samples = sum(push.samples for push in pushes)
            header = Header(Kind.PUSH, weight=len(pushes), samples=samples, loss=self._sums.mean_loss(pushes))
            sent = partial(self._sums.begin, pushes)
        before, after = self._sums.weights(call.weights_in), self._sums.weights(call.weights_out)
        self._exchange(header, sent, before, after)
        self._store.write_halves(call.weights_out)
        self._store.all_steps(call.state_out)[:] = self._store.all_steps(call.state_in) + 1

    def _exchange(self, header: Header, sent: Outgoing | None, before: torch.Tensor, after: torch.Tensor) -> tuple[int, int]:
        began_ns = self._store.clock.now_ns()
        try:
            return self._upstream.step(header, sent, before, after)
        finally:
            self._report.wait_ns += self._store.clock.now_ns() - began_ns

    def check(self) -> None:
        """Raise NodeLostError if the home is lost or has failed."""
        self._upstream.check()

    def end(self, failure: str | None) -> None:
        """End what is under way: nothing, because a step is a part of a fold."""

    def start(self, spare: Spare) -> None:
        """Begin with the first push: a home waits for no worker that has not attached."""

    def attend(self, spare: Spare) -> None:
        """Do what the workers wait for besides versions: nothing, because a leaf has no other nodes' buffers."""

    def finish(self, spare: Spare) -> None:
        """Wait for the other nodes, and publish the job's final weights."""
        with spare() as buffers:
            self._write_final(buffers)
            buffers.is_made, buffers.advances = True, False

    def _write_final(self, buffers: VersionBuffers) -> None:
        self._upstream.finish(self._sums.weights(buffers.weights_out))
        self._store.write_halves(buffers.weights_out)
        self._store.all_steps(buffers.state_out)[:] = self._store.all_steps(buffers.state_in)


def _difference(before: torch.Tensor, now: torch.Tensor, outs: Sequence[torch.Tensor], begin: int) -> Iterator[torch.Tensor]:
    """What a node has moved, as the chunks of a sum: the weights of the last exchange less those of now."""
    for out in outs:
        for first, last in chunk_ranges(0, len(out)):
            chunk = out[first:last]
            torch.sub(before[begin + first : begin + last], now[begin + first : begin + last], out=chunk)
            yield chunk
        begin += len(out)


class _Done(NamedTuple):
    """The versions that the node has made, and the samples in them."""

    versions: int = 0
    samples: int = 0


class LocalLeaf(Leaf):
    """The fold of a leaf arena whose node makes `local_steps` versions between two exchanges.

    The leaf applies the job's own update rule. Every `local_steps` versions the difference between the home's weights that the
    node took last and its weights now is pushed like a gradient, and the outer rule of the home makes new weights of the
    differences (arXiv 2311.08105, Algorithm 1, lines 11 to 14). The optimizer's state stays on the node. An exchange is part
    of the fold that completes the round, so no worker reads the weights before it.

    With `local_fragments` the model is exchanged one fragment at a time, each every `local_steps` versions. With
    `local_overlap` an exchange takes place during the next versions, and the node takes the home's weights so many versions
    later (arXiv 2501.18512, Algorithm 2). Both then mix the home's weights with those of the node.
    """

    def __init__(self, store: JobMemory, nodes: Nodes, upstream: Upstream, report: Report) -> None:
        super().__init__(store, nodes, upstream, report)
        layout = store.layout
        self._segments = [(each.offset, each.length, each.group) for each in layout.parameters]
        self._taken = self._sums.weights(0).clone()  # the home's weights of the last exchange of each float
        self._received = torch.empty_like(self._taken)
        policy = nodes.policy
        self._period, self._overlap = policy.local_steps // policy.local_fragments, policy.local_overlap
        self._sent = torch.empty_like(self._taken) if self._overlap else None  # those that travel while the node goes on
        self._thread = ThreadPoolExecutor(1, "fastps-exchange") if self._overlap else None
        self._under_way: list[Future[tuple[int, int]]] = []  # one at most
        outer = [outer_update(policy).hyper] * layout.groups
        self._terms = Terms(outer, np.ones(len(layout.parameters), np.bool_))
        self._done = _Done()
        self._begun = _Done()  # at the start of the last exchange
        self._fetched = _Done()  # when all floats were the home's last
        self._exchanged: dict[int, _Done] = {}  # at the start of a fragment's last exchange since, by its first float
        self._losses = 0.0

    def fold(self, call: FoldCall) -> None:
        """Make one version, and exchange with the home if it completes a round. Raises NodeLostError."""
        self._apply(call)
        self._done = _Done(self._done.versions + 1, self._done.samples + sum(push.samples for push in call.pushes))
        if call.pushes:
            self._losses = self._sums.mean_loss(call.pushes)
        weights = self._sums.weights(call.weights_out)
        age = self._done.versions - self._begun.versions
        if age == self._overlap:
            self._take_arrived(weights)
        if age == self._period:
            self._begin_exchange(weights)
        self._store.write_halves(call.weights_out)

    def _apply(self, call: FoldCall) -> None:
        store, rule = self._store, self._store.layout.rule
        weights, weights_out = (self._sums.weights(buffer).numpy() for buffer in (call.weights_in, call.weights_out))
        state, state_out = self._planes(call.state_in), self._planes(call.state_out)
        steps, steps_out = store.all_steps(call.state_in), store.all_steps(call.state_out)
        if not call.pushes:
            for now, then in ((weights, weights_out), (state, state_out), (steps, steps_out)):
                then[:] = now
            return
        Folding(
            rule.number, call.mode, self._segments, [self._push(push) for push in call.pushes],
            weights, state, steps, weights_out, state_out, steps_out,
            scale=call.scale, rate_scale=call.rate_scale, user_rule=rule.address,
        ).run(0, len(weights))  # fmt: skip

    def _planes(self, buffer: int) -> npt.NDArray[np.float32]:
        """All optimizer-state tensors of a state buffer, one row each."""
        floats, count = self._store.layout.buffer_floats, len(self._store.layout.rule.planes)
        if not count:
            return np.zeros((0, floats), np.float32)
        first = self._store.arena.plane_offset(buffer, 0)
        return np.frombuffer(self._store.memory, np.float32, count * floats, first).reshape(count, floats)

    def _push(self, push: FoldedPush) -> tuple[object, list[tuple[float, ...]], list[bool], float, float]:
        hypers, present = self._store.slot_words(push.lane, push.slot)
        gradient = self._sums.slot(push.lane, push.slot).numpy()
        return gradient, [tuple(hyper) for hyper in hypers], present.tolist(), push.scale, push.rate_scale

    def _begin_exchange(self, weights: torch.Tensor) -> None:
        """Push what the next fragment has moved, and take the home's weights: now, or `local_overlap` versions later.

        Every node counts once in a mean, however many workers it has: it is one replica of the paper.
        """
        first, last = self._upstream.coming()
        samples = self._done.samples - self._last_exchange(first).samples
        header = Header(Kind.PUSH, weight=1, samples=samples, loss=self._losses)
        self._begun = self._done
        if self._thread is None or self._sent is None:
            self._take(self._step(header, weights), weights)
            return
        self._sent[first:last] = weights[first:last]  # later versions change the buffer
        self._under_way.append(self._thread.submit(self._step, header, self._sent))

    def _step(self, header: Header, now: torch.Tensor) -> tuple[int, int]:
        def moved(outs: Sequence[torch.Tensor], first: int) -> tuple[Terms, Iterator[torch.Tensor]]:
            return self._terms, _difference(self._taken, now, outs, first)

        return self._exchange(header, moved, self._taken, self._received)

    def _take(self, span: tuple[int, int], weights: torch.Tensor) -> None:
        """Take the home's weights that have come, mixed with the node's own by `local_mix`."""
        first, last = span
        self._exchanged[first] = self._begun
        if last - first == len(weights):
            self._fetched, self._exchanged = self._begun, {}
        home, own = self._received[first:last], weights[first:last]
        self._taken[first:last] = home
        torch.lerp(own, home, self.nodes.policy.local_mix, out=own)

    def _take_arrived(self, weights: torch.Tensor) -> None:
        if self._under_way:
            self._take(self._under_way.pop().result(), weights)

    def _last_exchange(self, first: int) -> "_Done":
        return self._exchanged.get(first, self._fetched)

    def check(self) -> None:
        """Raise the error of the exchange under way, if it has ended with one, or that of the home."""
        if not self._under_way:  # its own thread notices that
            super().check()
        elif self._under_way[0].done() and self._under_way[0].exception() is not None:
            self._under_way.pop().result()

    def end(self, failure: str | None) -> None:
        """End an exchange under way."""
        if self._under_way:
            self._upstream.abort(failure or "the node has left")
            wait(self._under_way, 2 * self.nodes.policy.timeout_s)
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    def _write_final(self, buffers: VersionBuffers) -> None:
        """Push what has moved since the last exchange, and write the job's final weights and this node's state."""
        own = self._sums.weights(buffers.weights_in).clone()
        self._take_arrived(own)
        while self._last_exchange(self._upstream.coming()[0]).versions < self._done.versions:
            self._begin_exchange(own)
            self._take_arrived(own)
        self._planes(buffers.state_out)[:] = self._planes(buffers.state_in)
        super()._write_final(buffers)
